//! The module `rapt_vulkan`: GPUs that Vulkan reaches, for the package `rapt`, which imports it where `device="vulkan:0"` asks for one.
//!
//! ```text
//! rapt._native ──import──► rapt_vulkan.interface (a capsule) ──► rapt::bridge::Interface ──► rapt::offload, rapt::doctor::vulkan
//! ```
//! A wheel of its own, so that that of `rapt` has nothing of wgpu. Deliberately absent: functions for Python; tensors, errors and plans are the
//! business of `rapt`.

mod module;
