//! The text of a variant: what depends on dtypes is written here, the rest is wgsl/. In Metal's language it is the same text, translated by msl.rs.
//!
//! ```text
//! enable …   struct Params   bindings and how their elements are read and stored   numbers   math   rows   scores   the algorithm
//! ```
//! The one difference before that: WGSL has no element below 32 bits that may be read everywhere, so elements are read out of words; Metal has, and a
//! buffer that is bound at any element needs them.
//! A line of a file in wgsl/ that has `$a` stands once for each four rows of a thread, and so on: [`unrolled`] writes them out, since WGSL cannot
//! say that a loop over registers is to be.
//! The parameters are a value, `p`, which the kernel reads once and hands to whatever asks for it: a buffer that is read anew wherever a parameter stands
//! is one that a driver may think changed by each store (an H100 did so, and took 1.4 times as long).
//! Readers of elements answer the bits of the float32 that has the element's number: exact for all three dtypes.

use std::fmt::Write;

use rapt_core::DType;

use crate::msl;
use crate::params::{Params, VECTOR_DTYPES};
use crate::variant::{Algorithm, Binding, KernelVariant, LANES_COLUMNS, Stores, Tiles};

const NUMBERS: &str = include_str!("wgsl/numbers.wgsl");
const MATH: &str = include_str!("wgsl/math.wgsl");
const ROWS: &str = include_str!("wgsl/rows.wgsl");
const SCORES: &str = include_str!("wgsl/scores.wgsl");
const ENDS: &str = include_str!("wgsl/ends.wgsl");
const SPLITS: &str = include_str!("wgsl/splits.wgsl");
const GENERIC: &str = include_str!("wgsl/generic.wgsl");
const FORWARD: &str = include_str!("wgsl/forward.wgsl");
const LANES: &str = include_str!("wgsl/lanes.wgsl");
const HALVES: &str = include_str!("wgsl/halves.wgsl");
const FLOATS: &str = include_str!("wgsl/floats.wgsl");
const MATRICES: &str = include_str!("wgsl/matrices.wgsl");
const DECODE: &str = include_str!("wgsl/decode.wgsl");
const COMBINE: &str = include_str!("wgsl/combine.wgsl");

/// `text` once for each value of `$name` below `count` if it has that word.
fn repeated(text: &str, name: &str, count: usize) -> String {
    if !text.contains(name) {
        return text.to_owned();
    }
    (0..count).map(|n| text.replace(name, &n.to_string())).collect()
}

/// `text` with each line, and each part from `//@ for each $g` to its `//@ end`, as often as its words say; a part may have others in it. Comments stay as
/// they are.
fn unrolled(text: &str, words: &[(&str, usize)]) -> String {
    let of = |line: &str| match line.trim_start().starts_with("//") {
        true => line.to_owned(),
        false => words.iter().fold(line.to_owned(), |lines, (name, count)| {
            lines.split_inclusive('\n').map(|line| repeated(line, name, *count)).collect()
        }),
    };
    let mut lines = text.split_inclusive('\n');
    let mut whole = String::new();
    while let Some(line) = lines.next() {
        let Some(name) = line.trim().strip_prefix("//@ for each ") else {
            whole.push_str(&of(line));
            continue;
        };
        let mut depth = 1;
        let part = lines.by_ref().take_while(|line| {
            depth += usize::from(line.trim().starts_with("//@ for each "));
            depth -= usize::from(line.trim() == "//@ end");
            depth > 0
        });
        let part: String = part.collect();
        let count = words.iter().find(|(word, _)| *word == name).map_or(0, |(_, count)| *count);
        let parts: String = (0..count).map(|n| part.replace(name, &n.to_string())).collect();
        whole.push_str(&unrolled(&parts, words));
    }
    whole
}

/// How elements of fewer than 32 bits lie in a buffer as the text declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Elements {
    /// In words of 32 bits: WGSL.
    InWords,
    /// As integers of their size: Metal.
    Alone,
}

