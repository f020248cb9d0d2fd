//! What a text in Metal's language declares, of every variant: slots, memory, and words that are free.

use std::sync::LazyLock;

use rapt_core::DType;
use rapt_shader::{Algorithm, Caps, KernelVariant, MatrixUnits, Params, Stores, matrix_variants, variants};

/// Whether it is on matrices that Apple's GPUs have.
pub(crate) fn is_on_simdgroups(variant: &KernelVariant) -> bool {
    matches!(variant.algorithm, Algorithm::Matrices(tiles) if tiles.units == MatrixUnits::METAL)
}

/// Every variant for Metal with its text, once for all tests.
static TEXTS: LazyLock<Vec<(KernelVariant, String)>> = LazyLock::new(|| {
    // Of each tiles and dtype one, and of one tiles all.
    let of_matrices: Vec<KernelVariant> = matrix_variants().into_iter().filter(is_on_simdgroups).collect();
    let first = of_matrices[0].algorithm;
    let is_split = |of: &KernelVariant| of.bindings().iter().any(|binding| binding.tensor == "partials");
    let of_matrices = of_matrices.into_iter().filter(|of| {
        let is_plain = of.mask.is_none() && of.out == of.storage && of.stores != Stores::HalvesOfWords;
        of.algorithm == first || is_plain || (is_split(of) && of.mask.is_none())
    });
    variants().into_iter().chain(of_matrices).map(|variant| (variant, variant.msl())).collect()
});

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
        let has_simdgroups = is_on_simdgroups(variant);
        for word in words {
            let is_of_matrices = has_simdgroups && ["half", "half4", "template", "class"].contains(&word);
            assert!(is_of_matrices || !RESERVED.contains(&word) && !OF_WGSL.contains(&word), "{variant}: {word}");
        }
        for mark in ["@", "->", "coop", "exp(", "log(", "tanh(", "isnan", "isinf", "fast::"] {
            assert!(!code.contains(mark), "{variant}: {mark}");
        }
        assert_eq!(code.contains("simd"), has_simdgroups, "{variant}");
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

/// The number of an expression of numbers and constants of `text`: sums of products, and quotients of these.
fn value(text: &str, expression: &str) -> usize {
    let factor = |word: &str| {
        let word = word.trim().trim_start_matches("Attention::");
        let number = word.trim_end_matches('u').parse();
        number.unwrap_or_else(|_| {
            let (_, after) = text.split_once(&format!("uint {word} = ")).expect("a constant");
            value(text, after.split(';').next().expect("a value"))
        })
    };
    let product = |product: &str| product.split('*').map(factor).product::<usize>();
    let term = |term: &str| term.split('/').map(product).reduce(|a, b| a / b).expect("a number");
    expression.split('+').map(term).sum()
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
                "float2" | "half4" => 8,
                "float" | "uint" | "atomic_uint" => 4,
                other => panic!("{other}"),
            };
            let count = name.split_once('[').map_or("1", |(_, count)| count.trim_end_matches(']'));
            size * value(text, count)
        });
        assert_eq!(bytes.sum::<usize>(), variant.shared_bytes(), "{variant}");
        assert!(variant.shared_bytes() <= Caps::METAL.max_shared_bytes && variant.threads() <= Caps::METAL.max_threads);
    }
}

/// docs/lab/metal.md counts the loop over blocks of keys, for float16 and 128 columns, but for the blocks in which a maximum grows.
#[test]
fn the_loop_does_what_is_counted_on_paper() {
    let is_counted = |variant: &KernelVariant| {
        let Algorithm::Matrices(tiles) = variant.algorithm else { return false };
        (variant.storage, tiles.depth, tiles.block_dv) == (DType::F16, 128, 128)
    };
    let (_, text) = TEXTS.iter().find(|(variant, _)| is_counted(variant)).expect("a variant");
    let (_, behind) = text.split_once("for (auto n0 = block.first_key").expect("a loop");
    let (whole, _) = behind.split_once("if (asks) { break; }").expect("its end");
    let (before, grown) = whole.split_once("// row_max = max x, p once more").expect("growth");
    let (_, after) = grown.split_once("row_sum += sum;").expect("what follows");
    let count = |word: &str| before.matches(word).count() + after.matches(word).count();
    // Of k 64 and of p 4 by columns, of v 64 by rows.
    assert_eq!((count("multiply_add("), count("load_columns<"), count("load_rows<")), (128, 68, 64));
    // A barrier stands on both sides of what all threads are told.
    assert_eq!((count("store_columns("), count("threadgroup_barrier(") + 2 * count("uniform_load(")), (4, 5));
    assert_eq!((count("const auto weight = weights_of("), count("key_load("), count("value_load(")), (2, 2, 2));
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
        assert!(own.eq(of_metal.iter().filter(|line| !line.starts_with(" Metal: "))), "{variant}");
        assert!(of_metal.iter().any(|line| line.contains("acc_o = acc_o·f + ")
            || line.contains("acc_o += p·v")
            || line.contains("acc_o += Σ p·v")
            || line.contains("Σ acc_o·f")));
    }
}
