//! Hints: the expression of JavaScript that corrects a refused request.

use rapt_core::{DType, Error, Shape};

/// The array whose elements are numbers of `dtype`.
const fn array(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "Float64Array",
        DType::F32 => "Float32Array",
        DType::F16 => "Float16Array",
        DType::BF16 => "Uint16Array",
        _ => "Uint8Array",
    }
}

fn cast(tensor: &str, dtype: DType) -> String {
    match dtype {
        DType::BF16 => {
            format!("{tensor} of bfloat16: a Uint16Array of the upper halves of float32, with `dtype: \"bfloat16\"`")
        }
        DType::Bool => format!("`{{ ...{tensor}, data: Uint8Array.from({tensor}.data, Number), dtype: \"bool\" }}`"),
        dtype => {
            let array = array(dtype);
            format!("`{{ ...{tensor}, data: {array}.from({tensor}.data), dtype: \"{dtype}\" }}`")
        }
    }
}

fn list(shape: &Shape) -> String {
    format!("[{}]", shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

fn new_output(tensor: &str, shape: &Shape, dtype: Option<DType>) -> String {
    let count = shape.numel().unwrap_or(usize::MAX);
    let data = dtype.map_or("new q.data.constructor".to_owned(), |dtype| format!("new {}", array(dtype)));
    format!("`{tensor}: {{ data: {data}({count}), shape: {} }}`", list(shape))
}

fn widest(allowed: &[DType]) -> DType {
    if allowed.contains(&DType::F32) { DType::F32 } else { allowed.last().copied().unwrap_or(DType::F32) }
}

/// Sizes of `tensor` of which dimension `dim`, counted from the end, is `len`.
fn cut(tensor: &str, dim: usize, len: usize) -> String {
    format!(
        "`{{ ...{tensor}, strides: {tensor}.strides, shape: {tensor}.shape.with(-{dim}, {len}) }}` with strides that are stated"
    )
}

/// The hint for `error`, or nothing where its message says it already.
pub(crate) fn expression(error: &Error) -> String {
    match error {
        Error::DtypeMismatch { tensor, expected, .. } | Error::OtherDtype { tensor, expected, .. } => {
            cast(tensor, *expected)
        }
        Error::UnsupportedDtype { tensor, got: DType::U16, .. } => {
            format!("`dtype: \"float16\"` or `dtype: \"bfloat16\"` beside `data` of {tensor}, whichever its bits are")
        }
        Error::UnsupportedDtype { tensor: "mask", got: DType::U8, .. } => {
            "`dtype: \"bool\"` beside `data` of mask, where 1 attends".to_owned()
        }
        Error::UnsupportedDtype { tensor, allowed, .. } => cast(tensor, widest(allowed)),
        Error::Rank { tensor, got: 5.., .. } => format!("`{tensor}.shape` of 4 dimensions"),
        Error::Rank { tensor, .. } => format!("`{{ ...{tensor}, shape: [1, ...{tensor}.shape] }}`"),
        Error::SizeMismatch { tensor, size: "batch", got: 1, expected, .. } => {
            format!("`{{ ...{tensor}, shape: {tensor}.shape.with(0, {expected}), strides: [0, …] }}`")
        }
        Error::SizeMismatch { tensor, size, got, other, expected } => {
            let (longer, len) = if got > expected { (tensor, expected) } else { (other, got) };
            let dim = match *size {
                "batch" => 4,
                "num_kv_heads" => 3,
                "kv_len" => 2,
                _ => 1,
            };
            format!("{} if the rest of {longer} is padding", cut(longer, dim, *len))
        }
        Error::HeadGroups { num_q_heads, num_kv_heads } => {
            match (1..=*num_kv_heads.min(num_q_heads)).rev().find(|n| num_q_heads % n == 0) {
                Some(heads) => format!("{} and {}", cut("k", 3, heads), cut("v", 3, heads)),
                None => "give k and v at least one head".to_owned(),
            }
        }
        Error::ZeroHeadDim { tensor, .. } => format!("skip the call where `{tensor}.shape.at(-1) === 0`"),
        Error::MaskShape { expected, .. } => {
            format!("a mask whose dimensions are each 1 or those of {}", list(expected))
        }
        Error::ShapeMismatch { tensor: tensor @ ("out" | "lse"), expected, .. } => {
            new_output(tensor, expected, (*tensor == "lse").then_some(DType::F32))
        }
        Error::ShapeMismatch { tensor, expected, .. } => {
            format!("one number per head of q: `{tensor}.shape` of {}", list(expected))
        }
        Error::Overflow { tensor, .. } | Error::OutOfExtent { tensor, .. } | Error::NullData { tensor, .. } => {
            format!("shape, strides and offset of {tensor} that stay inside its own data")
        }
        Error::OutputOverlapsItself { tensor, shape, .. } => new_output(tensor, shape, None),
        Error::OutputOverlaps { tensor, .. } | Error::OverlapUndecided { tensor, .. } => {
            format!("{tensor} in an array of its own")
        }
        Error::DeviceUnavailable { .. } | Error::DeviceFailed { .. } | Error::OutOfMemory { .. } => {
            "`device: \"wasm\"`".to_owned()
        }
        _ => String::new(),
    }
}
