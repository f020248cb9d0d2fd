//! PyTorch's signature: `[..., heads, len, head_dim]` of any rank from 2 up, leading dimensions broadcast.
//!
//! The last leading dimension is the heads, the one before it the batch; what lies further out is looped over. A broadcast
//! is a stride of 0: nothing is expanded in memory.

use std::cell::Cell;

use pyo3::prelude::*;
use rapt::{Causal, Error, ErrorKind, MAX_RANK, Options, Shape, Spec, Strides, Tensors};

use crate::convert::lender::{Enqueued, Lender};
use crate::convert::{self, Kind, Operand};
use crate::engine::{Home, Planned};
use crate::errors::{Failure, Telling, guard};
use crate::mend;
use crate::options;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// The arguments of `scaled_dot_product_attention` that change what is computed.
pub(crate) struct Request<'a, 'py> {
    pub(crate) query: Object<'a, 'py>,
    pub(crate) key: Object<'a, 'py>,
    pub(crate) value: Object<'a, 'py>,
    pub(crate) attn_mask: Option<Object<'a, 'py>>,
    pub(crate) is_causal: bool,
    pub(crate) scale: Option<f64>,
    pub(crate) enable_gqa: bool,
    pub(crate) out: Option<Object<'a, 'py>>,
}

impl<'a, 'py> Request<'a, 'py> {
    /// Every tensor of the caller's.
    fn tensors(&self) -> impl Iterator<Item = Object<'a, 'py>> + use<'a, 'py> {
        [self.query, self.key, self.value].into_iter().chain(self.attn_mask).chain(self.out)
    }
}

/// A tensor with `rank` dimensions: its own ones last, sizes 1 and strides 0 before them.
#[derive(Clone, Copy)]
struct Aligned {
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
}

