//! Scaled dot-product attention.
//!
//! `O = softmax(scale · Q Kᵀ + mask) V`, row by row in f64, rounded once. What is not seen counts for nothing, not even NaN. A row of
//! which nothing is seen is 0, as is one whose scores are all −∞. `is_causal` lets query `i` see keys `0..=i`: the upper left corner is fixed, as in PyTorch. With `enable_gqa` each head of keys and
//! values serves consecutive query heads.
//!
//! The result lies as the query does where PyTorch's CPU takes its flash kernel, and row-major elsewhere.
//!
//! Deliberately absent: dropout.

use rapt_core::DType;

use super::linear::dot;
use super::shape::{
    bounded, count, expand_places, expand_strides, fresh, like, misfit, need_float, need_same, places, refuse,
    row_major,
};
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// Attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// The queries, `[..., num_q_heads, q_len, head_dim]`.
    pub query: ValueId,
    /// The keys, `[..., num_kv_heads, kv_len, head_dim]`.
    pub key: ValueId,
    /// The values, `[..., num_kv_heads, kv_len, head_dim_v]`.
    pub value: ValueId,
    /// What is added to the scores, or, as booleans, which of them count.
    pub attn_mask: Option<ValueId>,
    /// Whether query `i` sees keys `0..=i` alone.
    pub is_causal: bool,
    /// The factor of the scores; `None` is `1/√head_dim`.
    pub scale: Option<f64>,
    /// Whether there are fewer heads of keys and values.
    pub enable_gqa: bool,
    /// Whether the kernel was called by name: the logarithms of the sums are a result too.
    pub flash: bool,
}

/// Attention in numbers.
struct Sizes {
    /// All dimensions before the last two.
    batch: Vec<i64>,
    q_len: i64,
    kv_len: i64,
    head_dim: i64,
    head_dim_v: i64,
}

