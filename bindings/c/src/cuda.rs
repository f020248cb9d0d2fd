//! The functions of rapt.h for tensors on NVIDIA GPUs.
//!
//! ```text
//! tensors, rapt_cuda_queue ─► plan ─► the bytes that it needs, or: proven, then enqueued on the caller's stream
//! ```
//! Deliberately absent: a stream, memory of a device, caches of keys and values, and any wait.

use std::ffi::c_void;

use engine::{
    BackwardOperands, Device, DeviceMemory, Error, Operands, Queue, VarlenBackwardTensors, VarlenTensors,
    backward_spec_of, spec_of,
};

use crate::abi::{rapt_cuda_queue, rapt_error, rapt_gradients, rapt_options, rapt_tensor};
use crate::backward;
use crate::ragged::Asked;
use crate::rapt_engine;
use crate::read::{self, Call, to_read, view, view_mut};
use crate::refusal::{Refusal, guard};

/// A rapt_cuda_queue, as it was read.
struct Given {
    stream: usize,
    workspace: DeviceMemory,
    needed: Option<*mut usize>,
}

impl Given {
    /// # Safety
    /// `queue` leads to as many bytes as its size says, or is NULL.
    unsafe fn read(queue: *const rapt_cuda_queue) -> Result<Self, Refusal> {
        let queue = to_read(queue, "queue")?;
        // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
        read::struct_size("queue.size", unsafe { (*queue).size }, &[size_of::<rapt_cuda_queue>()])?;
        // SAFETY: as long as its size says.
        let rapt_cuda_queue { stream, workspace, workspace_bytes, needed_bytes, .. } = unsafe { queue.read() };
        let needed =
            if needed_bytes.is_null() { None } else { Some(read::to_write(needed_bytes, "queue.needed_bytes")?) };
        let address = |pointer: *mut c_void| pointer.addr();
        let workspace = DeviceMemory { address: address(workspace), len_bytes: workspace_bytes };
        Ok(Given { stream: address(stream), workspace, needed })
    }

    /// Answers how much a plan needs, or runs it.
    ///
    /// # Safety
    /// As rapt_cuda_attention().
    unsafe fn answer(
        &self,
        device: Device,
        plan_bytes: usize,
        run: impl FnOnce(DeviceMemory, &Queue<'_>) -> engine::Result<()>,
    ) -> Result<(), Refusal> {
        if let Some(needed) = self.needed {
            // SAFETY: neither NULL nor unaligned; that a number lies there is the caller's word.
            unsafe { needed.write(plan_bytes) };
            return Ok(());
        }
        // A call that needs none may give none.
        let workspace = if plan_bytes == 0 { DeviceMemory { address: 16, len_bytes: 0 } } else { self.workspace };
        Ok(run(workspace, &Queue::Cuda { device: index(device)?, stream: self.stream })?)
    }
}

fn index(device: Device) -> Result<u32, Refusal> {
    match device {
        Device::Cuda(index) => Ok(index),
        device => {
            let why = "functions with a rapt_cuda_queue take tensors on NVIDIA GPUs".to_owned();
            Err(Error::DeviceUnavailable { device, why }.into())
        }
    }
}

/// rapt_attention() of tensors on an NVIDIA GPU: enqueued on the stream of `queue`, and returned from at once. Every option but a tolerance.
///
/// Where `queue->needed_bytes` is given, it gets the bytes of scratch memory that the call needs, and nothing runs. The first call of its kind
/// loads its kernel, or compiles it in seconds; later ones may be captured into a CUDA graph.
///
/// # Safety
/// As rapt_attention(), and what is read and written, the scratch memory too, is memory of the device of the tensors that stays as it is until
/// the stream has passed this call. The stream is one of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_cuda_attention(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    out: *const rapt_tensor,
    options: *const rapt_options,
    queue: *const rapt_cuda_queue,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word is the same.
        let (queue, (tensors, asked)) = unsafe { (Given::read(queue)?, Call { q, k, v, out, options }.read()?) };
        // SAFETY: as above.
        unsafe { refuse_tolerance(options) }?;
        index(tensors.q.device())?;
        let plan = engine.plan(&spec_of(&tensors, &asked)?)?;
        let mut operands = Operands::check(tensors, plan.spec())?;
        // SAFETY: as above, until the stream has passed the call.
        unsafe {
            queue.answer(plan.spec().device, plan.workspace_bytes(), |workspace, on| {
                engine.run_async(&plan, &mut operands, workspace, on)
            })
        }
    })
}

