//! PyTorch's signature: `[..., heads, len, head_dim]` of any rank from 2 up, leading dimensions broadcast.
//!
//! The last leading dimension is the heads, the one before it the batch; what lies further out is looped over. A broadcast
//! is a stride of 0: nothing is expanded in memory. Whether a request is served is decided in [`decide`](crate::torch::decide).

use std::cell::Cell;

use pyo3::prelude::*;
use rapt::{DropoutSeed, MAX_RANK, Options};

use crate::api::options;
use crate::engine::{Home, Planned};
use crate::errors::{Failure, Wording, guard, hints};
use crate::kind::Kind;
use crate::tensors::{self, Enqueued, Operand, StreamContext};
use crate::torch::call::{self, Given, Read, run_piece, spec_of};
use crate::torch::decide::{Modes, Order, Reason, Verdict};
use crate::torch::dropout;
use crate::torch::frame::{Frame, Inputs, at_head, check_whole_output};
use crate::torch::node::node;
use crate::torch::request::{self, Flags};
use crate::torch::{output, stats};

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// Where a call runs, and what it drops.
#[derive(Clone, Copy)]
struct Site<'a, 'py> {
    home: &'a Home,
    kind: Kind,
    context: &'a StreamContext<'py>,
    dropout: Option<DropoutSeed>,
}

impl Site<'_, '_> {
    /// Of the piece before which there were so many batch entries: pieces are numbered as one batch.
    fn after(self, entries: usize) -> Self {
        let of =
            |seed: DropoutSeed| DropoutSeed { first_batch: seed.first_batch.saturating_add(entries as u32), ..seed };
        Site { dropout: self.dropout.map(of), ..self }
    }
}

/// Which weights a call drops: what `given` says (int64 `[2]`: seed and offset), else what PyTorch's generator does. With `dropout_p` 0 it
/// is not asked.
fn drawn(query: Object<'_, '_>, dropout_p: f64, given: Option<Object<'_, '_>>) -> Result<Option<DropoutSeed>, Failure> {
    if dropout_p == 0.0 {
        return Ok(None);
    }
    match given {
        Some(given) => dropout::seed_of(given),
        None => dropout::seed_of(&dropout::draw(query)?),
    }
    .map(Some)
}

/// Computes a request that is valid into a new tensor whose dimensions follow one another as `order` says; numpy's and other
/// producers' are row-major.
fn run<'py>(
    py: Python<'py>,
    kind: Kind,
    given: Given<'_, 'py>,
    read: Read,
    flags: Flags,
    order: Order,
    draw: Option<Object<'_, 'py>>,
) -> Result<Bound<'py, PyAny>, Failure> {
    let options = Options { dropout_p: flags.dropout_p, ..call::options(flags.is_causal, flags.scale) };
    // Every whole operand is proven, also where an empty outer dimension leaves nothing to run.
    let (q, k, v, mask) = read.inputs();
    for operand in [Some(q), Some(k), Some(v), mask].into_iter().flatten() {
        operand.view()?;
    }
    let heads = |operand: &Operand| operand.shape[operand.shape.len() - 3];
    let by_head = flags.enable_gqa && heads(k) != heads(v);
    let frame = Frame::new(read.inputs(), flags.enable_gqa)?;
    // The first piece stands for all: they differ in pointers alone. It is checked before memory is asked for.
    let start = [0usize; MAX_RANK];
    if !by_head {
        let (q, k, v, mask) = frame.piece(read.inputs(), &start[..frame.outer_rank()]);
        spec_of((&q, &k, &v, mask.as_ref()), (None, None), &options)?;
    }
    let ordered = kind == Kind::Torch && order != Order::RowMajor;
    let (product, mut out) = if ordered {
        let object = output::new(py, given.query, &frame.out_shape, order)?;
        let operand = tensors::torch::read_plain("out", &object)?;
        (tensors::Product::Ready(object), operand)
    } else {
        tensors::allocate("out", kind, given.query, read.q.device, read.q.dtype, frame.out_shape)?
    };
    let context = StreamContext::of(kind, given.query)?;
    let dropout = drawn(given.query, flags.dropout_p, draw)?;
    let site = Site { home: &Home::Default, kind, context: &context, dropout };
    let mut enqueued = None;
    let ran = if by_head {
        run_heads(py, &site, &read, &options, &mut out, &mut enqueued)
    } else {
        run_frame(py, &site, &frame, read.inputs(), &options, &mut out, &mut enqueued)
    };
    // A piece that was enqueued reads on where a later one fails.
    let used = [Some(read.q), Some(read.k), Some(read.v), read.mask, Some(out)].into_iter().flatten();
    context.hold(py, enqueued, given.all(), used.filter_map(|operand| operand._hold))?;
    ran?;
    product.finish(py)
}

