//! Quantized tensors: codes of a few bits, and the scales that make numbers of them.
//!
//! ```text
//! x ≈ decode(code) · scale                      int8, int4, e4m3fn, e5m2 (f32 scales), mxfp8, mxfp4 (powers of two)
//! x ≈ (code − zero_point) · scale               uint8
//! x ≈ decode(code) · scale · global_scale       nvfp4 (e4m3 scales, one f32 for the tensor)
//! ```
//!
//! [`codes`] rounds to every number format, bit by bit; [`Format`] says which of them a tensor uses and what goes with it;
//! [`Form`] gives from a [`Scheme`] and a shape the shape of every part; [`quantize`] makes a [`Quantized`], [`QuantizedView`]
//! is one made of parts that lie elsewhere, and [`QuantizedView::dequantize_into`] gives the numbers back. [`analyze`]
//! measures what each choice costs on a tensor, [`measure`] how far the rows of one lie from what they were made of.
//!
//! A part that is missing is an error: no scale is ever taken to be 1. Deliberately absent: attention, devices, threads.
#![forbid(unsafe_code)]

mod analyze;
pub mod codes;
mod dequantize;
mod error;
mod form;
mod measure;
mod quantize;
mod quantized;
mod source;

pub use analyze::{Analysis, Candidate, analyze};
pub use error::{QuantError, Result};
pub use form::{Form, Scheme};
pub use measure::{Measured, measure};
pub use quantize::{Given, quantize, quantize_with_global};
pub use quantized::{Parts, Quantized, QuantizedView};
pub use rapt_core::swizzle::swizzled;
pub use rapt_core::{Format, Granularity, MatrixErrors, ScaleLayout};
