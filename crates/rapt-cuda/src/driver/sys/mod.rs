//! Foreign functions, as they are: nothing is checked here.
//!
//! The driver's come from cudarc, which opens libcuda at the first call and panics without it: `result::cuda` asks
//! [`is_driver_present`] before anything else.

mod library;
pub(crate) mod nvrtc;

pub(crate) use cudarc::driver::sys as cuda;

/// Whether libcuda can be opened.
pub(crate) fn is_driver_present() -> bool {
    // SAFETY: opens the driver's library, whose initialisers are NVIDIA's.
    unsafe { cuda::is_culib_present() }
}
