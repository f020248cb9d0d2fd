//! A device that another library has: the C interface between two libraries of Rapt in one process.
//!
//! ```text
//! asks: rapt._native                                          has the device: rapt_vulkan
//! Spec ──► Request ────────────── Interface::plan ──────────► Spec ──► Offload::plan_host
//! Plan ◄── Facts, texts ◄──────────────────────────────────── Plan, which stays there
//! Operands ──► Addresses ──────── Interface::run ───────────► Operands ──► Offload::run_host
//!                                          loaded.rs          provide.rs
//! ```
//! Rust's types have no layout that two libraries share, so integers, floats and texts cross, in the structs of `abi`; `request` says which
//! of them a spec becomes. [`Loaded`] is an [`Offload`](rapt_core::Offload) like any other: whoever plans and runs knows of no other library.
//! Each side checks what it is given: a request is built to a spec anew, and operands are proven again on the side that reads them.
//!
//! Deliberately absent: finding and opening the other library (that of Python is imported), and requests of other tensors than dense
//! numbers, which are refused before they cross.

mod abi;
mod loaded;
mod provide;
mod refusal;
mod request;

pub use abi::{Interface, NAME, VERSION};
pub use loaded::{Bridge, BridgeError, Loaded};
pub use provide::{Provider, interface};