fn aligned(operand: &Operand, rank: usize) -> Result<Aligned, Failure> {
    let own = operand.shape.len();
    let Some(missing) = rank.checked_sub(own) else {
        let message = format!("{} has {own} dimensions ({}), q, k and v have {rank}", operand.name, operand.shape);
        let mend = format!("`{}[0]`", operand.name);
        return Err(Failure::door(ErrorKind::Shape, message, mend));
    };
    let mut at = Aligned { shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
    at.shape[missing..rank].copy_from_slice(&operand.shape);
    at.strides[missing..rank].copy_from_slice(&operand.strides);
    Ok(at)
}

impl Aligned {
    /// The 4-D operand at one index of the outer dimensions (`rank − 4` of them), with `batch` and `heads` broadcast.
    fn inner(&self, operand: &Operand, rank: usize, outer: &[usize], lead: [usize; 2]) -> Operand {
        let (mut shape, mut strides) = ([1usize; 4], [0isize; 4]);
        let from = rank.saturating_sub(4);
        let missing = 4usize.saturating_sub(rank);
        shape[missing..].copy_from_slice(&self.shape[from..rank]);
        strides[missing..].copy_from_slice(&self.strides[from..rank]);
        for d in 0..2 {
            if shape[d] == 1 && lead[d] != 1 {
                (shape[d], strides[d]) = (lead[d], 0);
            }
        }
        let steps =
            outer.iter().enumerate().map(|(d, &at)| if self.shape[d] == 1 { 0 } else { at as isize * self.strides[d] });
        let offset = steps.fold(0isize, isize::wrapping_add).wrapping_mul(operand.dtype.size_bytes().cast_signed());
        Operand {
            name: operand.name,
            ptr: operand.ptr.wrapping_offset(offset),
            dtype: operand.dtype,
            shape: Shape::from(shape),
            strides: Strides::from(strides),
            device: operand.device,
            extent: operand.extent,
            writable: operand.writable,
            _hold: None,
        }
    }
}

/// The 4-D `operand` with batch 0.
fn without_batch(operand: Operand) -> Operand {
    let sizes = [0, operand.shape[1], operand.shape[2], operand.shape[3]];
    Operand { shape: Shape::from(sizes), ..operand }
}

/// The broadcast leading dimensions of q, k and v. With GQA the heads are left to rapt-core.
fn leading(q: &Aligned, k: &Aligned, v: &Aligned, rank: usize, gqa: bool) -> Result<[usize; MAX_RANK], Failure> {
    let mut lead = [1; MAX_RANK];
    let heads = rank - 2;
    for (d, broadcast) in lead.iter_mut().enumerate().take(heads) {
        let is_heads = d + 1 == heads;
        let sizes = [("q", q.shape[d]), ("k", k.shape[d]), ("v", v.shape[d])];
        if is_heads && gqa {
            *broadcast = q.shape[d];
            continue;
        }
        let (other, n) = sizes.into_iter().find(|(_, n)| *n != 1).unwrap_or(sizes[0]);
        *broadcast = n;
        if let Some((tensor, got)) = sizes.into_iter().find(|(_, got)| *got != 1 && *got != n) {
            if is_heads {
                let message =
                    format!("{tensor} has {got} heads, {other} has {n}: without enable_gqa they must be equal or 1");
                return Err(Failure::door(ErrorKind::Shape, message, "`enable_gqa=True`"));
            }
            return Err(Error::SizeMismatch { tensor, size: "batch", got, other, expected: n }.into());
        }
    }
    Ok(lead)
}

/// Whether distinct indices have distinct addresses; a sufficient test, exact for every permutation and slice.
fn is_plainly_injective(out: &Operand) -> bool {
    let mut dims: Vec<(usize, usize)> = out
        .shape
        .iter()
        .zip(out.strides.iter())
        .filter(|(n, _)| **n > 1)
        .map(|(n, s)| (s.unsigned_abs(), *n))
        .collect();
    dims.sort_unstable();
    let mut reach = 0usize;
    dims.into_iter().all(|(stride, n)| {
        let free = stride > reach;
        reach = reach.saturating_add(stride.saturating_mul(n - 1));
        free
    })
}

/// The loop over outer dimensions checks each piece on its own; what holds between pieces is checked here.
fn check_whole_output(out: &mut Operand, inputs: &[&Operand]) -> Result<(), Failure> {
    if !is_plainly_injective(out) {
        return Err(Error::OutputOverlapsItself { tensor: "out", shape: out.shape, strides: out.strides }.into());
    }
    let view = out.view_mut()?;
    let (lo, hi) = view.reach_bytes();
    let written = (view.address().wrapping_add_signed(lo), view.address().wrapping_add_signed(hi));
    for input in inputs {
        let view = input.view()?;
        let (lo, hi) = view.reach_bytes();
        let read = (view.address().wrapping_add_signed(lo), view.address().wrapping_add_signed(hi));
        if lo != hi && written.0 < read.1 && read.0 < written.1 {
            return Err(Error::OutputOverlaps { tensor: "out", other: input.name }.into());
        }
    }
    Ok(())
}

/// What is read, as it was given.
type Inputs<'a> = (&'a Operand, &'a Operand, &'a Operand, Option<&'a Operand>);

/// A request brought to one rank, its leading dimensions broadcast.
pub(crate) struct Frame {
    rank: usize,
    q: Aligned,
    k: Aligned,
    v: Aligned,
    mask: Option<Aligned>,
    gqa: bool,
    lead: [usize; MAX_RANK],
    /// The sizes of the answer.
    pub(crate) out_shape: Shape,
}

impl Frame {
    /// Checks ranks and broadcasting.
    pub(crate) fn new((q, k, v, mask): Inputs<'_>, enable_gqa: bool) -> Result<Self, Failure> {
        for operand in [q, k, v] {
            if operand.shape.len() < 2 {
                let allowed = "at least 2 ([len, head_dim]) are asked";
                let (tensor, got, shape) = (operand.name, operand.shape.len(), operand.shape);
                return Err(Error::Rank { tensor, got, shape, allowed }.into());
            }
        }
        let rank = q.shape.len().max(k.shape.len()).max(v.shape.len());
        let (q_at, k_at, v_at) = (aligned(q, rank)?, aligned(k, rank)?, aligned(v, rank)?);
        let mask_at = mask.map(|mask| aligned(mask, rank)).transpose()?;
        let gqa = enable_gqa && rank >= 3;
        let lead = leading(&q_at, &k_at, &v_at, rank, gqa)?;
        if let (Some(mask), Some(at)) = (mask, &mask_at) {
            for (d, n) in lead.iter().enumerate().take(rank.saturating_sub(4)) {
                if at.shape[d] != 1 && at.shape[d] != *n {
                    let message = format!(
                        "mask of shape {} does not broadcast to the batch dimensions of q, k and v",
                        mask.shape
                    );
                    return Err(Failure::door(ErrorKind::Shape, message, "a mask whose leading dimensions are 1"));
                }
            }
        }
        let mut out_shape = [0; MAX_RANK];
        out_shape[..rank - 2].copy_from_slice(&lead[..rank - 2]);
        (out_shape[rank - 2], out_shape[rank - 1]) = (q_at.shape[rank - 2], v_at.shape[rank - 1]);
        let out_shape = convert::shape("out", &out_shape[..rank])?;
        Ok(Frame { rank, q: q_at, k: k_at, v: v_at, mask: mask_at, gqa, lead, out_shape })
    }

    /// The number of dimensions that are looped over.
    pub(crate) fn outer_rank(&self) -> usize {
        self.rank.saturating_sub(4)
    }

    /// Whether an empty outer dimension leaves no piece to run and no memory behind it.
    fn is_empty(&self) -> bool {
        self.lead[..self.outer_rank()].contains(&0)
    }

    /// The operands of one piece, each with four dimensions. The piece that stands for none has batch 0.
    pub(crate) fn piece(
        &self,
        (q, k, v, mask): Inputs<'_>,
        outer: &[usize],
    ) -> (Operand, Operand, Operand, Option<Operand>) {
        let Frame { rank, lead, .. } = *self;
        // Rank 2 has no heads, rank 3 no batch: their sizes are 1.
        let broadcast = [if rank >= 4 { lead[rank - 4] } else { 1 }, if rank >= 3 { lead[rank - 3] } else { 1 }];
        let heads_of = |at: &Aligned| if rank >= 3 { at.shape[rank - 3] } else { 1 };
        let kv_broadcast = |at: &Aligned| [broadcast[0], if self.gqa { heads_of(at) } else { broadcast[1] }];
        let emptied = |operand: Operand| if self.is_empty() { without_batch(operand) } else { operand };
        (
            emptied(self.q.inner(q, rank, outer, broadcast)),
            emptied(self.k.inner(k, rank, outer, kv_broadcast(&self.k))),
            emptied(self.v.inner(v, rank, outer, kv_broadcast(&self.v))),
            mask.zip(self.mask.as_ref())
                .filter(|_| !self.is_empty())
                .map(|(mask, at)| at.inner(mask, rank, outer, [1, 1])),
        )
    }

    /// The output of one piece.
    pub(crate) fn out_piece(&self, out: &Operand, outer: &[usize]) -> Result<Operand, Failure> {
        let piece = aligned(out, self.rank)?.inner(out, self.rank, outer, [1, 1]);
        Ok(if self.is_empty() { without_batch(piece) } else { piece })
    }
}

/// The options of PyTorch's signature.
pub(crate) fn options(is_causal: bool, scale: Option<f64>) -> Options {
    Options { softmax_scale: scale, causal: is_causal.then_some(Causal::TopLeft), ..Options::default() }
}

/// Runs on `home`; hands back `out`, or a new tensor, row-major.
pub(crate) fn run<'py>(
    py: Python<'py>,
    home: &Home,
    kind: Kind,
    request: &Request<'_, 'py>,
) -> Result<Bound<'py, PyAny>, Failure> {
    let read = |name, object| convert::read(name, object, kind, request.query);
    let (q, k, v) = (read("q", request.query)?, read("k", request.key)?, read("v", request.value)?);
    let mask = request.attn_mask.map(|mask| read("mask", mask)).transpose()?;
    if mask.is_some() && request.is_causal {
        let allowed =
            "is_causal=False with attn_mask, or attn_mask=None (PyTorch forbids both; rapt.attention takes both)";
        return Err(Failure::option("is_causal", "True together with attn_mask", allowed));
    }
    let inputs = (&q, &k, &v, mask.as_ref());
    let frame = Frame::new(inputs, request.enable_gqa)?;
    let options = options(request.is_causal, request.scale);
    // Every whole operand is proven, also where an empty outer dimension leaves nothing to run.
    for operand in [Some(&q), Some(&k), Some(&v), mask.as_ref()].into_iter().flatten() {
        operand.view()?;
    }

    let outer_rank = frame.outer_rank();
    let out_shape = frame.out_shape;
    // The first piece stands for all: they differ in pointers alone. It is checked before memory is asked for.
    let start = [0usize; MAX_RANK];
    let (q0, k0, v0, mask0) = frame.piece(inputs, &start[..outer_rank]);
    let options_for_out;
    let (product, mut out) = match request.out {
        Some(out) => {
            let operand = read("out", out)?;
            if operand.shape != out_shape {
                return Err(Error::ShapeMismatch { tensor: "out", got: operand.shape, expected: out_shape }.into());
            }
            options_for_out = Options { out_dtype: Some(q.dtype), ..options };
            (None, operand)
        }
        None => {
            options_for_out = options;
            spec_of((&q0, &k0, &v0, mask0.as_ref()), None, &options)?;
            let (product, operand) = convert::allocate("out", kind, request.query, q.device, q.dtype, out_shape)?;
            (Some(product), operand)
        }
    };
    let mut out0 = frame.out_piece(&out, &start[..outer_rank])?;
    let spec = spec_of((&q0, &k0, &v0, mask0.as_ref()), Some(&out0), &options_for_out)?;
    let planned = home.plan(py, kind, &spec)?;
    let lender = Lender::of(kind, request.query)?;
    let mut enqueued = None;
    let ran = if outer_rank == 0 {
        run_piece_lent(py, &planned, (&q0, &k0, &v0, mask0.as_ref()), &mut out0, &lender).map(|at| enqueued = at)
    } else {
        run_pieces(py, &planned, &frame, inputs, &mut out, &lender, &mut enqueued)
    };
    // A piece that was enqueued reads on where a later one fails.
    let used = [Some(q), Some(k), Some(v), mask, Some(out), Some(out0)].into_iter().flatten();
    lender.hold(py, enqueued, request.tensors(), used.filter_map(|operand| operand._hold))?;
    ran?;
    match (product, request.out) {
        (Some(product), _) => product.finish(py),
        (None, Some(out)) => Ok(out.clone()),
        (None, None) => Err(Failure::door(ErrorKind::Unsupported, "no output was made", "")),
    }
}

