//! The text of a variant: what depends on dtypes is written here, the rest is wgsl/.
//!
//! ```text
//! enable …   struct Params   bindings and how their elements are read and stored   numbers   math   generic
//! ```
//! Readers of elements answer the bits of the float32 that has the element's number: exact for all three dtypes.

use std::fmt::Write;

use rapt_core::DType;

use crate::params::{Params, VECTOR_DTYPES};
use crate::variant::{BINDINGS, Binding, KernelVariant, Stores};

const NUMBERS: &str = include_str!("wgsl/numbers.wgsl");
const MATH: &str = include_str!("wgsl/math.wgsl");
const GENERIC: &str = include_str!("wgsl/generic.wgsl");

/// Element `at` of a buffer of words, as float32 bits.
fn bits_at(tensor: &str, dtype: DType) -> String {
    match dtype {
        DType::F16 => format!("f32_bits_of_f16(half_of({tensor}[at >> 1u], at))"),
        DType::BF16 => format!("f32_bits_of_bf16(half_of({tensor}[at >> 1u], at))"),
        _ => format!("{tensor}[at]"),
    }
}

impl KernelVariant {
    /// The text, with `Params` as binding 0 and [`BINDINGS`] behind it, all in group 0.
    #[must_use]
    pub fn source(&self) -> String {
        let enable = if self.stores == Stores::Halves { "enable wgpu_int16;\n\n" } else { "" };
        let mut text =
            format!("// {self}\n{enable}{}@group(0) @binding(0) var<storage, read> p: Params;\n", Params::WGSL);
        for binding in BINDINGS {
            self.write_binding(&mut text, binding);
        }
        text.push('\n');
        for tensor in ["q", "k", "v"] {
            self.write_reader(&mut text, tensor);
        }
        for tensor in ["sinks", "alibi"] {
            write_vector_reader(&mut text, tensor);
        }
        self.write_mask(&mut text);
        self.write_store(&mut text);
        [text.as_str(), NUMBERS, MATH, GENERIC].join("\n")
    }

    fn write_binding(&self, text: &mut String, Binding { tensor, index, is_output }: Binding) {
        let access = if is_output { "read_write" } else { "read" };
        let element = match (tensor, self.stores) {
            ("out", Stores::Halves) => "u16",
            ("out", Stores::HalvesOfWords) => "atomic<u32>",
            _ => "u32",
        };
        let _ = writeln!(text, "@group(0) @binding({index}) var<storage, {access}> {tensor}: array<{element}>;");
    }

    fn write_reader(&self, text: &mut String, tensor: &str) {
        let bits = bits_at(tensor, self.storage);
        let _ = writeln!(text, "fn {tensor}_bits(at: u32) -> u32 {{ return {bits}; }}");
    }

    /// What the mask says of a key: whether it is hidden, else the bits of what is added to its score.
    fn write_mask(&self, text: &mut String) {
        text.push_str("struct Bias { hides: bool, bits: u32 }\n");
        let body = match self.mask {
            None => "return Bias(false, 0u);".to_owned(),
            Some(DType::Bool) => "return Bias(byte_of(mask[at >> 2u], at) == 0u, 0u);".to_owned(),
            Some(dtype) => {
                let bits = bits_at("mask", dtype);
                format!("let bits = {bits}; return Bias(kind_of(bits) == IS_NEGATIVE_INFINITY, bits);")
            }
        };
        let _ = writeln!(text, "fn bias_of(at: u32) -> Bias {{ {body} }}");
    }

    fn write_store(&self, text: &mut String) {
        let half = match self.out {
            DType::F16 => "f16_of_f32_bits(bits)",
            _ => "bf16_of_f32_bits(bits)",
        };
        let body = match self.stores {
            Stores::Words => "    out[at] = bits;\n".to_owned(),
            Stores::Halves => format!("    out[at] = u16({half});\n"),
            Stores::HalvesOfWords => format!(
                "    let shift = (at & 1u) * 16u;\n    \
                 // Whoever stores the other half meanwhile finds it unchanged.\n    \
                 atomicAnd(&out[at >> 1u], ~(0xffffu << shift));\n    \
                 atomicOr(&out[at >> 1u], {half} << shift);\n"
            ),
        };
        let _ = writeln!(text, "fn store_out(at: u32, bits: u32) {{\n{body}}}");
    }
}

/// A vector of one number per head has a dtype of its own, told by the parameters.
fn write_vector_reader(text: &mut String, tensor: &str) {
    let _ = writeln!(text, "fn {tensor}_bits(at: u32) -> u32 {{\n    switch p.{tensor}_dtype {{");
    for dtype in VECTOR_DTYPES {
        let (code, bits) = (dtype.code(), bits_at(tensor, dtype));
        let label = if dtype == DType::F32 { "default".to_owned() } else { format!("case {code}u") };
        let _ = writeln!(text, "        {label}: {{ return {bits}; }}");
    }
    text.push_str("    }\n}\n");
}
