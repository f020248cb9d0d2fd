//! Sequences that lie one after another.

use std::ops::Range;

use rapt_core::{
    Codes, CodesSpec, Error, Granularity, Options, Qkv, Queue, Result, Shape, Spec, TensorLayout, Tensors, View,
    ViewMut, split,
};

use super::{Sequence, host, in_host_memory, lengths, prove_apart};
use crate::Engine;

/// The tensors of [`Engine::varlen_attention`].
#[derive(Debug)]
pub struct VarlenTensors<'a> {
    /// Queries of all sequences, `[total_q, num_q_heads, head_dim]`.
    pub q: View<'a>,
    /// Keys, `[total_kv, num_kv_heads, head_dim]`.
    pub k: View<'a>,
    /// Values, `[total_kv, num_kv_heads, head_dim_v]`.
    pub v: View<'a>,
    /// What makes numbers of those of q, k and v that are codes. A factor has a row for each of theirs, `[total, heads]` (token) or
    /// `[total, heads, blocks]`, or is of all sequences: `[]` (tensor), `[heads]` (head), `[1, heads, head_dim]` (channel).
    pub codes: Qkv<Option<Box<Codes<'a>>>>,
    /// Where queries of each sequence begin: int32 `[sequences + 1]`, from 0 to total_q.
    pub cu_seqlens_q: View<'a>,
    /// Where its keys begin: int32 `[sequences + 1]`, from 0 to total_kv.
    pub cu_seqlens_kv: View<'a>,
    /// One more logit per head, `[num_q_heads]`.
    pub sinks: Option<View<'a>>,
    /// ALiBi slopes, `[num_q_heads]`.
    pub alibi_slopes: Option<View<'a>>,
    /// Where the result goes, `[total_q, num_q_heads, head_dim_v]`.
    pub out: ViewMut<'a>,
    /// Where the log of the sum of exponentials goes, `[num_q_heads, total_q]`.
    pub lse: Option<ViewMut<'a>>,
}

const RANK: &str = "sequences that lie one after another are [total, heads, head_dim]";

impl VarlenTensors<'_> {
    /// What holds of all sequences together.
    pub(super) fn check(&self) -> Result<()> {
        for (tensor, view) in [("q", &self.q), ("k", &self.k), ("v", &self.v)] {
            if view.shape().len() != 3 {
                let (got, shape) = (view.shape().len(), *view.shape());
                return Err(Error::Rank { tensor, got, shape, allowed: RANK });
            }
        }
        let ([total, heads, _], [keys, ..], [values, _, stored]) = (sizes(&self.q), sizes(&self.k), sizes(&self.v));
        let dim_v = self
            .codes
            .v
            .as_deref()
            .map_or(stored, |codes| codes.head_dim.unwrap_or(stored.saturating_mul(codes.format.codes_per_byte())));
        if keys != values {
            return Err(Error::SizeMismatch { tensor: "v", size: "total_kv", got: values, other: "k", expected: keys });
        }
        let shape_is = |tensor, out: &ViewMut<'_>, expected: Shape| {
            let got = *out.shape();
            if got == expected { Ok(()) } else { Err(Error::ShapeMismatch { tensor, got, expected }) }
        };
        shape_is("out", &self.out, [total, heads, dim_v].into())?;
        self.lse.as_ref().map_or(Ok(()), |lse| shape_is("lse", lse, [heads, total].into()))
    }

    /// That outputs share no byte with what is read, nor with one another.
    pub(super) fn prove_outputs_apart(&self) -> Result<()> {
        prove_apart("out", &self.out, self.inputs())?;
        let Some(lse) = &self.lse else { return Ok(()) };
        prove_apart("lse", lse, self.inputs())?;
        prove_apart("lse", lse, [("out", Some(&self.out.as_view()))])
    }

    /// What is read of all sequences.
    pub(super) fn inputs(&self) -> [(&'static str, Option<&View<'_>>); 13] {
        let Qkv { q, k, v } = self.codes.as_deref();
        [
            ("q", Some(&self.q)),
            ("k", Some(&self.k)),
            ("v", Some(&self.v)),
            ("q_descale", descale_of(q)),
            ("k_descale", descale_of(k)),
            ("v_descale", descale_of(v)),
            ("q_zero_point", zero_point_of(q)),
            ("k_zero_point", zero_point_of(k)),
            ("v_zero_point", zero_point_of(v)),
            ("cu_seqlens_q", Some(&self.cu_seqlens_q)),
            ("cu_seqlens_kv", Some(&self.cu_seqlens_kv)),
            ("sinks", self.sinks.as_ref()),
            ("alibi_slopes", self.alibi_slopes.as_ref()),
        ]
    }
}

fn descale_of<'v, 'a>(codes: Option<&'v Codes<'a>>) -> Option<&'v View<'a>> {
    codes.map(|codes| &codes.descale)
}

