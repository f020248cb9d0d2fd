//! A run on this module's own processor: the CPU kernels, or the definition in float64, on tensors that were copied to its memory.

use std::sync::Mutex;

use half::{bf16, f16};
use rapt_core::{
    DType, Device, Finite, Operands, Queue, Result as CoreResult, SerialExecutor, Shape, Spec, Strides, TensorSpec,
    View, Workspace,
};
use rapt_reference::{Inputs, Mask, Outputs, Problem, naive};

use crate::plan::spec_of;
use crate::refusal::Refusal;
use crate::request::Request;

/// Scratch memory, which is kept.
static WORKSPACE: Mutex<Workspace> = Mutex::new(Workspace::new());

/// Runs `request` on the CPU kernels; out and lse are written when it returns.
///
/// # Safety
/// That of [`Request::views`].
pub(crate) unsafe fn run(request: &Request) -> Result<(), Refusal> {
    // SAFETY: promised by the caller.
    let tensors = unsafe { request.views(Device::Cpu) }?;
    let spec = spec_of(request, &tensors)?;
    let plan = rapt_cpu::select(&spec, &rapt_cpu::detect(1)?)?;
    let mut operands = Operands::check(tensors, &spec)?;
    let mut workspace = WORKSPACE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    workspace.ensure(plan.workspace_bytes())?;
    let Queue::Host(executor) = Queue::Host(&SerialExecutor) else { return Ok(()) };
    Ok(rapt_cpu::run(&plan, &mut operands, &mut workspace, executor)?)
}

/// What the definition says of `request` in float64: out in the order of q's dimensions, row-major, then lse.
///
/// # Safety
/// That of [`Request::views`].
pub(crate) unsafe fn reference(request: &Request) -> Result<Vec<f64>, Refusal> {
    // SAFETY: promised by the caller.
    let tensors = unsafe { request.views(Device::Cpu) }?;
    let spec = spec_of(request, &tensors)?;
    let numbers = |name, view: &View<'_>, of: &TensorSpec<4>| numbers(name, view, of.shape.into(), of.strides.into());
    let vector = |name, view: &Option<View<'_>>| {
        view.as_ref().map(|view| self::numbers(name, view, *view.shape(), *view.strides())).transpose()
    };
    let (q, k, v) =
        (numbers("q", &tensors.q, &spec.q)?, numbers("k", &tensors.k, &spec.k)?, numbers("v", &tensors.v, &spec.v)?);
    let mask = tensors.mask.as_ref().zip(spec.mask.as_ref());
    let mask = mask.map(|(view, of)| numbers("mask", view, of)).transpose()?;
    let is_bool = spec.mask.is_some_and(|mask| mask.dtype == DType::Bool);
    let bools: Option<Vec<bool>> =
        mask.as_ref().filter(|_| is_bool).map(|mask| mask.iter().map(|x| *x != 0.0).collect());
    let (sinks, alibi_slopes) = (vector("sinks", &tensors.sinks)?, vector("alibi_slopes", &tensors.alibi_slopes)?);
    let inputs = Inputs {
        q: &q,
        k: &k,
        v: &v,
        mask: bools.as_deref().map(Mask::Bool).or(mask.as_deref().map(Mask::Additive)),
        sinks: sinks.as_deref(),
        alibi_slopes: alibi_slopes.as_deref(),
    };
    let Outputs { mut out, lse } = naive(&problem(&spec), &inputs);
    if spec.layout == rapt_core::TensorLayout::Bshd {
        out = as_bshd(&out, spec.out.shape);
    }
    out.extend(lse);
    Ok(out)
}

fn problem(spec: &Spec) -> Problem {
    Problem {
        batch: spec.batch(),
        num_q_heads: spec.num_q_heads(),
        num_kv_heads: spec.num_kv_heads(),
        q_len: spec.q_len(),
        kv_len: spec.kv_len(),
        head_dim: spec.head_dim(),
        head_dim_v: spec.head_dim_v(),
        softmax_scale: spec.softmax_scale.get(),
        softcap: spec.softcap.map(Finite::get),
        causal: spec.causal,
        window: spec.window,
        dropout: None,
    }
}

/// The elements of `view` under sizes and strides that are a permutation or a broadcast of its own, row-major.
fn numbers(name: &'static str, view: &View<'_>, shape: Shape, strides: Strides) -> CoreResult<Vec<f64>> {
    // SAFETY: the same memory, of which no other element is named.
    let view = unsafe {
        View::from_raw_parts(name, view.as_ptr(), view.dtype(), shape, strides, view.device(), view.extent())
    }?;
    Ok(match view.dtype() {
        DType::F64 => view.lines::<f64>(name)?.elements().collect(),
        DType::F32 => view.lines::<f32>(name)?.elements().map(f64::from).collect(),
        DType::F16 => view.lines::<f16>(name)?.elements().map(f64::from).collect(),
        DType::BF16 => view.lines::<bf16>(name)?.elements().map(f64::from).collect(),
        _ => view.reinterpreted(name, DType::U8)?.lines::<u8>(name)?.elements().map(f64::from).collect(),
    })
}

/// `[batch, heads, len, dim]` in the order `[batch, len, heads, dim]`.
fn as_bshd(x: &[f64], [batch, heads, len, dim]: [usize; 4]) -> Vec<f64> {
    let rows =
        (0..batch).flat_map(move |b| (0..len).flat_map(move |i| (0..heads).map(move |h| (b * heads + h) * len + i)));
    rows.flat_map(|row| x[row * dim..][..dim].iter().copied()).collect()
}
