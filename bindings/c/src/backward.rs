//! The functions of rapt.h for the gradients of attention.

use engine::{
    BackwardOperands, BackwardTensors, Options, Queue, VarlenBackwardTensors, View, ViewMut, backward_spec_of,
};

use crate::abi::{rapt_error, rapt_gradients, rapt_options, rapt_tensor};
use crate::ragged::in_host_memory;
use crate::rapt_engine;
use crate::read::{self, optional, to_read, view, view_mut};
use crate::refusal::{Refusal, guard};

/// Gradients of the call rapt_attention(engine, q, k, v, out, options), whose `out` and `options->lse` are read here: into those
/// tensors of `gradients` that are not NULL, from `d_o`, the gradient by out.
///
/// Each gradient has the dtype and the sizes of its input, any strides that name every element once, and shares no memory with
/// another tensor. `options->lse` is never NULL. With dropout the options are those of the forward call, seed and offset too. q, k
/// and v have numbers: codes, a tolerance and another compute are refused. A pair that is not attended gives exactly 0. On an error nothing was written, and the engine serves on.
/// (RAPT_ERROR_INTERNAL alone leaves gradients unspecified: it is a defect of Rapt.)
///
/// # Safety
/// `engine` is alive. Each descriptor, and each tensor behind one, is what it says: readable memory that nobody writes during the
/// call, and for gradients writable memory that nobody else uses. NULL is safe everywhere.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_attention_backward(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    out: *const rapt_tensor,
    d_o: *const rapt_tensor,
    gradients: *const rapt_gradients,
    options: *const rapt_options,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word is the same.
        let (tensors, options) = unsafe { read([q, k, v, out, d_o], gradients, options) }?;
        let plan = engine.plan_backward(&backward_spec_of(&tensors, &options)?)?;
        engine.run_backward(&plan, &mut BackwardOperands::check(tensors, plan.spec())?)?;
        Ok(())
    })
}

/// Gradients of the call rapt_varlen_attention(engine, q, k, v, cu_seqlens_q, cu_seqlens_kv, out, options): of each sequence the bits
/// of rapt_attention_backward() for it alone, and of sinks the sum over the sequences.
///
/// Tensors are as in rapt_varlen_attention(), `options->lse` and `gradients->d_lse` [num_q_heads, total_q]. Rows of no sequence get
/// zeros. A mask, and what rapt_attention_backward() refuses, is refused. On an error nothing was written, and the engine serves on.
///
/// # Safety
/// As rapt_attention_backward().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_varlen_attention_backward(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    cu_seqlens_q: *const rapt_tensor,
    cu_seqlens_kv: *const rapt_tensor,
    out: *const rapt_tensor,
    d_o: *const rapt_tensor,
    gradients: *const rapt_gradients,
    options: *const rapt_options,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word is the same.
        let (tensors, options) = unsafe { read([q, k, v, out, d_o], gradients, options) }?;
        // SAFETY: as above.
        let (cu_seqlens_q, cu_seqlens_kv) =
            unsafe { (view("cu_seqlens_q", cu_seqlens_q)?, view("cu_seqlens_kv", cu_seqlens_kv)?) };
        let offsets = [("cu_seqlens_q", Some(&cu_seqlens_q)), ("cu_seqlens_kv", Some(&cu_seqlens_kv))];
        in_host_memory(tensors.inputs().map(|(name, view)| (name, Some(view))).chain(offsets))?;
        let tensors = VarlenBackwardTensors { cu_seqlens_q, cu_seqlens_kv, tensors };
        Ok(engine.varlen_backward(tensors, &options, &Queue::Host(engine.executor()))?)
    })
}

/// What the arguments say.
///
/// # Safety
/// As rapt_attention_backward(), for 'a.
pub(crate) unsafe fn read<'a>(
    [q, k, v, out, d_o]: [*const rapt_tensor; 5],
    gradients: *const rapt_gradients,
    options: *const rapt_options,
) -> Result<(BackwardTensors<'a>, Options), Refusal> {
    // SAFETY: the caller's word.
    let (q, k, v) = unsafe { (view("q", q)?, view("k", k)?, view("v", v)?) };
    // SAFETY: as above.
    let (out, d_o) = unsafe { (view("out", out)?, view("d_o", d_o)?) };
    // SAFETY: as above.
    let (gradients, given) = unsafe { (self::gradients(gradients)?, read::options(options)?) };
    let asked = read::parse(&given)?;
    refuse_codes(&given)?;
    // SAFETY: as above.
    let lse: View<'a> = unsafe { view("lse", given.lse) }?;
    // SAFETY: as above.
    unsafe {
        let tensors = BackwardTensors {
            mask: optional("mask", given.mask)?,
            sinks: optional("sinks", given.sinks)?,
            alibi_slopes: optional("alibi_slopes", given.alibi_slopes)?,
            dropout: read::dropout(&given, q.device())?,
            d_lse: optional("d_lse", gradients.d_lse)?,
            dq: asked_for("dq", gradients.dq)?,
            dk: asked_for("dk", gradients.dk)?,
            dv: asked_for("dv", gradients.dv)?,
            d_mask: asked_for("d_mask", gradients.d_mask)?,
            d_sinks: asked_for("d_sinks", gradients.d_sinks)?,
            ..BackwardTensors::new([q, k, v], out, lse, d_o)
        };
        Ok((tensors, asked))
    }
}

/// Codes have no gradient, and nothing is judged.
fn refuse_codes(given: &rapt_options) -> Result<(), Refusal> {
    let fields = [
        ("q_codes", !given.q_codes.is_null()),
        ("k_codes", !given.k_codes.is_null()),
        ("v_codes", !given.v_codes.is_null()),
        ("tolerance", !given.tolerance.is_null()),
    ];
    match fields.into_iter().find(|(_, is_given)| *is_given) {
        Some((what, _)) => {
            let what = format!("gradients with options.{what}");
            Err(engine::Error::unsupported(what, "codes have no gradient", "leave it NULL, and give numbers").into())
        }
        None => Ok(()),
    }
}

/// # Safety
/// `given` leads to a tensor that is what it says and that nobody else uses for 'a, or is NULL.
unsafe fn asked_for<'a>(name: &'static str, given: *const rapt_tensor) -> Result<Option<ViewMut<'a>>, Refusal> {
    // SAFETY: the caller's word.
    if given.is_null() { Ok(None) } else { unsafe { view_mut(name, given) }.map(Some) }
}

/// # Safety
/// `given` leads to as many bytes as its size says, or is NULL.
unsafe fn gradients(given: *const rapt_gradients) -> Result<rapt_gradients, Refusal> {
    let given = to_read(given, "gradients")?;
    // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
    let size = unsafe { (*given).size };
    read::struct_size("gradients.size", size, &[size_of::<rapt_gradients>()])?;
    // SAFETY: as long as its size says, which was found to be that of this struct.
    Ok(unsafe { given.read() })
}
