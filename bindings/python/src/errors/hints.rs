//! Hints: the expression that corrects a refused request, in the words of the library whose tensors were given.
//!
//! Expressions name tensors as rapt-core does (`q`, `mask`); [`Names::rename`] turns whole words into those of the function called.

use std::fmt::Display;

use rapt::{DType, Device, Error, Shape};

use crate::kind::Kind;

/// What a function calls the tensors.
pub(crate) struct Names(&'static [(&'static str, &'static str)]);

/// `rapt.attention`.
pub(crate) const ATTENTION: Names = Names(&[]);
/// `rapt.scaled_dot_product_attention`.
pub(crate) const SDPA: Names = Names(&[("q", "query"), ("k", "key"), ("v", "value"), ("mask", "attn_mask")]);

/// `rapt.quantize`: what the tensors of other functions are held against is `x`.
pub(crate) const QUANTIZE: Names = Names(&[("q", "x")]);
/// `rapt.dequantize` and `rapt.Quantized`: it is the codes.
pub(crate) const DEQUANTIZE: Names = Names(&[("q", "codes")]);

impl Names {
    /// `text` with every whole word of rapt-core's replaced by this function's.
    pub(crate) fn rename(&self, text: &str) -> String {
        if self.0.is_empty() {
            return text.to_owned();
        }
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let mut renamed = String::with_capacity(text.len() + 16);
        let mut rest = text;
        while let Some(start) = rest.find(is_word) {
            let (between, tail) = rest.split_at(start);
            let (word, tail) = tail.split_at(tail.find(|c| !is_word(c)).unwrap_or(tail.len()));
            renamed.push_str(between);
            renamed.push_str(self.0.iter().find(|(core, _)| *core == word).map_or(word, |(_, own)| own));
            rest = tail;
        }
        renamed.push_str(rest);
        renamed
    }
}

/// The Python expression of a dtype.
pub(crate) fn dtype_expression(dtype: DType, kind: Kind) -> String {
    match (kind, dtype) {
        (Kind::Torch, dtype) => format!("torch.{dtype}"),
        (_, DType::BF16) => "ml_dtypes.bfloat16".to_owned(),
        (_, DType::Bool) => "bool".to_owned(),
        (_, dtype) => format!("numpy.{dtype}"),
    }
}

/// The expression that converts a tensor.
pub(crate) fn cast(tensor: &str, dtype: DType, kind: Kind) -> String {
    let dtype = dtype_expression(dtype, kind);
    match kind {
        Kind::Torch => format!("`{tensor}.to({dtype})`"),
        _ => format!("`{tensor}.astype({dtype})`"),
    }
}

fn tuple(shape: &Shape) -> String {
    match shape.len() {
        1 => format!("({},)", shape[0]),
        _ => format!("({})", shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

fn new_output(shape: &impl Display, dtype: Option<DType>, kind: Kind) -> String {
    let library = if kind == Kind::Torch { "torch" } else { "numpy" };
    let dtype = dtype.map_or("q.dtype".to_owned(), |dtype| dtype_expression(dtype, kind));
    format!("`{library}.empty({shape}, dtype={dtype})`")
}

fn own_copy(tensor: &str, kind: Kind) -> String {
    match kind {
        Kind::Torch => format!("`{tensor}.clone(memory_format=torch.contiguous_format)`"),
        _ => format!("`{tensor}.copy()`"),
    }
}

fn mask_expression(got: &Shape, expected: &Shape, kind: Kind) -> String {
    let [batch, heads, q_len, kv_len] = [expected[0], expected[1], expected[2], expected[3]];
    let transpose = if kind == Kind::Torch { "transpose" } else { "swapaxes" };
    match **got {
        [b, j] if b == batch && j == kv_len => "`mask[:, None, None, :]` for a mask of [batch, kv_len]".to_owned(),
        [b, i, j] if b == batch && i == q_len && j == kv_len => {
            "`mask[:, None]` for a mask of [batch, q_len, kv_len]".to_owned()
        }
        [.., j, i] if i == q_len && j == kv_len => format!("`mask.{transpose}(-2, -1)`"),
        [.., i, j] if i >= q_len && j >= kv_len => format!("`mask[..., :{q_len}, :{kv_len}]`"),
        _ => format!("a mask whose dimensions are each 1 or those of [{batch}, {heads}, {q_len}, {kv_len}]"),
    }
}

/// Cuts dimension `dim` (counted from the end) of `tensor` to `len`.
fn cut(tensor: &str, dim: usize, len: usize) -> String {
    format!("`{tensor}[..., :{len}{}]`", ", :".repeat(dim - 1))
}

/// The hint for an error about codes of q, k and v, and what makes numbers of them.
fn of_codes(error: &Error, kind: Kind) -> Option<String> {
    Some(match error {
        Error::MissingPart { tensor, part, .. } if part.ends_with("_descale") => {
            let numbers = cast(tensor, DType::F32, kind);
            format!(
                "`{part}=` of `rapt.attention`, the float32 factors that the codes were made with, or {numbers} if they are numbers"
            )
        }
        Error::MissingPart { part, .. } => {
            format!("`{part}=` of `rapt.attention`, the tensor that the codes were made with")
        }
        Error::UnexpectedPart { part, .. } => format!("`{part}=None`"),
        Error::ToleranceExceeded { .. } => {
            "`rapt.quantize(…, keep_original=True)` for k and v, finer scales, or a larger tolerance".to_owned()
        }
        Error::ShapeMismatch { tensor, expected, .. } if is_of_codes(tensor) => {
            format!("`{tensor}.reshape({})`, if its elements stand in that order", tuple(expected))
        }
        Error::DescaleShape { tensor, got, of, .. } => descale_expression(tensor, got, of),
        Error::OtherDtype { tensor, expected, .. } if !matches!(*tensor, "out" | "lse") => {
            cast(tensor, *expected, kind)
        }
        Error::KindMismatch { tensor, .. } if tensor.ends_with("_descale") && kind != Kind::DlPack => match kind {
            Kind::Torch => format!("`torch.as_tensor({tensor}, dtype=torch.float32)`"),
            _ => format!("`numpy.asarray({tensor}, numpy.float32)`"),
        },
        Error::KindMismatch { tensor, got, .. } if got.ends_with(".Quantized") => {
            format!("`{tensor}.dequantize()`, or `rapt.attention`, which takes codes as q, k and v")
        }
        _ => return None,
    })
}

/// The hint for an error about sequences of different lengths, and caches.
fn of_sequences(error: &Error, kind: Kind) -> Option<String> {
    Some(match error {
        Error::SizeMismatch { tensor: "v_cache", size: size @ ("num_pages" | "page_size" | "kv_len"), .. } => {
            format!("k_cache and v_cache of one {size}")
        }
        Error::SizeMismatch { tensor, size: "sequences", expected, .. } if tensor.starts_with("cu_") => {
            format!("{tensor} with {} offsets: one for each sequence, and one more", expected + 1)
        }
        Error::SizeMismatch { tensor, size: "sequences", expected, .. } => {
            format!("`{tensor}[:{expected}]` if the rest are of no sequence")
        }
        Error::SizeMismatch { tensor: "k" | "v", size, .. } if size.starts_with("new keys") => {
            "a cache with more rows, or more entries in the page table".to_owned()
        }
        Error::Length { tensor, .. } if tensor.starts_with("cu_") => match kind {
            Kind::Torch => "`torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()` of the lengths".to_owned(),
            _ => "`numpy.cumsum([0, *lengths], dtype=numpy.int32)` of the lengths".to_owned(),
        },
        Error::Length { .. } => "fewer keys in that sequence, or a cache that holds more".to_owned(),
        Error::PageIndex { at, num_pages, .. } => {
            format!("`page_table[{at}]` of that sequence from 0 to {}", num_pages.saturating_sub(1))
        }
        Error::PageTableShort { kv_len, page_size, .. } => {
            format!("a page_table with {} entries for that sequence", kv_len.div_ceil((*page_size).max(1)))
        }
        Error::PageShared { page, .. } => {
            format!("a page of its own for one of them, with the keys of page {page} copied: `rapt.KVCache` does so")
        }
        Error::UnknownSequence { .. } => {
            "an id that `new_sequence` or `fork` gave and `free` did not take back".to_owned()
        }
        Error::OutOfPages { needed, free } => {
            format!("`free` of sequences that are at their end, or a KVCache of {} pages more", needed - free)
        }
        _ => return None,
    })
}

/// The hint for an error of a GPU to which tensors of the host are copied.
fn of_offload(error: &Error) -> Option<String> {
    let hint = match error {
        Error::DeviceUnavailable { device: Device::Vulkan(_), .. } => {
            "an adapter of `rapt.vulkan.adapters()`, or `device=None`"
        }
        Error::DeviceFailed { device: Device::Vulkan(_), .. } => {
            "the same call, which opens the device anew if it was lost, or `device=None`"
        }
        Error::DeviceUnavailable { device: Device::Mps(_), .. } => {
            "a torch of 2.14 or newer with MPS, or `q.cpu()`, `k.cpu()`, `v.cpu()`"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// The hint for `error`, or nothing where its message says it already.
pub(crate) fn expression(error: &Error, kind: Kind) -> String {
    let of_parts = of_codes(error, kind).or_else(|| of_sequences(error, kind)).or_else(|| of_offload(error));
    of_parts.unwrap_or_else(|| of_tensors(error, kind))
}

fn of_tensors(error: &Error, kind: Kind) -> String {
    match error {
        Error::DtypeMismatch { tensor, expected, .. } => cast(tensor, *expected, kind),
        Error::OtherDtype { tensor, expected, .. } => {
            let set = if kind == Kind::Torch { "torch.empty_like" } else { "numpy.empty_like" };
            format!("`{tensor}={set}({tensor}, dtype={})`", dtype_expression(*expected, kind))
        }
        Error::UnsupportedDtype { tensor: "mask", got, allowed } => {
            let float = matches!(got, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
            let dtype = if float { widest(allowed) } else { DType::Bool };
            let said = if dtype == DType::Bool { " (True = attend)" } else { "" };
            if kind == Kind::Torch && dtype == DType::Bool {
                format!("`mask.bool()`{said}")
            } else {
                format!("{}{said}", cast("mask", dtype, kind))
            }
        }
        Error::UnsupportedDtype { tensor, got: DType::U16, .. } => {
            let bits = match kind {
                Kind::Torch => format!("`{tensor}.view(torch.bfloat16)`"),
                _ => format!("`{tensor}.view(ml_dtypes.bfloat16)`"),
            };
            format!("{bits} if it holds the bits of bfloat16, {} if it holds numbers", cast(tensor, DType::F32, kind))
        }
        Error::UnsupportedDtype { tensor, allowed, .. } => cast(tensor, widest(allowed), kind),
        Error::UnknownDtype { tensor, .. } => cast(tensor, DType::F32, kind),
        Error::Rank { tensor, got, .. } => match (*got, kind) {
            (0, _) => format!("give {tensor} the dimensions [len, head_dim] at least"),
            (1..=3, Kind::Torch) => format!("`{tensor}.unsqueeze(0)`"),
            (1..=3, _) => format!("`{tensor}[None]`"),
            (4, _) => format!("`{tensor}[0]`"),
            (_, Kind::Torch) => format!("`{tensor}.flatten(0, {})`", got - 4),
            _ => format!("`{tensor}.reshape(-1, *{tensor}.shape[-3:])`"),
        },
        Error::SizeMismatch { tensor, size: "batch", got: 1, expected, .. } => match kind {
            Kind::Torch => format!("`{tensor}.expand({expected}, -1, -1, -1)`"),
            _ => format!("`numpy.broadcast_to({tensor}, ({expected}, *{tensor}.shape[1:]))`"),
        },
        Error::SizeMismatch { tensor, size, got, other, expected } => {
            let (longer, len) = if got > expected { (tensor, expected) } else { (other, got) };
            let dim = match *size {
                "batch" => 4,
                "num_kv_heads" | "total_kv" => 3,
                "kv_len" => 2,
                _ => 1,
            };
            format!("{} if the rest of {longer} is padding", cut(longer, dim, *len))
        }
        Error::HeadGroups { num_q_heads, num_kv_heads } => {
            let fits = (1..=*num_kv_heads.min(num_q_heads)).rev().find(|n| num_q_heads % n == 0);
            match fits {
                Some(heads) => format!("{} and {}", cut("k", 3, heads), cut("v", 3, heads)),
                None => "give k and v at least one head".to_owned(),
            }
        }
        Error::ZeroHeadDim { tensor, .. } => format!("skip the call where `{tensor}.shape[-1] == 0`"),
        Error::MaskShape { got, expected } => mask_expression(got, expected, kind),
        Error::ShapeMismatch { tensor: tensor @ ("out" | "lse"), expected, .. } => {
            let dtype = (*tensor == "lse").then_some(DType::F32);
            format!("{} as {tensor}", new_output(&tuple(expected), dtype, kind))
        }
        Error::ShapeMismatch { tensor, got, expected } => match (&**got, kind) {
            ([1], Kind::Torch) => format!("`{tensor}.expand({})`", expected[0]),
            ([1], _) => format!("`numpy.broadcast_to({tensor}, {})`", tuple(expected)),
            _ => format!("one number per head of q: `{tensor}.reshape(-1)[:{}]`", expected[0]),
        },
        Error::Overflow { tensor, .. } | Error::OutOfExtent { tensor, .. } | Error::NullData { tensor, .. } => {
            format!("make {tensor} a view that stays inside its own storage")
        }
        Error::Unaligned { tensor, .. } => own_copy(tensor, kind),
        Error::OutputOverlapsItself { tensor, shape, .. } => {
            format!("{} as {tensor}", new_output(&tuple(shape), None, kind))
        }
        Error::OutputOverlaps { tensor, .. } | Error::OverlapUndecided { tensor, .. } | Error::ReadOnly { tensor } => {
            format!("{} as {tensor}", own_copy(tensor, kind))
        }
        Error::Representation { tensor, what } => match kind {
            Kind::Torch if what.contains("negative") => format!("`{tensor}.resolve_neg()`"),
            Kind::Torch if what.contains("conjugate") => format!("`{tensor}.resolve_conj()`"),
            Kind::Torch => format!("`{tensor}.to_dense()`"),
            _ if what.contains("byte order") => format!("`{tensor}.astype({tensor}.dtype.newbyteorder('='))`"),
            _ => own_copy(tensor, kind),
        },
        Error::DeviceMismatch { tensor, .. } => match kind {
            Kind::Torch => format!("`{tensor}.to(q.device)`"),
            _ => format!("move {tensor} to the device of q"),
        },
        Error::DeviceUnavailable { .. } | Error::DeviceFailed { .. } => match kind {
            Kind::Torch => "`q.cpu()`, `k.cpu()`, `v.cpu()`".to_owned(),
            _ => "move q, k and v to host memory".to_owned(),
        },
        Error::KindMismatch { tensor, .. } => match kind {
            Kind::Torch => format!("`torch.from_dlpack({tensor})`"),
            Kind::Numpy => format!("`numpy.from_dlpack({tensor})`"),
            Kind::DlPack => format!("make {tensor} of the type of q"),
        },
        _ => String::new(),
    }
}

/// Whether this is the name of codes, or of what makes numbers of them.
fn is_of_codes(tensor: &str) -> bool {
    matches!(tensor, "q" | "k" | "v") || tensor.ends_with("_descale") || tensor.ends_with("_zero_point")
}

/// Takes away the sizes of 1 that a reduction kept; where the shape has others, the message says which are allowed.
fn descale_expression(tensor: &str, got: &Shape, of: &Shape) -> String {
    match (&**got, &**of) {
        (got, _) if !got.is_empty() && got.iter().all(|&n| n == 1) => format!("`{tensor}.reshape(())`"),
        ([b, h, 1, 1], [batch, heads, ..]) if b == batch && h == heads => format!("`{tensor}[:, :, 0, 0]`"),
        ([b, 1, h, 1], [batch, _, heads, _]) if b == batch && h == heads => format!("`{tensor}[:, 0, :, 0]`"),
        ([h, 1, 1], [heads, ..]) if h == heads => format!("`{tensor}[:, 0, 0]`"),
        _ => String::new(),
    }
}

fn widest(allowed: &[DType]) -> DType {
    if allowed.contains(&DType::F32) { DType::F32 } else { allowed.last().copied().unwrap_or(DType::F32) }
}