/// Element `at` of a buffer, as float32 bits.
fn bits_at(tensor: &str, dtype: DType, elements: Elements) -> String {
    let half = match elements {
        Elements::InWords => format!("half_of({tensor}[at >> 1u], at)"),
        Elements::Alone => format!("u32({tensor}[at])"),
    };
    match dtype {
        DType::F16 => format!("f32_bits_of_f16({half})"),
        DType::BF16 => format!("f32_bits_of_bf16({half})"),
        _ => format!("{tensor}[at]"),
    }
}

/// The integer that an element of `dtype` is.
fn integer(dtype: DType) -> &'static str {
    match dtype.size_bytes() {
        1 => "u8",
        2 => "u16",
        _ => "u32",
    }
}

impl KernelVariant {
    /// The text in WGSL, with `Params` as binding 0 and [`bindings`](KernelVariant::bindings) behind it, all in group 0.
    #[must_use]
    pub fn source(&self) -> String {
        let has_matrices = matches!(self.algorithm, Algorithm::Matrices(_));
        let enabled = [
            ("wgpu_int16", self.binds("out") && self.stores == Stores::Halves),
            ("f16", matches!(self.algorithm, Algorithm::Matrices(tiles) if tiles.numbers == DType::F16)),
            ("wgpu_cooperative_matrix", has_matrices),
        ];
        let enable: String =
            enabled.iter().filter(|(_, is)| *is).map(|(name, _)| format!("enable {name};\n")).collect();
        self.text(&enable, Elements::InWords)
    }

    /// The text in Metal's language, with `Params` as buffer 0 and [`bindings`](KernelVariant::bindings) behind it. A buffer is bound at the byte
    /// of any element; no word beside an element is read, whatever [`stores`](KernelVariant::stores) says. Never run on Apple hardware.
    #[must_use]
    pub fn msl(&self) -> String {
        msl::translated(&self.text("", Elements::Alone))
    }

    fn text(&self, enable: &str, elements: Elements) -> String {
        let mut text =
            format!("// {self}\n{enable}{}@group(0) @binding(0) var<storage, read> given: Params;\n", Params::WGSL);
        for binding in self.bindings() {
            self.write_binding(&mut text, binding, elements);
        }
        text.push('\n');
        for tensor in ["q", "k", "v"].into_iter().filter(|tensor| self.binds(tensor)) {
            self.write_reader(&mut text, tensor, elements);
        }
        if matches!(self.algorithm, Algorithm::Decode { .. }) {
            text.push_str(&readers_of_pairs(self.storage, elements));
        }
        for tensor in ["sinks", "alibi"].into_iter().filter(|tensor| self.binds(tensor)) {
            write_vector_reader(&mut text, tensor, elements);
        }
        if self.binds("mask") {
            self.write_mask(&mut text, elements);
        }
        if self.binds("out") {
            self.write_store(&mut text, elements);
        }
        let Tiles { block_m, block_n, block_dv, .. } = self.algorithm.tiles();
        let has_mask = self.mask.is_some();
        let _ = writeln!(text, "\nconst BLOCK_M: u32 = {block_m}u;\nconst BLOCK_N: u32 = {block_n}u;");
        let _ = writeln!(text, "const BLOCK_DV: u32 = {block_dv}u;\nconst HAS_MASK: bool = {has_mask};");
        text.push_str(&self.algorithm(elements));
        text
    }

    fn binds(&self, tensor: &str) -> bool {
        self.bindings().iter().any(|binding| binding.tensor == tensor)
    }

