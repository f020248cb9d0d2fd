//! Which operands [`Compute`] is served with.
//!
//! ```text
//!         q                             k                                  v
//! exact   all that a spec takes
//! int8    float32, float16, bfloat16    int8 by tensor, head or token      int8 by tensor, head or channel
//! fp8     none
//! ```
//! A factor of k along head_dim, or of v along the keys, would have to come in between the integers of a sum. Deliberately absent: codes
//! made on the way: what is masked would have a say in the scale of v's channels.

use super::quantized::{CodesSpec, Qkv};
use crate::{Compute, Device, Error, Format, Granularity, Result};

/// The most elements of a row whose products of int8 codes are summed in 32 bits: 127 · 128 each.
const MOST_HEAD_DIM: usize = 1 << 17;

/// That `compute` is served with these operands.
///
/// # Errors
/// [`Error::Unsupported`].
pub(super) fn check(compute: Compute, device: Device, head_dim: usize, codes: Qkv<Option<&CodesSpec>>) -> Result<()> {
    let refuse = |with: String, why: &str, instead: String| {
        Err(Error::unsupported(format!("compute=\"{}\" {with}", compute.name()), why, instead))
    };
    match compute {
        Compute::Exact => return Ok(()),
        Compute::Fp8 => {
            let why = "it has no kernel that forms products of float8";
            return refuse(format!("on {device}"), why, "leave compute at \"exact\"".to_owned());
        }
        Compute::Int8 => {}
    }
    if let Some(q) = codes.q {
        let why = "q is rounded to int8 row by row, by scales of its own";
        return refuse(format!("with q of {} codes", q.format), why, "give q as numbers".to_owned());
    }
    for (tensor, codes, last, along) in
        [("k", codes.k, Granularity::Token, "head_dim"), ("v", codes.v, Granularity::Channel, "the keys")]
    {
        let instead = format!("quantize {tensor} to int8 by tensor, head or {last}");
        let Some(codes) = codes else {
            let why = "both products are formed of int8 codes, whose scales are the caller's";
            return refuse(format!("with {tensor} that is no codes"), why, instead);
        };
        if codes.format != Format::Int8 {
            let why = "both products are formed of int8 codes";
            return refuse(format!("with {tensor} of {} codes", codes.format), why, instead);
        }
        if ![Granularity::Tensor, Granularity::Head, last].contains(&codes.granularity) {
            let why = format!("its integers are summed along {along}, where a factor must not change");
            return refuse(format!("with {tensor} of int8 codes by {}", codes.granularity), &why, instead);
        }
    }
    if head_dim > MOST_HEAD_DIM {
        let why = format!("sums of more than {MOST_HEAD_DIM} products of int8 codes leave 32 bits");
        return refuse(format!("with head_dim {head_dim}"), &why, "leave compute at \"exact\"".to_owned());
    }
    Ok(())
}
