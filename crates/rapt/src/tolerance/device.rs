//! A tolerance on an NVIDIA GPU.
//!
//! ```text
//! judge   rapt_cuda's `deviations`: two launches, and the figures of every head read back. This waits for the stream, once.
//! pieces  batch entries that stand alike, key heads side by side that do: each on the codes or on the originals
//! run     a plain call for each piece, on parts of the tensors where they lie
//! ```
//! What decides a kernel's tiles and splits is no number of heads and no batch, so that a piece has the bits of the same heads of a plain call.
//! Deliberately absent: CUDA graphs, in which nothing runs that the host could wait for.

use std::ops::Range;
use std::sync::Arc;

use rapt_core::{
    Codes, Device, DeviceMemory, Error, Operands, Options, Plan, Qkv, Queue, Result, Spec, Tensors, View, ViewMut,
};

use super::{
    Backing, Errors, Inputs, JudgedHead, Judgement, Tolerance, check, check_originals, judgement_of, on_originals,
    spec_of_originals,
};
use crate::{Engine, spec_of};

/// Heads that run by one call.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    batch: Range<usize>,
    kv_heads: Range<usize>,
    on_codes: bool,
}

/// All heads of a judgement, in as few pieces as batch entries and heads side by side allow.
fn pieces(judgement: &Judgement, batch: usize, num_q_heads: usize, group_size: usize) -> Vec<Piece> {
    let stands =
        |entry: usize, kv_head: usize| judgement.heads[entry * num_q_heads + kv_head * group_size].is_quantized;
    let num_kv_heads = num_q_heads / group_size.max(1);
    let is_alike = |a: usize, b: usize| (0..num_kv_heads).all(|head| stands(a, head) == stands(b, head));
    let (mut all, mut from) = (Vec::new(), 0);
    while from < batch {
        let end = (from + 1..batch).find(|entry| !is_alike(from, *entry)).unwrap_or(batch);
        let mut first = 0;
        while first < num_kv_heads {
            let on_codes = stands(from, first);
            let last = (first + 1..num_kv_heads).find(|head| stands(from, *head) != on_codes).unwrap_or(num_kv_heads);
            all.push(Piece { batch: from..end, kv_heads: first..last, on_codes });
            first = last;
        }
        from = end;
    }
    all
}

/// Some heads of some batch entries, of tensors that have as many dimensions as q.
struct Part {
    rank: usize,
    batch: Range<usize>,
    q_heads: Range<usize>,
    kv_heads: Range<usize>,
}

impl Part {
    fn new(piece: &Piece, rank: usize, group_size: usize) -> Self {
        let Range { start, end } = piece.kv_heads;
        let (batch, q_heads) = (piece.batch.clone(), start * group_size..end * group_size);
        Part { rank, batch, q_heads, kv_heads: start..end }
    }