/// rapt_attention_backward() of tensors on an NVIDIA GPU, enqueued as rapt_cuda_attention() is.
///
/// # Safety
/// As rapt_cuda_attention() and rapt_attention_backward().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_cuda_attention_backward(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    out: *const rapt_tensor,
    d_o: *const rapt_tensor,
    gradients: *const rapt_gradients,
    options: *const rapt_options,
    queue: *const rapt_cuda_queue,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word is the same.
        let (queue, (tensors, options)) =
            unsafe { (Given::read(queue)?, backward::read([q, k, v, out, d_o], gradients, options)?) };
        index(tensors.q.device())?;
        let plan = engine.plan_backward(&backward_spec_of(&tensors, &options)?)?;
        let mut operands = BackwardOperands::check(tensors, plan.spec())?;
        // SAFETY: as above, until the stream has passed the call.
        unsafe {
            queue.answer(plan.spec().forward().device, plan.workspace_bytes(), |workspace, on| {
                engine.run_backward_async(&plan, &mut operands, workspace, on)
            })
        }
    })
}

/// rapt_varlen_attention() of tensors on an NVIDIA GPU, offsets too, enqueued as rapt_cuda_attention() is. The device reads the offsets: rows of
/// sequences that begin before others have ended count for the first, and keys that do not lie in k make NaN.
///
/// # Safety
/// As rapt_cuda_attention().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_cuda_varlen_attention(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    cu_seqlens_q: *const rapt_tensor,
    cu_seqlens_kv: *const rapt_tensor,
    out: *const rapt_tensor,
    options: *const rapt_options,
    queue: *const rapt_cuda_queue,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word.
        let (queue, q, k, v) = unsafe { (Given::read(queue)?, view("q", q)?, view("k", k)?, view("v", v)?) };
        // SAFETY: as above.
        let (cu_seqlens_q, cu_seqlens_kv) =
            unsafe { (view("cu_seqlens_q", cu_seqlens_q)?, view("cu_seqlens_kv", cu_seqlens_kv)?) };
        // SAFETY: as above.
        let (out, asked) = unsafe { (view_mut("out", out)?, Asked::read(options, q.device())?) };
        // SAFETY: as above.
        let codes = unsafe { asked.codes() }?;
        let Asked { options, sinks, alibi_slopes, dropout, lse, .. } = asked;
        index(q.device())?;
        let tensors =
            VarlenTensors { q, k, v, codes, cu_seqlens_q, cu_seqlens_kv, sinks, alibi_slopes, dropout, out, lse };
        let plan = engine.plan_varlen(&tensors, &options)?;
        // SAFETY: as above, until the stream has passed the call.
        unsafe {
            queue.answer(plan.spec().device, plan.workspace_bytes(), |workspace, on| {
                engine.varlen_attention_async(&plan, tensors, workspace, on)
            })
        }
    })
}

/// rapt_varlen_attention_backward() of tensors on an NVIDIA GPU, offsets too, enqueued as rapt_cuda_attention() is. Offsets that decrease or
/// leave their tensor leave gradients unspecified; no other memory is read or written for them.
///
/// # Safety
/// As rapt_cuda_attention() and rapt_attention_backward().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_cuda_varlen_attention_backward(
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
    queue: *const rapt_cuda_queue,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word is the same.
        let (queue, (tensors, options)) =
            unsafe { (Given::read(queue)?, backward::read([q, k, v, out, d_o], gradients, options)?) };
        // SAFETY: as above.
        let (cu_seqlens_q, cu_seqlens_kv) =
            unsafe { (view("cu_seqlens_q", cu_seqlens_q)?, view("cu_seqlens_kv", cu_seqlens_kv)?) };
        index(tensors.q.device())?;
        let tensors = VarlenBackwardTensors { cu_seqlens_q, cu_seqlens_kv, tensors };
        let plan = engine.plan_varlen_backward(&tensors, &options)?;
        // SAFETY: as above, until the stream has passed the call.
        unsafe {
            queue.answer(plan.spec().forward().device, plan.workspace_bytes(), |workspace, on| {
                engine.varlen_backward_async(&plan, tensors, workspace, on)
            })
        }
    })
}

/// Heads are judged by calls that wait.
///
/// # Safety
/// As rapt_attention().
unsafe fn refuse_tolerance(options: *const rapt_options) -> Result<(), Refusal> {
    // SAFETY: the caller's word.
    if options.is_null() || unsafe { read::options(options) }?.tolerance.is_null() {
        return Ok(());
    }
    let why = "the host would wait for what the device says of heads";
    Err(Error::unsupported("a tolerance on an NVIDIA GPU", why, "give tolerance = NULL").into())
}