/// Runs head after head: the heads of k serve groups of another size than those of v.
fn run_heads<'py>(
    py: Python<'py>,
    site: &Site<'_, 'py>,
    read: &Read,
    options: &Options,
    out: &mut Operand,
    enqueued: &mut Option<Enqueued>,
) -> Result<(), Failure> {
    let Read { q, k, v, mask } = read;
    let heads_of = |operand: &Operand| operand.shape[operand.shape.len() - 3];
    let heads = heads_of(q);
    let entries: usize = out.shape[..out.shape.len() - 3].iter().product();
    for head in 0..heads {
        let of = |operand: &Operand| at_head(operand, head * heads_of(operand) / heads);
        let mask = mask.as_ref().map(|mask| {
            let is_shared = mask.shape.len() < 3 || heads_of(mask) == 1;
            if is_shared { mask.alias() } else { at_head(mask, head) }
        });
        let (q, k, v, mut out) = (of(q), of(k), of(v), at_head(out, head));
        let inputs = (&q, &k, &v, mask.as_ref());
        let frame = Frame::new(inputs, false)?;
        run_frame(py, &site.after(head * entries), &frame, inputs, options, &mut out, enqueued)?;
    }
    Ok(())
}

/// Runs the pieces of a frame.
fn run_frame<'py>(
    py: Python<'py>,
    site: &Site<'_, 'py>,
    frame: &Frame,
    inputs: Inputs<'_>,
    options: &Options,
    out: &mut Operand,
    enqueued: &mut Option<Enqueued>,
) -> Result<(), Failure> {
    let start = [0usize; MAX_RANK];
    let start = &start[..frame.outer_rank()];
    let (q, k, v, mask) = frame.piece(inputs, start);
    let mut first = frame.out_piece(out, start)?;
    let spec = spec_of((&q, &k, &v, mask.as_ref()), (Some(&first), None), options)?;
    let planned = site.home.plan(py, site.kind, &spec)?;
    if frame.outer_rank() > 0 {
        return run_pieces(py, &planned, frame, inputs, out, site, enqueued);
    }
    let ran = run_piece(py, &planned, (&q, &k, &v, mask.as_ref()), (&mut first, None), site.dropout, site.context)?;
    *enqueued = ran.or(*enqueued);
    Ok(())
}

/// Runs piece after piece; `enqueued` is where the last of them was.
fn run_pieces<'py>(
    py: Python<'py>,
    planned: &Planned<'_>,
    frame: &Frame,
    inputs: Inputs<'_>,
    out: &mut Operand,
    site: &Site<'_, 'py>,
    enqueued: &mut Option<Enqueued>,
) -> Result<(), Failure> {
    let (q, k, v, mask) = inputs;
    let whole: Vec<&Operand> = [Some(q), Some(k), Some(v), mask].into_iter().flatten().collect();
    check_whole_output(out, &whole)?;
    let outer_sizes = &frame.out_shape[..frame.outer_rank()];
    let mut outer = [0usize; MAX_RANK];
    for piece in 0..outer_sizes.iter().product() {
        let at = &outer[..outer_sizes.len()];
        let (q, k, v, mask) = frame.piece(inputs, at);
        let mut out = frame.out_piece(out, at)?;
        let dropout = site.after(piece * out.shape[0]).dropout;
        let ran = run_piece(py, planned, (&q, &k, &v, mask.as_ref()), (&mut out, None), dropout, site.context)?;
        *enqueued = ran.or(*enqueued);
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

/// `rapt.scaled_dot_product_attention` on anything but tensors of a trace.
pub(crate) fn public<'py>(
    py: Python<'py>,
    given: Given<'_, 'py>,
    dropout_p: Option<Object<'_, 'py>>,
    is_causal: Option<Object<'_, 'py>>,
    scale: Option<Object<'_, 'py>>,
    enable_gqa: Option<Object<'_, 'py>>,
) -> PyResult<Bound<'py, PyAny>> {
    let flag = |name, given: Option<Object<'_, '_>>| given.map_or(Ok(false), |given| options::flag(name, given));
    refusing(py, given, |kind| {
        let flags = Flags {
            dropout_p: options::real("dropout_p", dropout_p)?.unwrap_or(0.0),
            is_causal: flag("is_causal", is_causal)?,
            scale: options::real("scale", scale)?,
            enable_gqa: flag("enable_gqa", enable_gqa)?,
        };
        serve(py, kind, given, flags, false, None)
    })
}

