//! The fuzz targets as plain functions: bytes in, whether the request was accepted out, a panic where a promise is broken.
//!
//! ```text
//! spec       sizes, strides, dtypes, options ─► Spec ─► select       refused by a typed error, or planned without wrapping
//! operands   tensors in one arena            ─► Operands ─► run      each proof found again address by address; nothing else written
//! dlpack     a DLTensor as a producer fills it ─► View ─► Spec       what is not sound is refused before it is followed
//! explain    a request with its outputs      ─► Plan ─► text         every row said, every number finite, the certificate's facts
//! ```
//!
//! `fuzz/` wraps each in a libFuzzer binary; `tests/corpus.rs` replays the corpus with the stable compiler. A further
//! target is one function here, one line in [`TARGETS`] and one binary there. Deliberately absent: libFuzzer, and randomness of its own.

mod dlpack;
#[path = "../../../bindings/python/src/convert/dlpack_abi.rs"]
mod dlpack_abi;
mod explain;
mod operands;
mod sketch;
mod spec;

pub use dlpack::dlpack;
pub use explain::explain;
pub use operands::operands;
pub use spec::spec;

/// A target: whether what `data` describes was accepted.
pub type Target = fn(data: &[u8]) -> bool;

/// Every target by name, which is also that of its corpus and of its binary.
pub const TARGETS: [(&str, Target); 4] =
    [("spec", spec), ("operands", operands), ("dlpack", dlpack), ("explain", explain)];

/// What every refusal owes: a message, and a family that a binding can map.
///
/// # Panics
/// If it does not say what it refuses.
fn check_refusal(error: &rapt::Error) {
    let text = error.to_string();
    assert!(text.len() > 8, "{error:?} says {text:?}");
    if let Some(tensor) = error.tensor() {
        assert!(text.contains(tensor), "{text:?} does not name {tensor}");
    }
    let _ = error.kind();
}
