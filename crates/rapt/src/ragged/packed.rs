//! Tensors that hold the rows of many sequences: what holds of all of them, and the request of each.

use std::ops::Range;

use rapt_core::{
    Codes, CodesSpec, DropoutSeed, Error, Granularity, Options, Qkv, Queue, Result, Shape, Spec, TensorLayout, Tensors,
    View, ViewMut,
};

use super::rows::{Parts, SequenceRows};
use super::{Sequence, host, in_host_memory, prove_apart};
use crate::Engine;

/// The tensors of [`Engine::packed_attention`].
#[derive(Debug)]
pub struct PackedTensors<'a> {
    /// Queries of all sequences, `[rows, num_q_heads, head_dim]`.
    pub q: View<'a>,
    /// Keys, `[rows, num_kv_heads, head_dim]`.
    pub k: View<'a>,
    /// Values, `[rows, num_kv_heads, head_dim_v]`.
    pub v: View<'a>,
    /// What makes numbers of those of q, k and v that are codes, as in [`VarlenTensors`](super::VarlenTensors::codes).
    pub codes: Qkv<Option<Box<Codes<'a>>>>,
    /// One more logit per head, `[num_q_heads]`.
    pub sinks: Option<View<'a>>,
    /// ALiBi slopes, `[num_q_heads]`.
    pub alibi_slopes: Option<View<'a>>,
    /// Which weights are dropped, where the options drop some: sequence `n` is batch entry `n`.
    pub dropout: Option<DropoutSeed>,
    /// Where the result goes, `[rows of q, num_q_heads, head_dim_v]`.
    pub out: ViewMut<'a>,
    /// Where the log of the sum of exponentials goes, `[num_q_heads, rows of q]`.
    pub lse: Option<ViewMut<'a>>,
}

const RANK: &str = "sequences that lie one after another are [total, heads, head_dim]";

