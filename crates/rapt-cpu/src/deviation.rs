//! How far the heads of a quantized request may be off, before any of them is run.
//!
//! ```text
//! deviations(&Plan, &mut Operands, errors) -> per query head: ε, estimate, bounds, ‖ô‖      kernels/decode/deviation.rs
//! ```
//! It computes scores and outputs once more, in f32, 16 queries at a time against blocks of keys, and writes no operand. Memory is a few
//! blocks for each thread and 40 bytes for each query. What the numbers mean stands in rapt-reference, in whose f64 they are tested.

use rapt_core::{Arch, Error, Executor, HeadDeviation, MatrixErrors, Operands, Plan, Qkv, Result};

use crate::arch::{self, Vectors, row_reader};
use crate::caps::available;
use crate::kernels::decode::deviation::{self, HeadErrors, ROWS, RowDeviation, Rows, Run};
use crate::kernels::simd::Simd;
use crate::launch::CpuLaunch;
use crate::problem::{Decisions, Problem, Reading, RowKind};
use crate::run::{Pool, Shared};

/// What its rows make of a head.
fn head_of(rows: &[RowDeviation]) -> HeadDeviation {
    let mut head = HeadDeviation::default();
    for row in rows {
        if row.epsilon.is_nan() || row.epsilon > head.epsilon {
            head.epsilon = row.epsilon;
        }
        head.estimate += row.estimate;
        head.before += row.before;
        head.after += row.after;
        head.norm += row.norm;
    }
    let HeadDeviation { epsilon, estimate, before, after, norm } = head;
    let [estimate, before, after, norm] = [estimate, before, after, norm].map(f64::sqrt);
    HeadDeviation { epsilon, estimate, before, after, norm }
}

struct Find;

impl Vectors for Find {
    type Output = Run;
    fn visit<F: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Run {
        deviation::run::<F>
    }
}

/// Of each query head, `[batch, num_q_heads]`, how far a run of `plan` may be off. `errors` has those of K and V that are quantized, for
/// each key head, `[batch, num_kv_heads]`, of matrices `[kv_len, head_dim]`. What lies in `out` and `lse` is left as it is.
///
/// # Errors
/// [`Error::NotAsPlanned`] for operands of another spec, errors of other sizes, or the plan of another backend; [`Error::Unsupported`]
/// for numbers of float64, a quantized q, pages, or a plan of an instruction set that is not here; [`Error::OutOfMemory`],
/// [`Error::WorkerPanicked`], [`Error::WorkLeftUndone`].
pub fn deviations(
    plan: &Plan,
    operands: &mut Operands<'_>,
    errors: &Qkv<Option<Vec<MatrixErrors<'_>>>>,
    executor: &dyn Executor,
) -> Result<Vec<HeadDeviation>> {
    let launch: &CpuLaunch = plan.launch_plan()?;
    let spec = plan.spec();
    operands.expect(spec)?;
    let (heads, kv_heads) = (spec.batch() * spec.num_q_heads(), spec.batch() * spec.num_kv_heads());
    for (tensor, of, dim) in [("k", &errors.k, spec.head_dim()), ("v", &errors.v, spec.head_dim_v())] {
        let is_of = |of: &MatrixErrors<'_>| {
            [of.error.len(), of.spread.len(), of.mean.len(), of.share.len()] == [spec.kv_len(), spec.kv_len(), dim, dim]
        };
        if of.as_ref().is_some_and(|of| of.len() != kv_heads || !of.iter().all(is_of)) {
            return Err(Error::NotAsPlanned { tensor, what: "measured errors" });
        }
    }
    if spec.numerics.storage == rapt_core::DType::F64 || spec.codes.q.is_some() || spec.pages.is_some() {
        let why = "errors are measured of k and v in tensors of their own, and rows are computed in float32";
        return Err(Error::unsupported("an estimate for this request", why, "q as float32, float16 or bfloat16"));
    }
    let mut all = vec![HeadDeviation::default(); heads];
    let Some(steps) = &launch.steps else { return Ok(all) };
    let arch = steps.main.arch;
    if !available().contains(&arch) {
        return Err(Error::unsupported(arch.name(), "this machine or build lacks it", "plan on this machine"));
    }
    let decisions = decisions(spec, &steps.decisions);
    let problem = Problem::new(spec, &decisions, operands, std::ptr::null_mut(), |reading| row_reader(arch, reading));
    let of_group = spec.group_size() * spec.q_len();
    let mut rows = vec![RowDeviation::default(); kv_heads * of_group];
    run_rows((arch, launch.threads), &problem, kv_heads, errors, &mut rows, executor)?;
    // The rows of a group are those of its query heads, one after the other.
    for (head, rows) in all.iter_mut().zip(rows.chunks_exact(spec.q_len())) {
        *head = head_of(rows);
    }
    Ok(all)
}

/// Every row to f32, whatever it is.
fn decisions(spec: &rapt_core::Spec, planned: &Decisions) -> Decisions {
    let reading = |codes: &Option<Box<rapt_core::CodesSpec>>, dtype| {
        let kind =
            codes.as_deref().map_or_else(|| RowKind::of_dtype(dtype), |codes| Some(RowKind::of_format(codes.format)));
        kind.map(|kind| Reading { kind, fold: None, pairs: None, quads: None })
    };
    let readings = Qkv {
        q: reading(&spec.codes.q, spec.q.dtype),
        k: reading(&spec.codes.k, spec.k.dtype),
        v: reading(&spec.codes.v, spec.v.dtype),
    };
    Decisions { readings, ..*planned }
}

/// Deals the rows of all key heads, some at a time, to threads.
fn run_rows(
    (arch, threads): (Arch, usize),
    problem: &Problem,
    kv_heads: usize,
    errors: &Qkv<Option<Vec<MatrixErrors<'_>>>>,
    rows: &mut [RowDeviation],
    executor: &dyn Executor,
) -> Result<()> {
    let run = arch::with_vectors(arch, Find);
    let of_group = problem.group_size * problem.q_len;
    let blocks = of_group.div_ceil(ROWS);
    let scratch_len = deviation::scratch_len(problem.head_dim, problem.head_dim_v);
    let scratch_bytes = (scratch_len * 4).next_multiple_of(64);
    let mut memory = rapt_core::Workspace::default();
    memory.ensure(threads * scratch_bytes)?;
    let pool = Pool { executor, threads, scratch_bytes, base: Shared(memory.as_mut_ptr()) };
    let num_kv_heads = problem.num_q_heads / problem.group_size;
    let to = Shared(rows.as_mut_ptr().cast());
    let to = &to;
    pool.deal(kv_heads * blocks, |n, scratch| {
        let (of, block) = (n / blocks, n % blocks);
        let first = block * ROWS;
        let rows = (first, of_group.min(first + ROWS));
        let item = Rows {
            problem,
            batch: of / num_kv_heads,
            kv_head: of % num_kv_heads,
            rows,
            errors: HeadErrors {
                k: errors.k.as_ref().map(|errors| errors[of]),
                v: errors.v.as_ref().map(|errors| errors[of]),
            },
            scratch: scratch.cast(),
            out: to.0.cast::<RowDeviation>().wrapping_add(of * of_group + first),
        };
        // SAFETY: the instruction set is there; scratch memory is this thread's and long enough; each item has rows of its own, and the
        // errors have the sizes of K and V.
        unsafe { run(item) }
    })
}