fn zero_point_of<'v, 'a>(codes: Option<&'v Codes<'a>>) -> Option<&'v View<'a>> {
    codes.and_then(|codes| codes.zero_point.as_ref())
}

/// What makes numbers of the `rows` of one sequence, of what does so for those of all.
fn codes_of<'a>(codes: Option<&Codes<'a>>, of_all: Option<&CodesSpec>, rows: &Range<usize>) -> Option<Box<Codes<'a>>> {
    let (codes, of_all) = codes.zip(of_all)?;
    let has_rows = matches!(of_all.granularity, Granularity::Token | Granularity::Block(_));
    let part = |view: View<'a>| if has_rows { view.narrow(0, rows) } else { view };
    Some(Box::new(Codes { descale: part(codes.descale), zero_point: codes.zero_point.map(part), ..*codes }))
}

/// The sizes of a tensor whose rank was checked.
fn sizes(view: &View<'_>) -> [usize; 3] {
    std::array::from_fn(|d| view.shape()[d])
}

/// The rows of each sequence, of where they end.
fn ranges(ends: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let begins = std::iter::once(0).chain(ends.iter().copied());
    begins.zip(ends).map(|(begin, &end)| begin..end)
}

impl Engine {
    /// Attention of each sequence to its own keys: what [`attention_into`](Engine::attention_into) gives for each alone, bit for bit.
    ///
    /// A sequence without keys gets zeros, and −inf in lse. `options.layout` is not read: the layout is that of the tensors. Codes are served
    /// as in each call alone, with [`Compute::Int8`](rapt_core::Compute::Int8) too.
    ///
    /// # Errors
    /// Any [`Error`]; nothing is written before everything is proven. [`Error::Length`] for offsets that begin past 0, fall, or do not end
    /// with the last row; [`Error::Unsupported`] outside host memory, where
    /// [`varlen_attention_async`](Engine::varlen_attention_async) runs.
    pub fn varlen_attention(&self, tensors: VarlenTensors<'_>, options: &Options, queue: &Queue<'_>) -> Result<()> {
        let (specs, sequences) = tensors.cut(options)?;
        self.run_each(&self.plan_each(&specs, host(queue)?.threads())?, sequences, queue)
    }
}

impl<'a> VarlenTensors<'a> {
    /// The request of each sequence of host memory, and its tensors.
    ///
    /// # Errors
    /// As [`Engine::varlen_attention`].
    pub(super) fn cut(self, options: &Options) -> Result<(Vec<Spec>, Vec<Tensors<'a>>)> {
        let tensors = self;
        tensors.check()?;
        in_host_memory("a call of varlen_attention", tensors.q.device())?;
        let q_ends = lengths::ends("cu_seqlens_q", &tensors.cu_seqlens_q, tensors.q.shape()[0])?;
        let kv_ends = lengths::ends("cu_seqlens_kv", &tensors.cu_seqlens_kv, tensors.k.shape()[0])?;
        if q_ends.len() != kv_ends.len() {
            let (got, expected) = (kv_ends.len(), q_ends.len());
            let (tensor, other) = ("cu_seqlens_kv", "cu_seqlens_q");
            return Err(Error::SizeMismatch { tensor, size: "sequences", got, other, expected });
        }
        tensors.prove_outputs_apart()?;
        let VarlenTensors { q, k, v, codes, sinks, alibi_slopes, out, lse, .. } = tensors;
        let options = Options { layout: TensorLayout::Bshd, ..*options };
        // What is wrong with codes is told of the whole tensors, before they are cut.
        let of_all = match codes.is_empty() {
            true => Qkv::default(),
            false => Spec::builder(&q, &k, &v, &options).codes(codes.as_deref()).build()?.codes,
        };
        let (of, of_all) = (codes.as_deref(), of_all.as_deref());
        let outs = split("out", out, 0, &q_ends)?;
        let lses = lse.map(|lse| split("lse", lse, 1, &q_ends)).transpose()?;
        let mut lses = lses.map(Vec::into_iter);
        let (mut specs, mut sequences) = (Vec::with_capacity(q_ends.len()), Vec::with_capacity(q_ends.len()));
        for ((rows, keys), out) in ranges(&q_ends).zip(ranges(&kv_ends)).zip(outs) {
            let (q, k, v) = (q.narrow(0, &rows), k.narrow(0, &keys), v.narrow(0, &keys));
            let lse = lses.as_mut().and_then(Iterator::next);
            let codes = Qkv {
                q: codes_of(of.q, of_all.q, &rows),
                k: codes_of(of.k, of_all.k, &keys),
                v: codes_of(of.v, of_all.v, &keys),
            };
            let sequence = Sequence { q, k, v, codes, sinks, alibi_slopes, pages: None };
            specs.push(sequence.spec(&out, lse.as_ref(), &options)?);
            sequences.push(sequence.tensors(out, lse));
        }
        Ok((specs, sequences))
    }
}