/// That q, k and v have three dimensions; answers their sizes.
pub(super) fn ranks(of: [&View<'_>; 3]) -> Result<[[usize; 3]; 3]> {
    for (tensor, view) in ["q", "k", "v"].into_iter().zip(of) {
        if view.shape().len() != 3 {
            let (got, shape) = (view.shape().len(), *view.shape());
            return Err(Error::Rank { tensor, got, shape, allowed: RANK });
        }
    }
    Ok(of.map(|view| std::array::from_fn(|d| view.shape()[d])))
}

/// That outputs have the sizes that follow from q, k and v, which have three dimensions.
pub(super) fn check_outputs(
    of: [&View<'_>; 3],
    v_codes: Option<&Codes<'_>>,
    out: &ViewMut<'_>,
    lse: Option<&ViewMut<'_>>,
) -> Result<()> {
    let [[total, heads, _], _, [.., stored]] = ranks(of)?;
    let of_codes = |codes: &Codes<'_>| codes.head_dim.unwrap_or(stored.saturating_mul(codes.format.codes_per_byte()));
    let dim_v = v_codes.map_or(stored, of_codes);
    let shape_is = |tensor, out: &ViewMut<'_>, expected: Shape| {
        let got = *out.shape();
        if got == expected { Ok(()) } else { Err(Error::ShapeMismatch { tensor, got, expected }) }
    };
    shape_is("out", out, [total, heads, dim_v].into())?;
    lse.map_or(Ok(()), |lse| shape_is("lse", lse, [heads, total].into()))
}

impl<'a> PackedTensors<'a> {
    /// What holds of all sequences together.
    pub(super) fn check(&self) -> Result<()> {
        check_outputs([&self.q, &self.k, &self.v], self.codes.v.as_deref(), &self.out, self.lse.as_ref())
    }

    /// That outputs share no byte with what is read (`others` among it), nor with one another.
    fn prove_outputs_apart(&self, others: &[(&'static str, &View<'_>)]) -> Result<()> {
        let given = || self.inputs().into_iter().chain(others.iter().map(|(name, view)| (*name, Some(*view))));
        prove_apart("out", &self.out, given())?;
        let Some(lse) = &self.lse else { return Ok(()) };
        prove_apart("lse", lse, given())?;
        prove_apart("lse", lse, [("out", Some(&self.out.as_view()))])
    }

    /// What is read of all sequences.
    fn inputs(&self) -> [(&'static str, Option<&View<'_>>); 11] {
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
            ("sinks", self.sinks.as_ref()),
            ("alibi_slopes", self.alibi_slopes.as_ref()),
        ]
    }

    /// The request of each sequence of host memory, and its tensors. `others` are what else the call reads.
    ///
    /// # Errors
    /// As [`Engine::packed_attention`].
    pub(super) fn cut(
        self,
        rows: &SequenceRows,
        options: &Options,
        others: &[(&'static str, &View<'_>)],
    ) -> Result<Requests<'a>> {
        self.check()?;
        in_host_memory("a call of varlen_attention", self.q.device())?;
        rows.check([&self.q, &self.k, &self.v].map(|view| view.shape()[0]))?;
        self.prove_outputs_apart(others)?;
        let PackedTensors { q, k, v, codes, sinks, alibi_slopes, dropout, out, lse } = self;
        let options = Options { layout: TensorLayout::Bshd, ..*options };
        if let Some(seed) = &dropout {
            seed.check(rows.sequences(), q.device())?;
        }
        // What is wrong with codes is told of the whole tensors, before they are cut.
        let of_all = match codes.is_empty() {
            true => Qkv::default(),
            false => Spec::builder(&q, &k, &v, &options).codes(codes.as_deref()).build()?.codes,
        };
        let (of, of_all) = (codes.as_deref(), of_all.as_deref());
        let outs = Parts::of("out", out, 0, &rows.q)?;
        let lses = lse.map(|lse| Parts::of("lse", lse, 1, &rows.q)).transpose()?;
        let (lses, lse_gaps) = lses.map_or((None, Vec::new()), |parts| (Some(parts.own.into_iter()), parts.gaps));
        let mut lses = lses;
        let count = rows.sequences();
        let (mut specs, mut tensors) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (n, out) in outs.own.into_iter().enumerate() {
            let (of_q, of_k, of_v) = (&rows.q[n], &rows.k[n], &rows.v[n]);
            let lse = lses.as_mut().and_then(Iterator::next);
            let codes = Qkv {
                q: codes_of(of.q, of_all.q, of_q),
                k: codes_of(of.k, of_all.k, of_k),
                v: codes_of(of.v, of_all.v, of_v),
            };
            let (q, k, v) = (q.narrow(0, of_q), k.narrow(0, of_k), v.narrow(0, of_v));
            let dropout = dropout.map(|seed| seed.after(n));
            let sequence = Sequence { q, k, v, codes, sinks, alibi_slopes, dropout, pages: None };
            specs.push(sequence.spec(&out, lse.as_ref(), &options)?);
            tensors.push(sequence.tensors(out, lse));
        }
        Ok(Requests { specs, tensors, out_gaps: outs.gaps, lse_gaps })
    }
}

/// The requests of all sequences, and the rows of none.
pub(super) struct Requests<'a> {
    pub(super) specs: Vec<Spec>,
    pub(super) tensors: Vec<Tensors<'a>>,
    out_gaps: Vec<ViewMut<'a>>,
    lse_gaps: Vec<ViewMut<'a>>,
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

impl Engine {
    /// Attention of each sequence to its own keys, wherever its rows lie: as [`varlen_attention`](Engine::varlen_attention). Rows of no
    /// sequence become zeros, and −inf in lse.
    ///
    /// # Errors
    /// Any [`Error`]; nothing is written before everything is proven.
    pub fn packed_attention(
        &self,
        tensors: PackedTensors<'_>,
        rows: &SequenceRows,
        options: &Options,
        queue: &Queue<'_>,
    ) -> Result<()> {
        self.run_requests(tensors.cut(rows, options, &[])?, queue)
    }

    /// Runs the requests of all sequences, and fills the rows of none.
    pub(super) fn run_requests(&self, cut: Requests<'_>, queue: &Queue<'_>) -> Result<()> {
        let Requests { specs, tensors, out_gaps, lse_gaps } = cut;
        self.run_each(&self.plan_each(&specs, host(queue)?.threads())?, tensors, queue)?;
        out_gaps.into_iter().try_for_each(|gap| rapt_cpu::fill("out", gap, 0.0))?;
        lse_gaps.into_iter().try_for_each(|gap| rapt_cpu::fill("lse", gap, f64::NEG_INFINITY))
    }
}