/// The same for the op of Rapt's that compiled graphs carry, whose output has the strides that its trace foresaw.
pub(crate) fn of_graph<'py>(
    py: Python<'py>,
    given: Given<'_, 'py>,
    flags: Flags,
    draw: Option<Object<'_, 'py>>,
) -> PyResult<Bound<'py, PyAny>> {
    refusing(py, given, |kind| serve(py, kind, given, flags, true, draw))
}

/// Computes what was decided before, on torch tensors whose memory is their value.
pub(crate) fn decided<'py>(
    py: Python<'py>,
    given: Given<'_, 'py>,
    flags: Flags,
    order: Order,
) -> PyResult<Bound<'py, PyAny>> {
    refusing(py, given, |kind| {
        let out = run(py, kind, given, given.read(kind)?, flags, order, None)?;
        stats::count_served();
        Ok(out)
    })
}

fn refusing<'py>(
    py: Python<'py>,
    given: Given<'_, 'py>,
    body: impl FnOnce(Kind) -> Result<Bound<'py, PyAny>, Failure>,
) -> PyResult<Bound<'py, PyAny>> {
    let wording = Cell::new(Wording { names: &hints::SDPA, kind: Kind::Numpy });
    guard(py, &wording, || {
        let kind = tensors::source_kind(given.query)?;
        wording.set(Wording { kind, ..wording.get() });
        body(kind)
    })
}

/// Decides and computes; what Rapt does not compute is refused, since these functions have nobody to hand it to.
fn serve<'py>(
    py: Python<'py>,
    kind: Kind,
    given: Given<'_, 'py>,
    flags: Flags,
    traced: bool,
    draw: Option<Object<'_, 'py>>,
) -> Result<Bound<'py, PyAny>, Failure> {
    let read = given.read(kind)?;
    let (asked, verdict) = if kind == Kind::Torch {
        let asked = request::of_operands(read.inputs(), request::requires_grad(given)?, flags);
        let verdict = request::decide_torch(py, &asked, Modes { traced, ..request::modes(py)? }, given)?;
        (asked, verdict)
    } else {
        let asked = request::of_operands(read.inputs(), [false; 4], flags);
        // Nothing but PyTorch has a generator that its caller knows of.
        let verdict = match request::decide_newest(&asked) {
            Verdict::Serve(_) if flags.dropout_p != 0.0 => Verdict::Fallback(Reason::Dropout),
            verdict => verdict,
        };
        (asked, verdict)
    };
    let order = request::served(verdict, &asked, Some(read.inputs()))?;
    if kind == Kind::Torch && !traced && asked.requires_grad() && tensors::torch::is_grad_enabled(py)? {
        let Given { query, key, value, attn_mask } = given;
        let Flags { dropout_p, is_causal, scale, enable_gqa } = flags;
        let arguments = (query, key, value, attn_mask, is_causal, scale, enable_gqa, order.name(), dropout_p);
        return Ok(node(py, "sdpa")?.call1(arguments)?);
    }
    let out = run(py, kind, given, read, flags, order, draw)?;
    if kind == Kind::Torch {
        stats::count_served();
    }
    Ok(out)
}