/// Runs piece after piece; `enqueued` is where the last of them was.
fn run_pieces<'py>(
    py: Python<'py>,
    planned: &Planned<'_>,
    frame: &Frame,
    inputs: Inputs<'_>,
    out: &mut Operand,
    lender: &Lender<'py>,
    enqueued: &mut Option<Enqueued>,
) -> Result<(), Failure> {
    let (q, k, v, mask) = inputs;
    let whole: Vec<&Operand> = [Some(q), Some(k), Some(v), mask].into_iter().flatten().collect();
    check_whole_output(out, &whole)?;
    let outer_sizes = &frame.out_shape[..frame.outer_rank()];
    let mut outer = [0usize; MAX_RANK];
    for _ in 0..outer_sizes.iter().product() {
        let at = &outer[..outer_sizes.len()];
        let (q, k, v, mask) = frame.piece(inputs, at);
        let mut out = frame.out_piece(out, at)?;
        *enqueued = run_piece_lent(py, planned, (&q, &k, &v, mask.as_ref()), &mut out, lender)?;
        for (d, size) in outer_sizes.iter().enumerate().rev() {
            outer[d] += 1;
            if outer[d] < *size {
                break;
            }
            outer[d] = 0;
        }
    }
    Ok(())
}

/// The spec of one piece.
pub(crate) fn spec_of((q, k, v, mask): Inputs<'_>, out: Option<&Operand>, options: &Options) -> Result<Spec, Failure> {
    let mask = mask.map(Operand::view).transpose()?;
    let mut builder = Spec::builder(&q.view()?, &k.view()?, &v.view()?, options).mask(mask.as_ref());
    if let Some(out) = out {
        builder = builder.out(out.form());
    }
    Ok(builder.build()?)
}

