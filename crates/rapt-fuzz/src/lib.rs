//! The fuzz targets as plain functions: bytes in, whether the request was accepted out, a panic where a promise is broken.
//!
//! ```text
//! spec       sizes, strides, dtypes, options ─► Spec ─► select       refused by a typed error, or planned without wrapping
//! operands   tensors in one arena            ─► Operands ─► run      each proof found again address by address; nothing else written
//! gradients  the same of a backward pass     ─► BackwardOperands ─► run  the same of the gradients
//! dlpack     a DLTensor as a producer fills it ─► View ─► Spec       what is not sound is refused before it is followed
//! c_abi      the same through rapt.h         ─► an error code            refusals change nothing; what is served writes its own bytes alone
//! varlen     packed sequences, offsets ─► an error code               refused with nothing written, or each as a call alone
//! kvcache    a cache, lengths, pages ─► an error code                 the same, and new keys where they belong
//! sequences  steps of a rapt_kv_cache ─► error codes                  each sequence as a call alone on what it was given; no page lost
//! explain    a request with its outputs      ─► Plan ─► text         every row said, every number finite, the certificate's facts
//! c_model    an archive ─► rapt_model ─► a run     refused by an error code, or only results are written
//! pt2_archive a .pt2 file ─► Archive                                 refused by a typed error, or every tensor within its storage
//! pt2_expr   a text ─► expression, guard                             refused, or its own text means the same
//! ```
//!
//! `fuzz/` wraps each in a libFuzzer binary; `tests/corpus.rs` replays the corpus with the stable compiler. A further
//! target is one function here, one line in [`TARGETS`] and one binary there. Deliberately absent: libFuzzer, and randomness of its own.

mod arbitrary;
mod c;
mod dlpack;
#[path = "../../../bindings/python/src/tensors/dlpack_abi.rs"]
mod dlpack_abi;
mod explain;
mod gradients;
mod model;
mod operands;
mod pt2;
mod ragged;
mod sequences;
mod spec;

pub use c::c_abi;
pub use dlpack::dlpack;
pub use explain::explain;
pub use gradients::gradients;
pub use model::c_model;
pub use operands::operands;
pub use pt2::{pt2_archive, pt2_expr};
pub use ragged::{kvcache, varlen};
pub use sequences::sequences;
pub use spec::spec;

/// A target: whether what `data` describes was accepted.
pub type Target = fn(data: &[u8]) -> bool;

/// Every target by name, which is also that of its corpus and of its binary.
pub const TARGETS: [(&str, Target); 12] = [
    ("spec", spec),
    ("operands", operands),
    ("gradients", gradients),
    ("dlpack", dlpack),
    ("c_abi", c_abi),
    ("c_model", c_model),
    ("varlen", varlen),
    ("kvcache", kvcache),
    ("sequences", sequences),
    ("explain", explain),
    ("pt2_archive", pt2_archive),
    ("pt2_expr", pt2_expr),
];

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

/// The next of a stream of numbers that is the same everywhere and for ever: splitmix64 (Steele, Lea and Flood 2014).
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `data` with one to four bytes put in, taken out, replaced or flipped in a bit.
#[must_use]
pub fn mutate(data: &[u8], state: &mut u64) -> Vec<u8> {
    let mut data = data.to_vec();
    for _ in 0..1 + next(state) % 4 {
        let at = (next(state) % (data.len() as u64 + 1)) as usize;
        match next(state) % 4 {
            0 => data.insert(at, next(state) as u8),
            1 if at < data.len() => drop(data.remove(at)),
            2 if at < data.len() => data[at] = next(state) as u8,
            _ if at < data.len() => data[at] ^= 1 << (next(state) % 8),
            _ => {}
        }
    }
    data
}
