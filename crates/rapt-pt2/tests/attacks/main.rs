//! Archives made to break a reader, each with the exact refusal it gets.
#![allow(missing_docs)]

mod builder;
mod json;
mod memory;
mod zip;
