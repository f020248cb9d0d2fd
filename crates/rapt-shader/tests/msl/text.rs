//! What a text in Metal's language declares, of every variant: slots, memory, and words that are free.

use std::sync::LazyLock;

use rapt_core::DType;
use rapt_shader::{Caps, KernelVariant, Params, variants};

/// Every variant with its text, once for all tests.
static TEXTS: LazyLock<Vec<(KernelVariant, String)>> =
    LazyLock::new(|| variants().into_iter().map(|variant| (variant, variant.msl())).collect());

/// Words of Metal and of C++ that are no names, and types that texts do without.
const RESERVED: [&str; 44] = [
    "and", "asm", "atomic", "bfloat", "bitand", "bitor", "catch", "char", "class", "compl", "delete", "do", "double",
    "enum", "extern", "fragment", "friend", "goto", "half", "half4", "inline", "kernel", "long", "mutable", "new",
    "not", "operator", "or", "private", "public", "register", "sampler", "short", "signed", "size_t", "template",
    "this", "thread", "throw", "typename", "ulong", "union", "vertex", "xor",
];
/// Words of WGSL that Metal does not know.
const OF_WGSL: [&str; 13] =
    ["fn", "let", "var", "f32", "u32", "i32", "u16", "vec2", "vec3", "vec4", "bitcast", "workgroupBarrier", "builtin"];

/// The lines without comments and attributes.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code: String = lines.flat_map(|line| [line, "\n"]).collect();
    let mut parts = code.split("[[");
    let before = parts.next().unwrap_or_default().to_owned();
    parts.fold(before, |code, part| code + part.split_once("]]").map_or(part, |(_, after)| after))
}

#[test]
fn a_text_has_no_word_that_is_not_free() {
    for (variant, text) in TEXTS.iter() {
        let code = code(text);
        let words = code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        for word in words {
            assert!(!RESERVED.contains(&word) && !OF_WGSL.contains(&word), "{variant}: {word}");
        }
        for mark in ["@", "->", "simd", "exp(", "log(", "tanh(", "isnan", "isinf", "fast::"] {
            assert!(!code.contains(mark), "{variant}: {mark}");
        }
    }
}

/// How a buffer of `tensor` is declared.
fn declared(variant: &KernelVariant, tensor: &str) -> &'static str {
    let of = |dtype: DType| match dtype.size_bytes() {
        1 => "uchar",
        2 => "ushort",
        _ => "uint",
    };
    match tensor {
        "q" | "k" | "v" => of(variant.storage),
        "mask" => variant.mask.map_or("uint", of),
        "sinks" | "alibi" => "ushort",
        "out" => of(variant.out),
        "partials" => "uint4",
        _ => "uint",
    }
}

#[test]
fn a_kernel_binds_the_buffers_of_the_list() {
    const { assert!(Params::BYTES <= 4096, "given as bytes") };
    for (variant, text) in TEXTS.iter() {
        let bound: Vec<&str> = text.lines().filter(|line| line.contains("[[buffer(")).map(str::trim).collect();
        let listed = variant.bindings().iter().map(|binding| {
            let space = if binding.is_output { "device" } else { "const device" };
            assert!(binding.index < 31);
            format!("{space} {}* {} [[buffer({})]],", declared(variant, binding.tensor), binding.tensor, binding.index)
        });
        let listed: Vec<String> =
            std::iter::once("constant Params& p [[buffer(0)]],".to_owned()).chain(listed).collect();
        assert_eq!(bound, listed, "{variant}");
        let head =
            format!("[[kernel, max_total_threads_per_threadgroup({})]] void {}(", variant.threads(), variant.entry());
        assert_eq!(text.matches(&head).count(), 1, "{variant}");
    }
}

/// The number of a product of numbers and constants of `text`.
fn value(text: &str, product: &str) -> usize {
    let factor = |word: &str| {
        let word = word.trim().trim_start_matches("Attention::");
        let number = word.trim_end_matches('u').parse();
        number.unwrap_or_else(|_| {
            let (_, after) = text.split_once(&format!("uint {word} = ")).expect("a constant");
            value(text, after.split(';').next().expect("a value"))
        })
    };
    product.split('*').map(factor).product()
}

/// Threadgroup memory is declared in the kernel, so that whoever launches it need not say how long it is.
#[test]
fn threadgroup_memory_is_that_of_the_variant() {
    for (variant, text) in TEXTS.iter() {
        let (_, kernel) = text.split_once("[[kernel").expect("a kernel");
        let declared = kernel.lines().filter_map(|line| line.strip_prefix("    threadgroup ")?.strip_suffix(';'));
        let bytes = declared.map(|declaration| {
            let (element, name) = declaration.split_once(' ').expect("a type and a name");
            let size = match element {
                "float4" | "uint4" => 16,
                "float2" => 8,
                "uint" | "atomic_uint" => 4,
                other => panic!("{other}"),
            };
            let count = name.split_once('[').map_or("1", |(_, count)| count.trim_end_matches(']'));
            size * value(text, count)
        });
        assert_eq!(bytes.sum::<usize>(), variant.shared_bytes(), "{variant}");
        assert!(variant.shared_bytes() <= Caps::METAL.max_shared_bytes && variant.threads() <= Caps::METAL.max_threads);
    }
}

/// The loop reads as the algorithm beside it: comments and lines are those of wgsl/.
#[test]
fn a_text_has_the_comments_of_the_skeleton() {
    for (variant, metal) in TEXTS.iter() {
        let wgsl = variant.source();
        let comments = |text: &str| -> Vec<String> {
            text.lines().filter_map(|line| line.trim().strip_prefix("//").map(str::to_owned)).collect()
        };
        let (of_wgsl, of_metal) = (comments(&wgsl), comments(metal));
        // Whoever stores halves of words says why.
        let own = of_wgsl.iter().filter(|line| !line.contains("the other half"));
        assert!(own.eq(of_metal.iter()), "{variant}");
        assert!(of_metal.iter().any(|line| line.contains("acc_o = acc_o·f + ")
            || line.contains("acc_o += p·v")
            || line.contains("Σ acc_o·f")));
    }
}
