//! Texts in Metal's language, run on this machine: the reference, memory, races, strides, poison. docs/internals/metal.md says how.

mod engine;
mod host;
mod mlx;
mod mutants;
mod naga;
mod text;

use std::cell::RefCell;
use std::collections::BTreeSet;

use rapt_core::{Causal, DType, Error, Kernel, Spec, Tensors, Window};
use rapt_shader::{Caps, KernelVariant, Stores, matrix_variants, variants};
use rapt_testkit::{Case, Config, Data, MaskCase, conformance, replay};

use engine::{Program, engine};
use host::Arithmetic;

/// A text as compilers of Metal take it that cannot be told otherwise.
fn compile(variant: &KernelVariant) -> Program {
    host::compile(&variant.msl(), variant, Arithmetic::Fast)
}

/// What a test of every kernel takes, so that few texts are compiled: dtypes of q and of the mask, columns of values, rows of a key head.
const FEW: [(Kernel, DType, Option<DType>); 12] = [
    (Kernel::Generic, DType::F32, None),
    (Kernel::Generic, DType::F16, Some(DType::Bool)),
    (Kernel::Generic, DType::BF16, Some(DType::BF16)),
    (Kernel::Forward, DType::F32, Some(DType::Bool)),
    (Kernel::Forward, DType::F16, None),
    (Kernel::Forward, DType::BF16, Some(DType::F32)),
    (Kernel::Matrices, DType::F32, None),
    (Kernel::Matrices, DType::F16, Some(DType::Bool)),
    (Kernel::Matrices, DType::BF16, Some(DType::F32)),
    (Kernel::Decode, DType::F32, Some(DType::F32)),
    (Kernel::Decode, DType::F16, Some(DType::F16)),
    (Kernel::Decode, DType::BF16, None),
];

/// A random problem with these dtypes that `kernel` serves by one text.
fn case(seed: u64, kernel: Kernel, dtype: DType, mask: Option<DType>) -> Case {
    let random = Case::random(seed, &[dtype], 60_000);
    let mask = mask.map(|dtype| match random.mask {
        Some(mask) => MaskCase { dtype, ..mask },
        None => MaskCase { dtype, full: [false, false, true, true], rank: 2, lowest: false },
    });
    let [batch, heads, q_len, head_dim] = random.q;
    let (q, num_kv_heads, head_dim_v) = match (kernel, dtype) {
        (Kernel::Decode, DType::F16 | DType::BF16) => (
            [batch, heads, q_len.min(16 * random.num_kv_heads / heads).max(1), head_dim],
            random.num_kv_heads,
            random.head_dim_v,
        ),
        (Kernel::Decode, _) => ([batch, heads.min(4), 1, head_dim], 1, random.head_dim_v),
        (_, DType::F16) => (random.q, random.num_kv_heads, random.head_dim_v.max(65)),
        _ => (random.q, random.num_kv_heads, random.head_dim_v.min(64)),
    };
    Case { q, num_kv_heads, head_dim_v, mask, out_dtype: None, ..random }
}

#[test]
fn every_kernel_conforms() {
    if !host::has_compiler() {
        return;
    }
    let texts = RefCell::new(BTreeSet::new());
    for (kernel, dtype, mask) in FEW {
        let mut engine = engine(Some(kernel), |variant| {
            texts.borrow_mut().insert(variant.to_string());
            compile(variant)
        });
        let mut served = |spec: &Spec, tensors: Tensors<'_>| {
            let answer = engine(spec, tensors);
            assert!(!matches!(answer, Err(Error::Unsupported { .. })), "{} serves all that is asked", kernel.name());
            answer
        };
        for seed in 0..12 {
            let case = case(seed, kernel, dtype, mask);
            replay(&mut served, &case).unwrap_or_else(|failure| panic!("{}: {failure}", kernel.name()));
        }
    }
    let texts = texts.into_inner();
    for kernel in [
        "generic",
        "forward of 32 rows and 64 columns",
        "forward of 32 rows and 128 columns",
        "forward of 64 rows and 64 columns",
        "forward of 64 rows and 128 columns",
        "matrices 8x8",
        "matrices of float32 8x8",
        "decode of a row float32",
        "decode of 4 rows float32",
        "decode of 8 rows bfloat16",
        "decode of 16 rows on matrices 8x8",
        "combine",
    ] {
        assert!(texts.iter().any(|text| text.starts_with(kernel)), "{kernel} ran");
    }
    println!("{} texts: {texts:?}", texts.len());
}