    /// The text behind what depends on dtypes.
    fn algorithm(&self, elements: Elements) -> String {
        let (own, parts): (String, &[&str]) = match self.algorithm {
            Algorithm::Generic => (GENERIC.to_owned(), &[NUMBERS, MATH, ROWS, SCORES, ENDS]),
            Algorithm::Forward { column_groups, row_groups } => {
                let words =
                    [("$g", column_groups), ("$a", row_groups), ("$n", 4), ("$c", 4), ("$t", 16), ("$e", 2), ("$o", 2)];
                let sizes =
                    format!("const COLUMN_GROUPS: u32 = {column_groups}u;\nconst ROW_GROUPS: u32 = {row_groups}u;\n");
                (sizes + &unrolled(FORWARD, &words), &[NUMBERS, MATH, ROWS, SCORES, ENDS])
            }
            Algorithm::Lanes => {
                let words = [("$m", LANES_COLUMNS / 8), ("$l", 8), ("$n", 4)];
                (unrolled(LANES, &words), &[NUMBERS, MATH, ROWS, SCORES, ENDS])
            }
            Algorithm::Matrices(tiles) => {
                let text =
                    unrolled(MATRICES, &tiles.words()).replace("size(THREADS)", &format!("size({})", tiles.threads));
                let text = tiles.constants(elements == Elements::Alone) + &text;
                match tiles.numbers {
                    DType::F16 if tiles.is_split() => (text, &[NUMBERS, MATH, ROWS, SPLITS, SCORES, HALVES]),
                    DType::F16 => (text, &[NUMBERS, MATH, ROWS, SCORES, ENDS, HALVES]),
                    _ => (text, &[NUMBERS, MATH, ROWS, SCORES, ENDS, FLOATS]),
                }
            }
            Algorithm::Decode { rows } => {
                let row_groups = rows.div_ceil(4);
                let text =
                    unrolled(DECODE, &[("$a", row_groups), ("$n", 4), ("$i", 4), ("$q", 2), ("$h", 2), ("$e", 2)]);
                let each = if rows == 1 { ONE_ROW } else { FOUR_ROWS };
                let text = format!("const ROW_GROUPS: u32 = {row_groups}u;\n{each}{text}");
                (text, &[NUMBERS, MATH, ROWS, SPLITS, SCORES])
            }
            Algorithm::Combine => {
                (unrolled(COMBINE, &[("$m", 8), ("$n", 3), ("$e", 16)]), &[NUMBERS, MATH, ROWS, ENDS])
            }
        };
        parts.iter().copied().chain([own.as_str()]).flat_map(|part| ["\n", part]).collect()
    }

    /// Whether a tensor's buffer is declared as vectors of four words.
    fn has_wide(&self, tensor: &str) -> bool {
        matches!(self.algorithm, Algorithm::Matrices(tiles) if tiles.wide) && matches!(tensor, "k" | "v")
    }

    fn write_binding(&self, text: &mut String, Binding { tensor, index, is_output }: &Binding, elements: Elements) {
        let access = if *is_output { "read_write" } else { "read" };
        let element = match (*tensor, elements, self.stores) {
            ("partials", ..) => "vec4<u32>",
            (tensor, ..) if self.has_wide(tensor) => "vec4<u32>",
            ("q" | "k" | "v", Elements::Alone, _) => integer(self.storage),
            ("mask", Elements::Alone, _) => self.mask.map_or("u32", integer),
            // Of any dtype: read by halves.
            ("sinks" | "alibi", Elements::Alone, _) => "u16",
            ("out", Elements::Alone, _) => integer(self.out),
            ("out", Elements::InWords, Stores::Halves) => "u16",
            ("out", Elements::InWords, Stores::HalvesOfWords) => "atomic<u32>",
            _ => "u32",
        };
        let _ = writeln!(text, "@group(0) @binding({index}) var<storage, {access}> {tensor}: array<{element}>;");
    }

    fn write_reader(&self, text: &mut String, tensor: &str, elements: Elements) {
        let bits = match self.has_wide(tensor) {
            true => format!("f32_bits_of_f16(half_of({tensor}_word(at >> 1u), at))"),
            false => bits_at(tensor, self.storage, elements),
        };
        let _ = writeln!(text, "fn {tensor}_bits(at: u32) -> u32 {{ return {bits}; }}");
        if matches!(self.algorithm, Algorithm::Matrices(_)) {
            text.push_str(&readers_of_matrices(tensor, self.storage, self.has_wide(tensor), elements));
        }
    }