    /// Of a tensor that begins with batch and heads, as far as q does.
    fn of<'a>(&self, view: &View<'a>, heads: &Range<usize>) -> View<'a> {
        match self.rank {
            4.. => view.narrow(0, &self.batch).narrow(1, heads),
            3 => view.narrow(0, heads),
            _ => *view,
        }
    }

    /// Of what makes numbers of the codes of K or V: one factor for all is that of each head.
    fn of_codes<'a>(&self, codes: &Codes<'a>) -> Codes<'a> {
        let of = |view: &View<'a>| if view.shape().is_empty() { *view } else { self.of(view, &self.kv_heads) };
        Codes { descale: of(&codes.descale), zero_point: codes.zero_point.as_ref().map(of), ..*codes }
    }

    /// Of a mask, whose dimensions are counted from its last, and which all batch entries or heads may share.
    fn of_mask<'a>(&self, mask: &View<'a>) -> View<'a> {
        let mut mask = *mask;
        for (from_last, range) in [(3, &self.q_heads), (4, &self.batch)] {
            if let Some(dim) = mask.shape().len().checked_sub(from_last).filter(|dim| mask.shape()[*dim] > 1) {
                mask = mask.narrow(dim, range);
            }
        }
        mask
    }

    /// Gives `then` the tensors of these heads.
    fn with<'a, T>(
        &self,
        inputs: &Inputs<'a>,
        [k, v]: [View<'a>; 2],
        on_codes: bool,
        out: &mut ViewMut<'_>,
        lse: Option<&mut ViewMut<'_>>,
        then: impl FnOnce(Tensors<'_>) -> Result<T>,
    ) -> Result<T> {
        let codes = |of: &Option<Box<Codes<'a>>>| {
            of.as_deref().filter(|_| on_codes).map(|codes| Box::new(self.of_codes(codes)))
        };
        let per_head = |view: Option<View<'a>>| view.map(|view| view.narrow(0, &self.q_heads));
        let (batch, heads) = match self.rank {
            4.. => (self.batch.clone(), Some((1, self.q_heads.clone()))),
            3 => (self.q_heads.clone(), None),
            _ => (0..out.shape().first().copied().unwrap_or(0), None),
        };
        let mut of_batch = out.narrow(0, &batch);
        let out = match &heads {
            Some((dim, heads)) => of_batch.narrow(*dim, heads),
            None => of_batch,
        };
        let mut lse_of_batch = lse.map(|lse| lse.narrow(0, &batch));
        let lse = match (&mut lse_of_batch, &heads) {
            (Some(lse), Some((dim, heads))) => Some(lse.narrow(*dim, heads)),
            _ => lse_of_batch,
        };
        then(Tensors {
            codes: Qkv { q: None, k: codes(&inputs.codes.k), v: codes(&inputs.codes.v) },
            mask: inputs.mask.as_ref().map(|mask| self.of_mask(mask)),
            sinks: per_head(inputs.sinks),
            alibi_slopes: per_head(inputs.alibi_slopes),
            lse,
            ..Tensors::new(
                self.of(&inputs.q, &self.q_heads),
                self.of(&k, &self.kv_heads),
                self.of(&v, &self.kv_heads),
                out,
            )
        })
    }
}

/// The stream of `queue`, which is one of the tensors' device.
fn stream_of(queue: &Queue<'_>, device: Device) -> Result<(u32, usize)> {
    match *queue {
        Queue::Cuda { device: index, stream } if device == Device::Cuda(index) => Ok((index, stream)),
        Queue::Cuda { device: index, .. } => {
            Err(Error::DeviceMismatch { tensor: "queue", expected: device, got: Device::Cuda(index) })
        }
        _ => Err(Error::unsupported("this queue", "figures are read from a stream of an NVIDIA GPU", "Queue::Cuda")),
    }
}

/// What was measured, in memory of the device.
fn errors_of<'a>(backing: Option<Backing<'a>>) -> Option<View<'a>> {
    match backing?.errors {
        Errors::Device(view) => Some(view),
        Errors::Host(_) => None,
    }
}

/// Memory of a device, of at least so many bytes, for what the stream of the call runs from here on.
type Lend<'a> = dyn FnMut(usize) -> Result<DeviceMemory> + 'a;

impl Engine {
    /// [`Engine::judge`] of tensors of an NVIDIA GPU: enqueues on the stream of `queue`, and waits until that has come so far. `lend` gives
    /// memory of the device, at least as many bytes as it is asked for, aligned to 16.
    ///
    /// # Errors
    /// As [`Engine::attention_within_on_stream`], less [`Error::ToleranceExceeded`].
    ///
    /// # Safety
    /// As [`Engine::run_async`], for the memory of originals and measured errors too.
    pub unsafe fn judge_on_stream(
        &self,
        mut tensors: Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        lend: &mut Lend<'_>,
        queue: &Queue<'_>,
    ) -> Result<Judgement> {
        // SAFETY: the caller's word.
        unsafe { self.judged_on_stream(&mut tensors, options, tolerance, lend, queue) }.map(|(_, judgement)| judgement)
    }