/// A row has its bits whether its block has 32 rows or 64: behind causal and window edges, with maxima that follow, and with poison.
#[test]
fn blocks_of_32_and_of_64_rows_give_the_same_bits() {
    if !host::has_compiler() {
        return;
    }
    let plain = Case { num_kv_heads: 2, head_dim_v: 21, ..Case::plain(DType::F32, [2, 4, 50, 19], 200) };
    let window = Window { left: Some(70), right: Some(9) };
    for case in [
        Case { causal: Some(Causal::BottomRight), data: Data::Rising, ..plain.clone() },
        Case { window, data: Data::Spike, sinks: Some(DType::F32), poison: true, ..plain.clone() },
        Case { softcap: Some(2.0), alibi_slopes: Some(DType::F32), data: Data::Huge, ..plain },
    ] {
        let of = |few_blocks| {
            let texts = RefCell::new(BTreeSet::new());
            let all = naga::outputs(Caps { few_blocks, ..Caps::METAL }, Kernel::Forward, &case, |variant| {
                texts.borrow_mut().insert(variant.to_string());
                host::compile(&variant.msl(), variant, Arithmetic::AsWritten)
            });
            (all, texts.into_inner())
        };
        let ((of_32, texts_of_32), (of_64, texts_of_64)) = (of(1000), of(0));
        assert!(texts_of_32.iter().all(|text| text.starts_with("forward of 32 rows")), "{texts_of_32:?}");
        assert!(texts_of_64.iter().all(|text| text.starts_with("forward of 64 rows")), "{texts_of_64:?}");
        assert!(!of_32.is_empty() && of_32 == of_64, "other bits: {case:?}");
    }
}

/// 250 random problems of every dtype on each kernel, and with `fixed` tails of every length up to 70, every placement, and poison.
fn conforms(arithmetic: Arithmetic, fixed: bool) {
    if !host::has_compiler() {
        return;
    }
    let dtypes = vec![DType::F32, DType::F16, DType::BF16];
    for kernel in
        [Kernel::Generic, Kernel::Forward, Kernel::Matrices, Kernel::Decode].map(Some).into_iter().chain([None])
    {
        let mut engine = engine(kernel, |variant| host::compile(&variant.msl(), variant, arithmetic));
        let config = Config {
            seed: 0x3e7a1,
            problems: 250,
            max_work: 150_000,
            dtypes: dtypes.clone(),
            fixed,
            ..Config::default()
        };
        let tally = conformance(&mut [Box::new(&mut engine)], &config).unwrap_or_else(|failure| panic!("{failure}"));
        println!("{arithmetic:?}, {}: {tally}", kernel.map_or("chosen", Kernel::name));
        let is_for_all = kernel.is_none_or(|kernel| kernel == Kernel::Generic);
        assert!(tally.count("problems") > 40 && (tally.count("unsupported") == 0 || !is_for_all));
        for kind in [
            "mask bool",
            "mask additive",
            "causal",
            "window",
            "softcap",
            "sinks",
            "alibi",
            "gqa",
            "empty",
            "head_dim_v",
            "poison",
        ] {
            assert!(tally.count(kind) > 0, "{kind} was asked");
        }
    }
}

/// With the answers that are known to the last bit, which are those of arithmetic as written.
#[test]
#[ignore = "takes minutes"]
fn the_whole_suite_conforms() {
    conforms(Arithmetic::AsWritten, true);
}

#[test]
#[ignore = "takes minutes"]
fn fast_arithmetic_conforms() {
    conforms(Arithmetic::Fast, false);
}

#[test]
#[ignore = "takes minutes"]
fn every_variant_is_compiled() {
    if !host::has_compiler() {
        return;
    }
    let of_matrices = matrix_variants().into_iter().filter(text::is_on_simdgroups);
    for variant in variants().into_iter().chain(of_matrices.filter(|of| of.stores != Stores::HalvesOfWords)) {
        compile(&variant).unwrap_or_else(|error| panic!("{variant}: {error}"));
    }
}