    /// What the mask says of a key: whether it is hidden, else the bits of what is added to its score.
    fn write_mask(&self, text: &mut String, elements: Elements) {
        text.push_str("struct Bias { hides: bool, bits: u32 }\n");
        let body = match self.mask {
            None => "return Bias(false, 0u);".to_owned(),
            Some(DType::Bool) => match elements {
                Elements::InWords => "return Bias(byte_of(mask[at >> 2u], at) == 0u, 0u);".to_owned(),
                Elements::Alone => "return Bias(u32(mask[at]) == 0u, 0u);".to_owned(),
            },
            Some(dtype) => {
                let bits = bits_at("mask", dtype, elements);
                format!("let bits = {bits}; return Bias(kind_of(bits) == IS_NEGATIVE_INFINITY, bits);")
            }
        };
        let _ = writeln!(text, "fn bias_of(at: u32) -> Bias {{ {body} }}");
    }

    fn write_store(&self, text: &mut String, elements: Elements) {
        let half = match self.out {
            DType::F16 => "f16_of_f32_bits(bits)",
            _ => "bf16_of_f32_bits(bits)",
        };
        let body = match (self.stores, elements) {
            (Stores::Words, _) => "    out[at] = bits;\n".to_owned(),
            (Stores::Halves, _) | (_, Elements::Alone) => format!("    out[at] = u16({half});\n"),
            (Stores::HalvesOfWords, Elements::InWords) => format!(
                "    let shift = (at & 1u) * 16u;\n    \
                 // Whoever stores the other half meanwhile finds it unchanged.\n    \
                 atomicAnd(&out[at >> 1u], ~(0xffffu << shift));\n    \
                 atomicOr(&out[at >> 1u], {half} << shift);\n"
            ),
        };
        let _ = writeln!(text, "fn store_out(at: u32, bits: u32) {{\n{body}}}");
    }
}

/// Pairs of elements of k and v: 16-bit elements side by side are a word where words are read. `numbers_of` a pair are finite numbers / SCALE, and
/// `is_odd` says whether there was another among those that `odd_of` saw. `bits_of_pair` are right of all.
fn readers_of_pairs(storage: DType, elements: Elements) -> String {
    let is_16_bit = storage.size_bytes() == 2;
    let in_words = is_16_bit && elements == Elements::InWords;
    let mut text = format!("const PAIRS_IN_WORDS: bool = {in_words};\n");
    for tensor in ["k", "v"] {
        let (half, other) =
            (format!("half_of({tensor}[at >> 1u], at)"), format!("half_of({tensor}[other >> 1u], other)"));
        let pair = match (is_16_bit, in_words) {
            (true, true) => format!("{half} | ({other} << 16u), 0u"),
            (true, false) => format!("u32({tensor}[at]) | (u32({tensor}[other]) << 16u), 0u"),
            _ => format!("{tensor}[at], {tensor}[other]"),
        };
        let word =
            if in_words { format!("vec2<u32>({tensor}[at >> 1u], 0u)") } else { format!("{tensor}_pair(at, at + 1u)") };
        let _ = writeln!(text, "fn {tensor}_pair(at: u32, other: u32) -> vec2<u32> {{ return vec2<u32>({pair}); }}");
        let _ = writeln!(text, "fn {tensor}_word(at: u32) -> vec2<u32> {{ return {word}; }}");
    }
    text.push_str(match storage {
        DType::F16 => PAIRS_OF_F16,
        DType::BF16 => PAIRS_OF_BF16,
        _ => PAIRS_OF_F32,
    });
    text
}