    /// [`Engine::attention_within`] of tensors of an NVIDIA GPU. Heads are judged on the stream of `queue`, and the figures of all of them read
    /// back: until then the call waits. What follows is enqueued and not waited for: a plain call for each piece of batch entries and heads
    /// side by side that stand alike, on the codes or on the originals, with the bits of a plain call. Query heads of one key head fall back
    /// together. Errors and originals lie on the device ([`Errors::Device`]). `lend` gives memory of the device, at least as many
    /// bytes as it is asked for, aligned to 16, for what the stream runs from there on; it is asked twice.
    ///
    /// # Errors
    /// As [`Engine::attention_within`]; [`Error::Unsupported`] while the stream is captured into a CUDA graph, for which nothing could be
    /// waited; [`Error::DeviceMismatch`] for errors, originals or a queue elsewhere; those of [`Engine::run_async`]. Nothing is written then,
    /// but where a launch fails ([`Error::DeviceFailed`]).
    ///
    /// # Safety
    /// As [`Engine::run_async`], for the memory of originals and measured errors too.
    pub unsafe fn attention_within_on_stream(
        &self,
        mut tensors: Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        lend: &mut Lend<'_>,
        queue: &Queue<'_>,
    ) -> Result<Judgement> {
        // SAFETY: the caller's word.
        let (spec, judgement) = unsafe { self.judged_on_stream(&mut tensors, options, tolerance, lend, queue) }?;
        let Some(first) = judgement.heads.iter().find(|head| !head.is_quantized) else {
            let plan = self.plan(&spec)?;
            let mut operands = Operands::check(tensors, plan.spec())?;
            let workspace = lend(plan.workspace_bytes())?;
            // SAFETY: the caller's word.
            unsafe { self.run_async(&plan, &mut operands, workspace, queue) }?;
            return Ok(judgement);
        };
        let Some(originals) = on_originals(&tensors, tolerance) else {
            let JudgedHead { batch, head, estimate, epsilon, .. } = *first;
            return Err(Error::ToleranceExceeded { batch, head, estimate, epsilon, tolerance: tolerance.limit });
        };
        let (rank, group_size) = (tensors.q.shape().len(), spec.group_size());
        let pieces = pieces(&judgement, spec.batch(), spec.num_q_heads(), group_size);
        let Tensors { q, k, v, codes, mask, sinks, alibi_slopes, mut out, mut lse, .. } = tensors;
        let inputs = Inputs { q, codes, mask, sinks, alibi_slopes };
        let mut with = |piece: &Piece, then: &mut dyn FnMut(Tensors<'_>) -> Result<()>| {
            let of = if piece.on_codes { [k, v] } else { originals };
            Part::new(piece, rank, group_size).with(&inputs, of, piece.on_codes, &mut out, lse.as_mut(), then)
        };
        // Each is planned and proven before the first is enqueued.
        let mut plans: Vec<Arc<Plan>> = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            with(piece, &mut |tensors| {
                let plan = self.plan(&spec_of(&tensors, options)?)?;
                Operands::check(tensors, plan.spec())?;
                plans.push(plan);
                Ok(())
            })?;
        }
        let workspace = lend(plans.iter().map(|plan| plan.workspace_bytes()).max().unwrap_or(0))?;
        for (piece, plan) in pieces.iter().zip(&plans) {
            with(piece, &mut |tensors| {
                let mut operands = Operands::check(tensors, plan.spec())?;
                // SAFETY: the caller's word; the stream runs one piece after another, so that they may share the workspace.
                unsafe { self.run_async(plan, &mut operands, workspace, queue) }
            })?;
        }
        Ok(judgement)
    }

    /// The request, and the judgement of its heads.
    ///
    /// # Safety
    /// As [`Engine::judge_on_stream`].
    unsafe fn judged_on_stream(
        &self,
        tensors: &mut Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        lend: &mut Lend<'_>,
        queue: &Queue<'_>,
    ) -> Result<(Spec, Judgement)> {
        let spec = spec_of(tensors, options)?;
        check(tensors, options, &spec, tolerance)?;
        let (index, stream) = stream_of(queue, spec.device)?;
        let backend = Engine::cuda(spec.device)?;
        backend.refuse_capture(index, stream)?;
        let originals = match on_originals(tensors, tolerance) {
            None => None,
            Some(originals) => {
                let of_originals = spec_of_originals(tensors, originals, options, &spec)?;
                // What would be refused is refused before anything is judged; kernels are compiled where a head needs them.
                rapt_cuda::select(&of_originals, &backend.device(index).map_err(|error| error.on(spec.device))?.caps)?;
                Some(of_originals)
            }
        };
        check_originals(tensors, originals.as_ref(), tolerance)?;
        let plan = backend.plan_deviations(&spec)?;
        let is_coded = spec.codes.as_deref();
        let errors = Qkv {
            q: None,
            k: errors_of(tolerance.k.filter(|_| is_coded.k.is_some())),
            v: errors_of(tolerance.v.filter(|_| is_coded.v.is_some())),
        };
        let (inputs, of_codes) = {
            let Tensors { q, codes, mask, sinks, alibi_slopes, .. } = &*tensors;
            let inputs =
                Inputs { q: *q, codes: codes.clone(), mask: *mask, sinks: *sinks, alibi_slopes: *alibi_slopes };
            (inputs, [tensors.k, tensors.v])
        };
        let (out, lse) = (super::again(&mut tensors.out), tensors.lse.as_mut().map(super::again));
        let mut operands = Operands::check(inputs.tensors(of_codes, true, out, lse), plan.spec())?;
        let workspace = lend(plan.workspace_bytes())?;
        // SAFETY: the caller's word.
        let found = unsafe { backend.deviations(&plan, &mut operands, &errors, workspace, stream) }?;
        let together = originals.is_some().then_some(spec.group_size());
        let judgement = judgement_of(&found, &spec, tolerance.limit, together);
        Ok((spec, judgement))
    }
}

