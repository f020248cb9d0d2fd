//! Attention in browsers: what the npm package `rapt-attention` has in WebAssembly.
//!
//! ```text
//! request (text) ──► rapt_plan ──► which bytes are copied; on a GPU: kernels, bindings, parameters, workgroups      plan.rs
//!                    rapt_source ─► a kernel's text in WGSL                                                        plan.rs
//!                    rapt_run ───► the CPU kernels on tensors that were copied to this module's memory               run.rs
//!                    rapt_reference ► the same by the definition, in float64                                         run.rs
//! ```
//! A page hands over texts (JSON) and addresses in this module's memory; the package's TypeScript has the device. Every request is
//! checked here, by rapt-core: each address inside its array or buffer, outputs that overlap nothing. Deliberately absent: threads, and
//! any call of the page.

pub mod exports;
mod hints;
mod plan;
mod refusal;
mod request;
mod run;

#[cfg(test)]
mod tests;