/// The exponents of both halves at once: + 1 carries that of NaN and infinity into bit 15. With 96 in front of its exponent a half h is a float32 f, 2^-16 of
/// its number, or 2^-31 and half of that where h has no leading 1: so 2^-16 of the number is the lesser of f and 2·f − 2^-30, and nothing on the way is below 2^-40.
const PAIRS_OF_F16: &str = "// Column e of pair t.
fn column_of(t: u32, e: u32) -> u32 { return t * 2u + e; }
const SCALE: f32 = 65536.0;
const INVERSE_SCALE: f32 = 1.52587890625e-5;
fn odd_of(pair: vec2<u32>, odd: u32) -> u32 { return odd | ((pair.x & 0x7c007c00u) + 0x04000400u); }
fn is_odd(odd: u32) -> bool { return (odd & 0x80008000u) != 0u; }
fn numbers_of(pair: vec2<u32>) -> vec2<f32> {
    let f = bitcast<vec2<f32>>((vec2<u32>(pair.x << 13u, pair.x >> 3u) & vec2<u32>(0x0fffe000u)) | vec2<u32>(0x30000000u));
    let size = min(f, vec2<f32>(fma(f.x, 2.0, -9.31322574615478515625e-10), fma(f.y, 2.0, -9.31322574615478515625e-10)));
    return bitcast<vec2<f32>>(bitcast<vec2<u32>>(size) | (vec2<u32>(pair.x << 16u, pair.x) & vec2<u32>(SIGN_BIT)));
}
fn bits_of_pair(pair: vec2<u32>) -> vec2<u32> { return vec2<u32>(f32_bits_of_f16(pair.x & 0xffffu), f32_bits_of_f16(pair.x >> 16u)); }
";
const PAIRS_OF_BF16: &str = "// Column e of pair t.
fn column_of(t: u32, e: u32) -> u32 { return t * 2u + e; }
const SCALE: f32 = 1.0;
const INVERSE_SCALE: f32 = 1.0;
fn odd_of(pair: vec2<u32>, odd: u32) -> u32 { return odd | ((pair.x & 0x7f807f80u) + 0x00800080u); }
fn is_odd(odd: u32) -> bool { return (odd & 0x80008000u) != 0u; }
fn bits_of_pair(pair: vec2<u32>) -> vec2<u32> { return vec2<u32>(pair.x << 16u, pair.x & 0xffff0000u); }
fn numbers_of(pair: vec2<u32>) -> vec2<f32> { return bitcast<vec2<f32>>(bits_of_pair(pair)); }
";
/// `Each`: what `decode` has of the rows that its vectors stand for, which are four or one.
const FOUR_ROWS: &str = "alias Each = vec4<f32>;
alias EachBits = vec4<u32>;
fn each_of(x: vec4<f32>) -> Each { return x; }
fn four_of(x: Each) -> vec4<f32> { return x; }
fn each_bits_of(x: vec4<u32>) -> EachBits { return x; }
fn four_bits_of(x: EachBits) -> vec4<u32> { return x; }
fn existing(x: vec4<bool>) -> vec4<bool> { return x; }
";
const ONE_ROW: &str = "alias Each = f32;
alias EachBits = u32;
fn each_of(x: vec4<f32>) -> Each { return x.x; }
fn four_of(x: Each) -> vec4<f32> { return vec4<f32>(x); }
fn each_bits_of(x: vec4<u32>) -> EachBits { return x.x; }
fn four_bits_of(x: EachBits) -> vec4<u32> { return vec4<u32>(x); }
fn existing(x: vec4<bool>) -> vec4<bool> { return vec4<bool>(x.x, false, false, false); }
";
/// The two of a pair are 8 columns apart: eight lanes read eight that lie side by side.
const PAIRS_OF_F32: &str = "// Column e of pair t.
fn column_of(t: u32, e: u32) -> u32 { return t / 8u * 16u + t % 8u + e * 8u; }
const SCALE: f32 = 1.0;
const INVERSE_SCALE: f32 = 1.0;
fn odd_of(pair: vec2<u32>, odd: u32) -> u32 { return max(odd, max(pair.x & ~SIGN_BIT, pair.y & ~SIGN_BIT)); }
fn is_odd(odd: u32) -> bool { return odd >= INFINITY_BITS; }
fn bits_of_pair(pair: vec2<u32>) -> vec2<u32> { return pair; }
fn numbers_of(pair: vec2<u32>) -> vec2<f32> { return bitcast<vec2<f32>>(pair); }
";