#[cfg(test)]
mod tests {
    use rapt_core::{DType, Granularity, ScaleLayout, Shape};
    use rapt_quant::{Format, Scheme, quantize};

    use super::*;

    fn judged(batch: usize, heads: &[&[bool]]) -> Judgement {
        let of = |(batch, heads): (usize, &&[bool])| {
            let head = move |(head, is_quantized): (usize, &bool)| {
                let is_quantized = *is_quantized;
                JudgedHead { batch, head, epsilon: 0.0, estimate: 0.0, bound: 0.0, is_quantized }
            };
            heads.iter().enumerate().map(head).collect::<Vec<_>>()
        };
        assert_eq!(heads.len(), batch);
        Judgement { limit: 0.1, heads: heads.iter().enumerate().flat_map(of).collect() }
    }

    #[test]
    fn heads_that_stand_alike_and_side_by_side_are_one_piece() {
        let (c, o) = (true, false);
        let piece = |batch, kv_heads, on_codes| Piece { batch, kv_heads, on_codes };
        let of = judged(4, &[&[c, c, o, o, c, c], &[c, c, o, o, c, c], &[c; 6], &[o; 6]]);
        assert_eq!(
            pieces(&of, 4, 6, 2),
            [
                piece(0..2, 0..1, c),
                piece(0..2, 1..2, o),
                piece(0..2, 2..3, c),
                piece(2..3, 0..3, c),
                piece(3..4, 0..3, o)
            ]
        );
        assert_eq!(pieces(&judged(2, &[&[o; 3], &[o; 3]]), 2, 3, 1), [piece(0..2, 0..3, o)]);
        assert_eq!(pieces(&judged(0, &[]), 0, 3, 1), []);
    }