/// Proves and runs one piece of torch tensors.
pub(crate) fn run_piece(
    py: Python<'_>,
    planned: &Planned<'_>,
    inputs: Inputs<'_>,
    out: &mut Operand,
) -> Result<Option<Enqueued>, Failure> {
    run_piece_lent(py, planned, inputs, out, &Lender::Torch)
}

/// The same of any kind, on a GPU with the stream and the memory of `lender`.
fn run_piece_lent<'py>(
    py: Python<'py>,
    planned: &Planned<'_>,
    (q, k, v, mask): Inputs<'_>,
    out: &mut Operand,
    lender: &Lender<'py>,
) -> Result<Option<Enqueued>, Failure> {
    let tensors = Tensors {
        q: q.view()?,
        k: k.view()?,
        v: v.view()?,
        mask: mask.map(Operand::view).transpose()?,
        sinks: None,
        alibi_slopes: None,
        out: out.view_mut()?,
        lse: None,
    };
    planned.run(py, tensors, lender)
}

/// `rapt.scaled_dot_product_attention` for anything but torch's own dispatch.
pub(crate) fn public<'py>(
    py: Python<'py>,
    request: (Object<'_, 'py>, Object<'_, 'py>, Object<'_, 'py>, Option<Object<'_, 'py>>),
    dropout_p: Option<Object<'_, 'py>>,
    is_causal: Option<Object<'_, 'py>>,
    scale: Option<Object<'_, 'py>>,
    enable_gqa: Option<Object<'_, 'py>>,
) -> PyResult<Bound<'py, PyAny>> {
    let telling = Cell::new(Telling { names: &mend::SDPA, kind: Kind::Numpy });
    guard(py, &telling, || {
        let (query, key, value, attn_mask) = request;
        let kind = convert::source_kind(query)?;
        telling.set(Telling { kind, ..telling.get() });
        if options::real("dropout_p", dropout_p)?.is_some_and(|p| p != 0.0) {
            let message = "dropout_p != 0 is not served: dropout comes with training";
            return Err(Failure::door(ErrorKind::Unsupported, message, "`dropout_p=0.0`"));
        }
        let flag = |name, given: Option<Object<'_, '_>>| given.map_or(Ok(false), |given| options::flag(name, given));
        if kind == Kind::Torch {
            let tensors = [("q", Some(query)), ("k", Some(key)), ("v", Some(value)), ("mask", attn_mask)];
            convert::torch::refuse_gradients(py, &tensors)?;
        }
        let request = Request {
            query,
            key,
            value,
            attn_mask,
            is_causal: flag("is_causal", is_causal)?,
            scale: options::real("scale", scale)?,
            enable_gqa: flag("enable_gqa", enable_gqa)?,
            out: None,
        };
        run(py, &Home::Default, kind, &request)
    })
}

/// The hot path of rapt.torch: torch tensors, gradients seen to by the caller.
pub(crate) fn torch_sdpa<'py>(py: Python<'py>, request: &Request<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let telling = Cell::new(Telling { names: &mend::SDPA, kind: Kind::Torch });
    guard(py, &telling, || run(py, &Home::Default, Kind::Torch, request))
}