/// Readers of four elements, and of what a thread loads at a time: eight of float16 as they lie, two in a word, or the float32 bits of four others. `wide`: a buffer
/// is declared as vectors of four words.
fn readers_of_matrices(tensor: &str, storage: DType, wide: bool, elements: Elements) -> String {
    let mut text = String::new();
    let four = |elements: &str| {
        format!("vec4<u32>({})", ["0u", "1u", "2u", "3u"].map(|n| elements.replace("$n", n)).join(", "))
    };
    let load = match (storage, elements) {
        (DType::F16, Elements::Alone) => {
            format!("return vec4<u32>(packed_four(&{tensor}[at]), packed_four(&{tensor}[at + 4u]));")
        }
        (DType::F16, Elements::InWords) if wide => format!("return {tensor}[at >> 3u];"),
        (DType::F16, Elements::InWords) => format!("return {};", four(&format!("{tensor}[(at >> 1u) + $n]"))),
        (DType::BF16, Elements::Alone) => format!(
            "let words = packed_four(&{tensor}[at]); \
             return vec4<u32>(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u);"
        ),
        (_, Elements::Alone) => format!("return packed_four(&{tensor}[at]);"),
        (_, Elements::InWords) => format!("return {};", four(&format!("{tensor}_bits(at + $n)"))),
    };
    let _ = writeln!(text, "fn {tensor}_load(at: u32) -> vec4<u32> {{ {load} }}");
    let halves = match elements {
        Elements::InWords => {
            let word = if wide { format!("{tensor}[at >> 2u][at & 3u]") } else { format!("{tensor}[at]") };
            if storage == DType::F16 {
                let _ = writeln!(text, "fn {tensor}_word(at: u32) -> u32 {{ return {word}; }}");
            }
            format!("half_of({tensor}_word((at + n * stride) >> 1u), at + n * stride)")
        }
        Elements::Alone => format!("u32({tensor}[at + n * stride])"),
    };
    let (ty, whole, element) = match (storage, elements) {
        (DType::F16, Elements::InWords) => {
            let words = format!("vec2<u32>({tensor}_word(at >> 1u), {tensor}_word((at >> 1u) + 1u))");
            let whole = format!("    if count >= 4u && stride == 1u && (at & 1u) == 0u {{ return {words}; }}\n");
            ("vec2<u32>", whole, format!("words[n / 2u] |= {halves} << (n % 2u * 16u);"))
        }
        (DType::F16, Elements::Alone) => {
            ("vec2<u32>", String::new(), format!("words[n / 2u] |= {halves} << (n % 2u * 16u);"))
        }
        _ => ("vec4<u32>", String::new(), format!("words[n] = {tensor}_bits(at + n * stride);")),
    };
    let _ = write!(
        text,
        "// The first `count` of four; 0 behind them.
fn {tensor}_four(at: u32, stride: u32, count: u32) -> {ty} {{
{whole}    var words = {ty}();
    for (var n = 0u; n < min(count, 4u); n++) {{ {element} }}
    return words;
}}
"
    );
    text
}

/// A vector of one number per head has a dtype of its own, told by the parameters.
fn write_vector_reader(text: &mut String, tensor: &str, elements: Elements) {
    let _ = writeln!(text, "fn {tensor}_bits(p: Params, at: u32) -> u32 {{\n    switch p.{tensor}_dtype {{");
    for dtype in VECTOR_DTYPES {
        let bits = match (dtype, elements) {
            (DType::F32, Elements::Alone) => {
                format!("u32({tensor}[at * 2u]) | (u32({tensor}[at * 2u + 1u]) << 16u)")
            }
            _ => bits_at(tensor, dtype, elements),
        };
        let code = dtype.code();
        let label = if dtype == DType::F32 { "default".to_owned() } else { format!("case {code}u") };
        let _ = writeln!(text, "        {label}: {{ return {bits}; }}");
    }
    text.push_str("    }\n}\n");
}
