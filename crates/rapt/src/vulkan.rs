//! GPUs that Vulkan reaches, behind the cargo feature `vulkan`: an engine that attends to tensors of the host there, and to tensors in
//! buffers of wgpu.
//!
//! ```text
//! vulkan::adapters()                               what there is
//! Engine::gpu(0)                                   an engine on the first: `attention_into` copies tensors there and back
//! Engine::vulkan() ─► Gpu::plan, Gpu::run          tensors in wgpu's buffers, where they lie
//! ```
//! An engine of a GPU serves dense tensors of float32, float16 and bfloat16; what it does not serve is refused by name, never computed
//! on the host instead.

pub use rapt_wgpu::{AdapterFacts, BufferTensor, BufferTensors, Gpu, GpuError, adapters, wgpu};

use std::sync::Arc;

use rapt_core::Result;

use crate::Engine;

impl Engine {
    /// An engine on the adapter of this index of [`adapters`]. Tensors of the host are copied there and back, which `explain` counts as
    /// `bytes_copied`; those in buffers of the GPU are attended to where they lie ([`Engine::vulkan`]).
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`](rapt_core::Error::DeviceUnavailable) where there is no such adapter, or it lacks what the kernels need.
    pub fn gpu(adapter: u32) -> Result<Self> {
        Engine::on_adapter(adapter, None)
    }

    pub(crate) fn on_adapter(adapter: u32, threads: Option<usize>) -> Result<Self> {
        let gpu = Arc::new(crate::offload::gpu(adapter)?);
        let mut engine = Engine::new(threads)?;
        engine.offload = Some(gpu.clone());
        engine.gpu = Some(gpu);
        Ok(engine)
    }

    /// The GPU of this engine, if it has one: plans and runs of tensors in buffers.
    #[must_use]
    pub fn vulkan(&self) -> Option<&Gpu> {
        self.gpu.as_deref()
    }
}