impl Attention {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Attention, OpError>> {
        Some(match target {
            "torch.ops.aten.scaled_dot_product_attention.default" => attention(args, false),
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default" => attention(args, true),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let sizes = self.sizes(shapes)?;
        let query = shapes.meta(self.query)?;
        let shape = [&sizes.batch[..], &[sizes.q_len, sizes.head_dim_v]].concat();
        bounded(&[&sizes.batch[..], &[sizes.q_len, sizes.kv_len]].concat())?;
        if self.flash && query.shape != shape {
            return misfit(format!("a query of shape {:?} for a result of {shape:?}", query.shape));
        }
        if self.flash || (query.shape == shape && self.takes_flash(shapes, &sizes)?) {
            let mut outs = vec![Out::Fresh(like(query, query.dtype))];
            if self.flash {
                let [batch, heads, q_len, _] = shape[..] else { return misfit("four dimensions are expected") };
                let dtype = if query.dtype == DType::F64 { DType::F64 } else { DType::F32 };
                let mut lse = Meta::contiguous(dtype, &[batch, q_len, heads]);
                lse.shape.swap(1, 2);
                lse.strides.swap(1, 2);
                outs.push(Out::Fresh(lse));
            }
            return Ok(outs);
        }
        Ok(vec![fresh(query.dtype, &shape)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    // for each row: s = scale · q Kᵀ + mask; p = exp(s − max s); o = p V / Σ p
    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let sizes = self.sizes(eval)?;
        let (query, key, value) = (eval.tensor(self.query)?, eval.tensor(self.key)?, eval.tensor(self.value)?);
        let (q, k, v) = (query.floats(), key.floats(), value.floats());
        let q_at = batch_places(&query.meta.shape, &sizes.batch, false)?;
        let k_at = batch_places(&key.meta.shape, &sizes.batch, self.enable_gqa)?;
        let v_at = batch_places(&value.meta.shape, &sizes.batch, self.enable_gqa)?;
        let mask = self.mask(eval, &sizes)?;
        let (q_len, kv_len) = (count(sizes.q_len), count(sizes.kv_len));
        let (head_dim, head_dim_v) = (count(sizes.head_dim), count(sizes.head_dim_v));
        let scale = self.scale.unwrap_or(1.0 / (sizes.head_dim as f64).sqrt());
        let (mut o, mut lse) = (Vec::new(), Vec::new());
        for head in 0..q_at.len() {
            for i in 0..q_len {
                let row = &q[q_at[head] + i * head_dim..][..head_dim];
                // What is not seen does not count, not even NaN.
                let added = |j: usize| mask.as_ref().map_or(0.0, |m| m[(head * q_len + i) * kv_len + j]);
                let is_seen = |j: &usize| (!self.is_causal || *j <= i) && added(*j) != f64::NEG_INFINITY;
                let seen: Vec<usize> = (0..kv_len).filter(is_seen).collect();
                let score = |&j: &usize| scale * dot(row, &k[k_at[head] + j * head_dim..][..head_dim]) + added(j);
                let mut p: Vec<f64> = seen.iter().map(score).collect();
                let (sum, log) = exponentials(&mut p);
                lse.push(log);
                o.extend((0..head_dim_v).map(|c| {
                    let acc_o: f64 = seen.iter().zip(&p).map(|(j, p)| p * v[v_at[head] + j * head_dim_v + c]).sum();
                    if sum == 0.0 { 0.0 } else { acc_o / sum }
                }));
            }
        }
        outs[0].write_floats(eval.precision(), o);
        if let Some(out) = outs.get(1) {
            out.write_floats(eval.precision(), lse);
        }
        Ok(())
    }

    /// The mask as numbers to add, for each score in row-major order.
    fn mask(&self, eval: &dyn Eval, sizes: &Sizes) -> Result<Option<Vec<f64>>, OpError> {
        let Some(mask) = self.attn_mask else { return Ok(None) };
        let mask = eval.tensor(mask)?;
        let scores = [&sizes.batch[..], &[sizes.q_len, sizes.kv_len]].concat();
        let x = mask.floats();
        let boolean = mask.meta.dtype == DType::Bool;
        let one = |p: usize| match x[p] {
            0.0 if boolean => f64::NEG_INFINITY,
            _ if boolean => 0.0,
            x => x,
        };
        Ok(Some(expand_places(&mask.meta.shape, &scores)?.into_iter().map(one).collect()))
    }

    fn sizes(&self, shapes: &dyn Shapes) -> Result<Sizes, OpError> {
        let (q, k, v) = (shapes.meta(self.query)?, shapes.meta(self.key)?, shapes.meta(self.value)?);
        need_float("attention", q.dtype)?;
        need_same(q.dtype, k.dtype)?;
        need_same(q.dtype, v.dtype)?;
        let text = || format!("attention of shapes {:?}, {:?} and {:?}", q.shape, k.shape, v.shape);
        let ([q_batch @ .., q_len, head_dim], [k_batch @ .., kv_len, k_dim], [v_batch @ .., v_len, head_dim_v]) =
            (&q.shape[..], &k.shape[..], &v.shape[..])
        else {
            return misfit(text());
        };
        if head_dim != k_dim || kv_len != v_len {
            return misfit(text());
        }
        let batch = if self.enable_gqa {
            let num_q_heads = q_batch.last().copied().unwrap_or(0);
            let as_q_heads = |batch: &[i64]| match batch {
                [lead @ .., heads] if *heads > 0 && num_q_heads % heads == 0 => Ok([lead, &[num_q_heads]].concat()),
                _ => misfit(text()),
            };
            strides::broadcast([q_batch, &as_q_heads(k_batch)?[..], &as_q_heads(v_batch)?[..]])?
        } else {
            strides::broadcast([q_batch, k_batch, v_batch])?
        };
        if let Some(mask) = self.attn_mask {
            let mask = shapes.meta(mask)?;
            if self.is_causal {
                return refuse("is_causal", "true", "there is an attn_mask too");
            }
            if mask.dtype != DType::Bool && mask.dtype != DType::F32 {
                need_same(q.dtype, mask.dtype)?;
            }
            expand_strides(&mask.shape, &mask.strides, &[&batch[..], &[*q_len, *kv_len]].concat())?;
        }
        Ok(Sizes { batch, q_len: *q_len, kv_len: *kv_len, head_dim: *head_dim, head_dim_v: *head_dim_v })
    }

    /// Whether PyTorch takes its flash kernel on a CPU: three or four dimensions, each row of queries, keys and values in
    /// one piece, one batch and one head size, something to attend to, and a mask of two dimensions or of the query's.
    fn takes_flash(&self, shapes: &dyn Shapes, sizes: &Sizes) -> Result<bool, OpError> {
        let (q, k, v) = (shapes.meta(self.query)?, shapes.meta(self.key)?, shapes.meta(self.value)?);
        let rank = q.rank();
        let rows = [q, k, v].iter().all(|m| m.rank() == rank && m.strides.last() == Some(&1));
        let one_batch = rank == 3 || (k.shape.first() == q.shape.first() && v.shape.first() == q.shape.first());
        let heads = |m: &Meta| m.rank().checked_sub(3).map(|d| m.shape[d]);
        let mask = match self.attn_mask {
            Some(mask) => {
                let rank_of_mask = shapes.meta(mask)?.rank();
                rank_of_mask == 2 || rank_of_mask == rank
            }
            None => true,
        };
        Ok(matches!(rank, 3 | 4)
            && rows
            && one_batch
            && heads(k) == heads(v)
            && mask
            && sizes.head_dim == sizes.head_dim_v
            && sizes.q_len > 0
            && sizes.kv_len > 0)
    }
}

/// The exponentials of a row of scores less its maximum, their sum, and the logarithm of the sum of exponentials. Of no score, and
/// where every score is −∞, the sum is 0 and its logarithm −∞.
fn exponentials(s: &mut [f64]) -> (f64, f64) {
    let row_max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if s.iter().all(|&s| s == f64::NEG_INFINITY) {
        return (0.0, f64::NEG_INFINITY);
    }
    for s in s.iter_mut() {
        *s = (*s - row_max).exp();
    }
    let row_sum: f64 = s.iter().sum();
    (row_sum, row_max + row_sum.ln())
}

/// Where each matrix of the batch starts. With groups, consecutive heads of the result share a head of the operand.
fn batch_places(shape: &[i64], batch: &[i64], groups: bool) -> Result<Vec<usize>, OpError> {
    let lead = shape.len() - 2;
    let strides = row_major(shape);
    let (shape, strides) = (&shape[..lead], &strides[..lead]);
    let ([outer @ .., num_q_heads], [lead @ .., heads], true) = (batch, shape, groups) else {
        return Ok(places(batch, &expand_strides(shape, strides, batch)?));
    };
    let group_size = num_q_heads / heads.max(&1);
    let split = [outer, &[*heads, group_size]].concat();
    let mut all = expand_strides(lead, &strides[..lead.len()], outer)?;
    all.extend([strides[lead.len()], 0]);
    Ok(places(&split, &all))
}

fn attention(args: &Args<'_>, flash: bool) -> Result<Attention, OpError> {
    let dropout = args.opt_float("dropout_p")?.unwrap_or(0.0);
    if dropout != 0.0 {
        return refuse("dropout_p", dropout.to_string(), "export the model after model.eval()");
    }
    Ok(Attention {
        query: args.tensor("query")?,
        key: args.tensor("key")?,
        value: args.tensor("value")?,
        attn_mask: args.opt_tensor("attn_mask")?,
        is_causal: args.bool_or("is_causal", false)?,
        scale: args.opt_float("scale")?,
        enable_gqa: !flash && args.bool_or("enable_gqa", false)?,
        flash,
    })
}
