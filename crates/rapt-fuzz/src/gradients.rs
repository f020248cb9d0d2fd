//! Gradients in one arena: what `BackwardOperands` proves is found again address by address, and a run writes the gradients that are asked for and
//! nothing else.
//!
//! Data layout: a request as `operands` has it, then what arrives and the gradients, each with strides of its own. Deliberately absent: sequences one
//! after another, and dropout.

use arbitrary::{Result as Parsed, Unstructured};
use rapt::{BackwardOperands, BackwardTensors, DType, Executor, Queue, Result, SerialExecutor, backward_spec_of};

use crate::arbitrary::{Request, Scale, TensorDesc, once_in, tensor};
use crate::check_refusal;
use crate::operands::{Arena, Placed, check_overlap, descs, engine, place, written};

/// Whether the bytes describe gradients that are computed.
///
/// # Panics
/// If a proof does not hold, or a run reads or writes what is not its own.
#[must_use]
pub fn gradients(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    let Ok((request, beside, offsets)) = parse(&mut u) else { return false };
    match run(&request, &beside, offsets) {
        Ok(()) => true,
        Err(error) => {
            check_refusal(&error);
            false
        }
    }
}

const NAMES: [&str; 15] = [
    "q",
    "k",
    "v",
    "mask",
    "sinks",
    "alibi_slopes",
    "out",
    "lse",
    "d_o",
    "d_lse",
    "dq",
    "dk",
    "dv",
    "d_mask",
    "d_sinks",
];
/// Of [`NAMES`], those that are read.
const READ: usize = 10;

/// What a backward pass has beside the request: lse, d_o, d_lse, dq, dk, dv, d_mask and d_sinks.
type Beside = [Option<TensorDesc>; 8];

fn parse(u: &mut Unstructured<'_>) -> Parsed<(Request, Beside, [usize; 15])> {
    let request = Request::new(u, Scale::Small)?;
    let accumulation = request.q.dtype.accumulation();
    let alike = |u: &mut Unstructured<'_>, of: &TensorDesc| tensor(u, of.dtype, &of.shape, Scale::Small);
    let lse = match request.lse {
        Some(lse) => lse,
        None => tensor(u, accumulation, &sizes_of_lse(&request), Scale::Small)?,
    };
    let d_o = alike(u, &request.out)?;
    let d_lse = if once_in(u, 3)? { Some(tensor(u, accumulation, &lse.shape, Scale::Small)?) } else { None };
    let asked = |u: &mut Unstructured<'_>, of: Option<&TensorDesc>| match of {
        Some(of) if !once_in(u, 4)? => Ok(Some(alike(u, of)?)),
        _ => Ok(None),
    };
    let (dq, dk, dv) = (asked(u, Some(&request.q))?, asked(u, Some(&request.k))?, asked(u, Some(&request.v))?);
    let biases = request.mask.as_ref().filter(|mask| mask.dtype != DType::Bool);
    let (d_mask, d_sinks) = (asked(u, biases)?, asked(u, request.sinks.as_ref())?);
    let beside = [Some(lse), Some(d_o), d_lse, dq, dk, dv, d_mask, d_sinks];
    let (mut offsets, mut end) = ([0; 15], 0usize);
    for (offset, desc) in offsets.iter_mut().zip(all(&request, &beside)) {
        let Some(desc) = desc else { continue };
        *offset = place(u, desc, &mut end)?;
    }
    Ok((request, beside, offsets))
}

/// Those of q without its columns, heads before rows.
fn sizes_of_lse(request: &Request) -> Vec<usize> {
    let mut sizes = request.q.shape.to_vec();
    sizes.pop();
    let rank = sizes.len();
    if rank >= 2 && request.options.layout == rapt::TensorLayout::Bshd {
        sizes.swap(rank - 2, rank - 1);
    }
    sizes
}

/// As [`NAMES`] has them.
fn all<'a>(request: &'a Request, beside: &'a Beside) -> [Option<&'a TensorDesc>; 15] {
    let given = descs(request);
    std::array::from_fn(|n| if n < 7 { given[n] } else { beside[n - 7].as_ref() })
}

fn run(request: &Request, beside: &Beside, offsets: [usize; 15]) -> Result<()> {
    let descs = all(request, beside);
    let placed: [Placed<'_>; 15] = std::array::from_fn(|n| Placed { tensor: NAMES[n], desc: descs[n], at: offsets[n] });
    let arena = Arena::new();
    let there = |n: usize| arena.optional(&placed[n]).map(|view| view.expect("always there"));
    let tensors = || -> Result<BackwardTensors<'_>> {
        Ok(BackwardTensors {
            mask: arena.optional(&placed[3])?,
            sinks: arena.optional(&placed[4])?,
            alibi_slopes: arena.optional(&placed[5])?,
            d_lse: arena.optional(&placed[9])?,
            dq: arena.optional_mut(&placed[10])?,
            dk: arena.optional_mut(&placed[11])?,
            dv: arena.optional_mut(&placed[12])?,
            d_mask: arena.optional_mut(&placed[13])?,
            d_sinks: arena.optional_mut(&placed[14])?,
            ..BackwardTensors::new([there(0)?, there(1)?, there(2)?], there(6)?, there(7)?, there(8)?)
        })
    };
    let first = tensors()?;
    let spec = backward_spec_of(&first, &request.options)?;
    // Every view was built, so each of its bytes lies in the arena.
    if let Err(error) = BackwardOperands::check(first, &spec) {
        check_overlap(&error, &placed);
        return Err(error);
    }
    let written = written(&placed[..READ], &placed[READ..]);
    let engine = engine();
    let plan = engine.plan_backward_for(&spec, 1)?;
    let queue = Queue::Host(&SerialExecutor as &dyn Executor);
    arena
        .check_run(&written, || engine.run_backward_on(&plan, &mut BackwardOperands::check(tensors()?, &spec)?, &queue))
}
