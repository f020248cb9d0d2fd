//! Devices that tensors of the host are copied to: those that this build has a backend for.

use std::sync::Arc;

use rapt_core::{Device, Error, Offload, Result};

/// The device that tensors of the host are copied to, opened: what [`Engine::with_offload`](crate::Engine::with_offload) takes.
///
/// # Errors
/// [`Error::DeviceUnavailable`] for a device that is not there, that such tensors are not copied to, or for which this build has no
/// backend.
pub fn offload(device: Device) -> Result<Arc<dyn Offload>> {
    let why = match device {
        #[cfg(feature = "vulkan")]
        Device::Vulkan(adapter) => return Ok(Arc::new(gpu(adapter)?)),
        #[cfg(not(feature = "vulkan"))]
        Device::Vulkan(_) => "this build has no backend for Vulkan: it is behind the cargo feature `vulkan`",
        _ => "tensors of the host are computed on the host, or on a GPU by Vulkan",
    };
    Err(Error::DeviceUnavailable { device, why: why.to_owned() })
}

/// The adapter of this index.
#[cfg(feature = "vulkan")]
pub(crate) fn gpu(adapter: u32) -> Result<rapt_wgpu::Gpu> {
    rapt_wgpu::Gpu::open(adapter).map_err(|error| error.on(Device::Vulkan(adapter)))
}