    /// A part is the same heads of the whole, by every tensor's strides and shapes: run on the host, it has the bits of the whole run.
    #[test]
    fn parts_have_the_bits_of_the_same_heads_of_the_whole() {
        let engine = Engine::new(Some(1)).unwrap();
        let [b, hq, hkv, sq, s, d] = [2usize, 4, 2, 3, 40, 16];
        let x = |n: usize, seed: usize| -> Vec<f32> {
            (0..n).map(|at| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
        };
        let shapes: [(usize, Option<Vec<usize>>); 5] = [
            (4, None),
            (4, Some(vec![b, 1, sq, s])),
            (4, Some(vec![1, hq, sq, s])),
            (3, Some(vec![hq, 1, s])),
            (4, Some(vec![sq, s])),
        ];
        let schemes = [
            (Format::Int8, Granularity::Tensor),
            (Format::Uint8, Granularity::Head),
            (Format::Int8, Granularity::Token),
            (Format::E4m3fn, Granularity::Channel),
            (Format::Nvfp4, Granularity::Block(16)),
        ];
        for ((rank, mask_shape), (format, granularity)) in shapes.into_iter().zip(schemes) {
            let lead = |heads: usize, len: usize| -> Vec<usize> { [b, heads, len, d][4 - rank..].to_vec() };
            let of = |shape: &[usize], seed| x(shape.iter().product(), seed);
            let shape = |sizes: &[usize]| Shape::new(sizes).unwrap();
            let (q_shape, k_shape) = (lead(hq, sq), lead(hkv, s));
            let (q, k, v) = (of(&q_shape, 1), of(&k_shape, 2), of(&k_shape, 3));
            let layout = if format == Format::Nvfp4 { ScaleLayout::Swizzle32x4x4 } else { ScaleLayout::Plain };
            let scheme = Scheme::new(format, Some(granularity), layout).unwrap();
            let quantized =
                [&k, &v].map(|x| quantize(&View::contiguous("x", x, shape(&k_shape)).unwrap(), scheme, None).unwrap());
            let [of_k, of_v] = quantized.each_ref().map(|of| of.view().unwrap());
            let mask = mask_shape.map(|sizes| {
                let bias: Vec<f32> = of(&sizes, 4);
                (bias, sizes)
            });
            let (sinks, slopes) = (x(hq, 5), x(hq, 6).iter().map(|x| x.abs()).collect::<Vec<_>>());
            let inputs = Inputs {
                q: View::contiguous("q", &q, shape(&q_shape)).unwrap(),
                codes: Qkv { q: None, k: Some(Box::new(of_k.codes())), v: Some(Box::new(of_v.codes())) },
                mask: mask.as_ref().map(|(bias, sizes)| View::contiguous("mask", bias, shape(sizes)).unwrap()),
                sinks: Some(View::contiguous("sinks", &sinks, shape(&[hq])).unwrap()),
                alibi_slopes: Some(View::contiguous("alibi_slopes", &slopes, shape(&[hq])).unwrap()),
            };
            let lse_shape = &q_shape[..rank - 1];
            let run = |parts: &[Piece]| {
                let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; q.len() / d]);
                let mut out_view = ViewMut::contiguous("out", &mut out, shape(&q_shape)).unwrap();
                let mut lse_view = ViewMut::contiguous("lse", &mut lse, shape(lse_shape)).unwrap();
                for piece in parts {
                    let part = Part::new(piece, rank, hq / hkv);
                    let then = |tensors: Tensors<'_>| engine.attention_into(tensors, &Options::default());
                    let kv = [of_k.tensor(), of_v.tensor()];
                    part.with(&inputs, kv, true, &mut out_view, Some(&mut lse_view), then).unwrap();
                }
                assert_eq!(DType::F32, out_view.dtype());
                (out, lse)
            };
            let entries = if rank == 4 { b } else { 1 };
            let piece = |batch, kv_heads| Piece { batch, kv_heads, on_codes: true };
            let whole = run(&[piece(0..entries, 0..hkv)]);
            assert!(whole.0.iter().chain(&whole.1).all(|x| x.is_finite()), "{format} {granularity}");
            let each: Vec<_> = (0..entries)
                .flat_map(|entry| (0..hkv).map(move |head| piece(entry..entry + 1, head..head + 1)))
                .collect();
            assert_eq!(run(&each), whole, "{format} {granularity}, rank {rank}");
            assert_eq!(run(&[piece(0..entries, 1..2), piece(0..entries, 0..1)]), whole, "{format} {granularity}");
        }
    }
}
