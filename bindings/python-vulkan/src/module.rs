//! The module as Python imports it: the interface, and its version.

use std::ffi::c_void;
use std::sync::Arc;

use pyo3::{ffi, prelude::*};
use rapt::bridge::{self, Interface, Provider};
use rapt::{Device, Offload};

struct Vulkan;

impl Provider for Vulkan {
    fn report() -> Vec<(String, String)> {
        rapt::doctor::vulkan()
    }

    fn open(adapter: u32) -> rapt::Result<Arc<dyn Offload>> {
        rapt::offload(Device::Vulkan(adapter))
    }
}

static INTERFACE: Interface = bridge::interface::<Vulkan>();

/// The backend of `rapt` for GPUs that Vulkan reaches: `rapt.attention(q, k, v, device="vulkan:0")`.
#[pymodule]
fn rapt_vulkan(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let address = (&raw const INTERFACE).cast_mut().cast::<c_void>();
    // SAFETY: a static and a static name, which nobody frees and, of a capsule without a destructor, nobody ends.
    let capsule =
        unsafe { Bound::from_owned_ptr_or_err(module.py(), ffi::PyCapsule_New(address, bridge::NAME.as_ptr(), None)) }?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("interface", capsule)
}
