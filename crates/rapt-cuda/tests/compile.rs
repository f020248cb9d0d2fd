//! Every kernel compiles to machine code without a device, and the hot ones keep their registers.
//!
//! Needs NVRTC: where none is found this is printed and nothing is tested, unless `RAPT_REQUIRE` names `nvrtc`. `RAPT_WHOLE=1` compiles
//! all of them, minutes of a core; otherwise as few as show every property of each algorithm.

mod common;

use std::collections::HashSet;
use std::path::Path;

use common::{
    backward_spec, backward_spec_of_varlen, caps, spec, spec_of_cache, spec_of_codes, spec_of_dims, spec_of_int8,
    spec_of_int8_cache, spec_of_latent, spec_of_swizzled, spec_of_varlen,
};
use rapt_core::{Arch, Causal, Compute, DType, Format, Granularity, Options};
use rapt_cuda::{
    Algorithm, CompiledFacts, CudaError, KernelVariant, Loads, backward_variants, build_all, deviation_variants,
    variants,
};

/// What the compiler says of each; kernels that are kept from an earlier run, or were compiled to be shipped, cost nothing.
fn compile(all: &[KernelVariant]) -> Option<Result<Vec<CompiledFacts>, CudaError>> {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins");
    match build_all(all, Some(&kept)) {
        Err(error @ CudaError::NoCompiler { .. }) => {
            let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|name| name == "nvrtc"), "RAPT_REQUIRE asks for nvrtc: {error}");
            println!("skipped: {error}");
            None
        }
        other => Some(other.map(|built| built.into_iter().map(|built| built.facts).collect())),
    }
}

/// Kernels over codes. What few of these spill they do in a block's second, careful run.
fn over_codes(options: &Options) -> Vec<KernelVariant> {
    let mut all = Vec::new();
    for (arch, dtype, [len, head_dim], format, granularity) in [
        (Arch::Sm90a, DType::BF16, [1, 128], Format::Int8, Granularity::Token),
        (Arch::Sm90a, DType::BF16, [1, 64], Format::Nvfp4, Granularity::Tensor),
        (Arch::Sm120, DType::F32, [1, 64], Format::Int4, Granularity::Block(32)),
        (Arch::Sm80, DType::F16, [1, 64], Format::Uint8, Granularity::Head),
        (Arch::Sm90a, DType::F32, [100, 64], Format::E4m3fn, Granularity::Channel),
        (Arch::Sm90a, DType::BF16, [100, 64], Format::E4m3fn, Granularity::Channel),
        (Arch::Sm80, DType::BF16, [100, 80], Format::Int4, Granularity::Block(16)),
        (Arch::Sm120, DType::F16, [100, 128], Format::Uint8, Granularity::Head),
        (Arch::Sm80, DType::BF16, [100, 256], Format::Mxfp4, Granularity::Tensor),
    ] {
        let spec = spec_of_codes(dtype, [2, len, 1000, head_dim], format, granularity, options);
        all.extend(variants(&spec, &caps(arch)).unwrap());
    }
    all
}

/// Kernels over codes whose factors lie swizzled.
fn swizzled() -> Vec<KernelVariant> {
    let of = |len, head_dim, format| {
        let spec = spec_of_swizzled(DType::BF16, [2, len, 1000, head_dim], format, &Options::default());
        variants(&spec, &caps(Arch::Sm90a)).unwrap()
    };
    [of(1, 128, Format::Nvfp4), of(100, 64, Format::Mxfp4)].concat()
}

/// Kernels of prompts over codes that are asked for most.
fn prompts_over_codes(options: &Options) -> Vec<KernelVariant> {
    let mut all = Vec::new();
    for (arch, head_dim, format, granularity) in [
        (Arch::Sm80, 128, Format::Int8, Granularity::Token),
        (Arch::Sm90a, 128, Format::Int4, Granularity::Token),
        (Arch::Sm90a, 128, Format::Nvfp4, Granularity::Tensor),
        (Arch::Sm90a, 64, Format::E4m3fn, Granularity::Token),
        (Arch::Sm120, 128, Format::Int8, Granularity::Head),
    ] {
        let spec = spec_of_codes(DType::BF16, [8, 2048, 2048, head_dim], format, granularity, options);
        all.extend(variants(&spec, &caps(arch)).unwrap());
    }
    let paged = spec_of_cache(DType::BF16, [4, 8, 2, 512, 8192], [64, 16], Some(Format::Int8), options);
    // Not what writes new keys: `caches` has it, and it spills some bytes.
    all.extend(variants(&paged, &caps(Arch::Sm90a)).unwrap());
    all.retain(|variant| variant.algorithm == Algorithm::Mma);
    all
}

/// Kernels of sequences one after another.
fn varlen(arch: Arch, dtype: DType, head_dim: usize) -> Vec<KernelVariant> {
    variants(&spec_of_varlen(dtype, [8, 2, 9000, 9000], head_dim, None, &Options::default()), &caps(arch)).unwrap()
}

/// Kernels of sequences one after another over codes: those that are hot, and others.
fn varlen_over_codes() -> (Vec<KernelVariant>, Vec<KernelVariant>) {
    let of = |arch, dtype, head_dim, format, granularity| {
        let codes = Some((format, granularity));
        let spec = spec_of_varlen(dtype, [8, 2, 9000, 9000], head_dim, codes, &Options::default());
        variants(&spec, &caps(arch)).unwrap()
    };
    let (hot, mut all): (Vec<_>, Vec<_>) = of(Arch::Sm90a, DType::BF16, 128, Format::Int8, Granularity::Token)
        .into_iter()
        .partition(|variant| variant.algorithm == Algorithm::Mma);
    // What few queries spill they do in a block's second, careful run; sums of 16 rows of wide heads are spilled without sequences too.
    all.retain(|variant| variant.block_m < 16);
    all.extend(of(Arch::Sm90a, DType::BF16, 300, Format::E5m2, Granularity::Token));
    (hot, all)
}

/// Kernels over caches: those that are hot, and others.
fn caches() -> (Vec<KernelVariant>, Vec<KernelVariant>) {
    let plain = Options::default();
    let (mut hot, mut all) = (Vec::new(), Vec::new());
    // Parts of prompts, in pages of so many keys or in none.
    let parts = |arch, dtype, head_dim, page_size, options: &Options| {
        let spec = spec_of_cache(dtype, [4, 8, 2, 512, 8192], [head_dim, page_size], None, options);
        variants(&spec, &caps(arch)).unwrap()
    };
    // What writes new keys, attends to pages, and puts the chunks of ragged sequences together.
    hot.extend(
        variants(&spec_of_cache(DType::BF16, [16, 32, 8, 1, 8192], [64, 16], None, &plain), &caps(Arch::Sm90a))
            .unwrap(),
    );
    // New keys that become codes.
    all.extend(
        variants(
            &spec_of_cache(DType::BF16, [16, 32, 8, 1, 8192], [64, 16], Some(Format::Int8), &plain),
            &caps(Arch::Sm90a),
        )
        .unwrap(),
    );
    // Parts of prompts over caches: boxes of pages by TMA, rows that are gathered, no pages.
    let bottom_right = plain.with_softcap(30.0).with_causal(Causal::BottomRight);
    for (dtype, head_dim, page_size) in [
        (DType::BF16, 64, 0),
        (DType::BF16, 64, 16),
        (DType::BF16, 96, 64),
        (DType::BF16, 128, 16),
        (DType::BF16, 128, 1),
        (DType::BF16, 256, 16),
        (DType::F32, 64, 16),
    ] {
        hot.extend(parts(Arch::Sm90a, dtype, head_dim, page_size, &plain));
    }
    for (dtype, head_dim, page_size) in
        [(DType::BF16, 128, 16), (DType::F16, 64, 1), (DType::F32, 128, 7), (DType::BF16, 33, 5)]
    {
        all.extend(parts(Arch::Sm90a, dtype, head_dim, page_size, &bottom_right));
    }
    hot.extend(parts(Arch::Sm80, DType::BF16, 128, 16, &plain));
    all.extend(parts(Arch::Sm80, DType::BF16, 64, 0, &bottom_right));
    all.extend(parts(Arch::Sm80, DType::F16, 33, 5, &plain));
    (hot, all)
}

/// Kernels over latent caches, contiguous and in pages; on compute capability 9.0 the careful run is part of them, and spills some words.
fn latent() -> Vec<KernelVariant> {
    let (plain, mut all) = (Options::default(), Vec::new());
    let capped = plain.with_softcap(30.0).with_causal(Causal::BottomRight);
    for (arch, dtype, dims, page_size, options) in [
        (Arch::Sm80, DType::BF16, [576, 512], Some(64), &plain),
        (Arch::Sm90a, DType::BF16, [576, 512], None, &plain),
        (Arch::Sm90a, DType::F16, [576, 512], Some(0), &capped),
        (Arch::Sm90a, DType::BF16, [575, 300], Some(5), &plain),
    ] {
        let spec = spec_of_latent(dtype, [16, 128, 1, 8192], dims, page_size, options);
        all.extend(variants(&spec, &caps(arch)).unwrap());
    }
    all
}

/// Of each algorithm as few kernels as show every property of them, the widest heads first, where registers are scarcest: a dtype of the mask,
/// a format, a granularity, pages. What compute capabilities 8.0 and 12.0 run is one source; 16-bit dtypes differ in one instruction.
fn fewest_that_show_all(all: &mut Vec<KernelVariant>) {
    let (mut shown, mut kept) = (HashSet::new(), HashSet::new());
    let mut widest_first = all.clone();
    widest_first.sort_by_key(|variant| std::cmp::Reverse(variant.dims));
    for variant in widest_first {
        let is_hopper = variant.arch == Arch::Sm90a;
        let name = variant.to_string().replace("mask ", "mask-").replace("bfloat16", "float16");
        // The sizes are no property.
        let words = name.split(' ').filter(|word| !word.contains('/'));
        let properties: Vec<_> = words.map(|word| (variant.algorithm, is_hopper, word.to_owned())).collect();
        if properties.iter().any(|property| !shown.contains(property)) {
            shown.extend(properties);
            kept.insert(variant);
        }
    }
    all.retain(|variant| kept.contains(variant));
}

/// Kernels of products of int8: those that are hot, and others. Sums of 256 columns beside scores of 128 keys are more than the registers.
fn products_of_int8() -> (Vec<KernelVariant>, Vec<KernelVariant>) {
    let plain = Options::default();
    let capped = plain.with_softcap(30.0).with_causal(Causal::TopLeft);
    let (token, channel, head) = (Granularity::Token, Granularity::Channel, Granularity::Head);
    let of = |arch, dtype, dims, mask, options: &Options| {
        let spec = spec_of_int8(dtype, [8, 2, 2048, 2048], dims, [token, channel], mask, options);
        variants(&spec, &caps(arch)).unwrap()
    };
    let (mut hot, mut all) = (Vec::new(), Vec::new());
    for (arch, head_dim) in [(Arch::Sm80, 128), (Arch::Sm90a, 64), (Arch::Sm90a, 128), (Arch::Sm120, 128)] {
        hot.extend(of(arch, DType::BF16, [head_dim, head_dim], None, &plain));
    }
    let by_head = spec_of_int8(DType::F16, [8, 2, 2048, 2048], [128, 128], [head, head], None, &plain);
    hot.extend(variants(&by_head, &caps(Arch::Sm90a)).unwrap());
    hot.extend(of(Arch::Sm90a, DType::BF16, [128, 128], Some(DType::Bool), &plain));
    hot.extend(of(Arch::Sm90a, DType::BF16, [64, 64], Some(DType::BF16), &capped));
    all.extend(of(Arch::Sm90a, DType::F32, [256, 256], Some(DType::Bool), &capped));
    all.extend(of(Arch::Sm80, DType::BF16, [80, 33], Some(DType::F32), &capped));
    all.extend(
        variants(&spec_of_int8_cache([4, 8, 2, 512, 8192], [128, 16], &plain.with_softcap(30.0)), &caps(Arch::Sm90a))
            .unwrap()
            .into_iter()
            .filter(|of| of.algorithm == Algorithm::Int8),
    );
    let (codes, options) = (Some((Format::Int8, Granularity::Tensor)), plain.with_compute(Compute::Int8));
    let varlen = spec_of_varlen(DType::BF16, [8, 2, 9000, 9000], 64, codes, &options);
    all.extend(variants(&varlen, &caps(Arch::Sm90a)).unwrap().into_iter().filter(|of| of.algorithm == Algorithm::Int8));
    (hot, all)
}

#[test]
fn products_of_int8_compile_and_the_hot_ones_do_not_spill() {
    let (hot, others) = products_of_int8();
    let mut all: Vec<_> = hot.iter().chain(&others).copied().collect();
    assert!(all.iter().all(|variant| variant.algorithm == Algorithm::Int8));
    if !std::env::var("RAPT_WHOLE").is_ok_and(|whole| whole == "1") {
        // The widest take ptxas longest.
        all.retain(|variant| variant.dims.0 <= 128);
        fewest_that_show_all(&mut all);
    }
    let Some(compiled) = compile(&all) else { return };
    for facts in compiled.unwrap_or_else(|error| panic!("{error}")) {
        println!("{}: {} registers, {} bytes spilled", facts.variant, facts.registers, facts.spilled_bytes);
        let most = if hot.contains(&facts.variant) { 0 } else { 1024 };
        assert!(facts.spilled_bytes <= most, "{} spills {} bytes", facts.variant, facts.spilled_bytes);
    }
}

#[test]
fn what_judges_heads_compiles_and_does_not_spill() {
    let mut all = Vec::new();
    for (arch, dtype, q_len) in [(Arch::Sm90a, DType::BF16, 100), (Arch::Sm80, DType::F32, 1)] {
        let lengths = [2, q_len, 1000, 128];
        let spec = spec_of_codes(dtype, lengths, Format::Int8, Granularity::Token, &Options::default());
        all.extend(deviation_variants(&spec, &caps(arch)).unwrap());
    }
    let mut seen = HashSet::new();
    all.retain(|variant| seen.insert(*variant));
    assert_eq!(all.len(), 4, "{all:?}");
    let Some(compiled) = compile(&all) else { return };
    for facts in compiled.unwrap_or_else(|error| panic!("{error}")) {
        println!("{}: {} registers, {} bytes spilled", facts.variant, facts.registers, facts.spilled_bytes);
        assert!(facts.spilled_bytes == 0, "{} spills {} bytes", facts.variant, facts.spilled_bytes);
    }
}

/// Kernels for gradients: those that are hot, and others.
fn gradients() -> (Vec<KernelVariant>, Vec<KernelVariant>) {
    let plain = Options::default();
    let capped = plain.with_softcap(30.0).with_causal(Causal::TopLeft);
    let of = |arch, dtype, head_dim, mask, options: &Options| {
        let spec = backward_spec(dtype, [8, 2048, 2048, head_dim], mask, options);
        backward_variants(&spec, &caps(arch)).unwrap()
    };
    let is_together = |variant: &KernelVariant| variant.algorithm == Algorithm::BackwardHopper;
    let (mut hot, mut all) = (Vec::new(), Vec::new());
    for head_dim in [128, 64, 96, 256] {
        // What is computed again is rare.
        let is_again = |variant: &KernelVariant| variant.to_string().contains("again");
        let (again, once): (Vec<_>, Vec<_>) =
            of(Arch::Sm90a, DType::BF16, head_dim, None, &plain).into_iter().partition(is_again);
        hot.extend(once);
        all.extend(again);
    }
    hot.extend(of(Arch::Sm80, DType::F16, 128, None, &plain));
    hot.extend(of(Arch::Sm120, DType::BF16, 256, None, &plain));
    // With dropout.
    hot.extend(of(Arch::Sm90a, DType::BF16, 128, None, &plain.with_dropout_p(0.1)));
    hot.extend(of(Arch::Sm90a, DType::BF16, 64, None, &plain.with_dropout_p(0.1)));
    // Sequences one after another, and both.
    let of_varlen = |head_dim, options: &Options| {
        let spec = backward_spec_of_varlen(DType::BF16, [8, 2, 9000, 9000], head_dim, options);
        backward_variants(&spec, &caps(Arch::Sm90a)).unwrap()
    };
    hot.extend(of_varlen(128, &plain));
    hot.extend(of_varlen(128, &plain.with_dropout_p(0.1)));
    hot.extend(of_varlen(256, &plain).into_iter().filter(is_together));
    // The tiles are those of a call alone, which fill the registers: where a sequence begins takes three more.
    all.extend(of_varlen(64, &plain));
    all.extend(of(Arch::Sm90a, DType::BF16, 64, Some(DType::BF16), &capped));
    hot.extend(of(Arch::Sm90a, DType::BF16, 64, Some(DType::Bool), &plain).into_iter().filter(is_together));
    hot.extend(of(Arch::Sm90a, DType::BF16, 128, Some(DType::Bool), &plain).into_iter().filter(is_together));
    hot.extend(of(Arch::Sm90a, DType::BF16, 256, Some(DType::Bool), &plain).into_iter().filter(is_together));
    // Of rows of a mask that TMA does not take: the warp that copies them spills.
    let by_warp = |variant: &KernelVariant| {
        let mut variant = *variant;
        variant.loads = Loads::TmaButMask;
        variant
    };
    all.extend(hot.iter().filter(|variant| is_together(variant) && variant.mask.is_some()).map(by_warp));
    // float32 by halves.
    let is_by_halves = |variant: &KernelVariant| matches!(variant.algorithm, Algorithm::BackwardHalves(_));
    for head_dim in [64, 128] {
        hot.extend(of(Arch::Sm90a, DType::F32, head_dim, None, &plain).into_iter().filter(is_by_halves));
    }
    // Up to 132 bytes.
    all.extend(of(Arch::Sm90a, DType::F32, 128, None, &plain.with_dropout_p(0.1)).into_iter().filter(is_by_halves));
    // Four bytes.
    all.extend(of(Arch::Sm90a, DType::F32, 128, Some(DType::Bool), &plain).into_iter().filter(is_by_halves));
    let biased = of(Arch::Sm90a, DType::BF16, 128, Some(DType::BF16), &plain);
    all.extend(biased.iter().filter(|variant| is_together(variant)).map(by_warp));
    all.extend(biased);
    all.extend(of(Arch::Sm90a, DType::F16, 127, Some(DType::F32), &capped));
    for dtype in [DType::F32, DType::F64] {
        all.extend(of(Arch::Sm90a, dtype, 100, Some(dtype), &capped));
    }
    (hot, all)
}

#[test]
fn gradients_compile_and_the_hot_ones_do_not_spill() {
    let (hot, others) = gradients();
    let mut all: Vec<_> = hot.iter().chain(&others).copied().collect();
    let mut seen = HashSet::new();
    all.retain(|variant| seen.insert(*variant));
    if !std::env::var("RAPT_WHOLE").is_ok_and(|whole| whole == "1") {
        // Rows, the three together and their parts of the first request, the three together of narrow and wide heads, a pass of float32, rows of sequences, the
        // gradient of a mask, and a mask by a warp.
        let found = |name| all.iter().copied().find(|variant| variant.to_string().starts_with(name)).unwrap();
        let together = "backward_hopper together bfloat16 64/64";
        let of_sequences = "backward_rows rows bfloat16 varlen";
        let of_mask = "backward_mma mask bfloat16 128/128";
        let by_warp = "backward_hopper together bfloat16 128/128 mask by a warp mask bfloat16";
        let others = [
            together,
            "backward_hopper_wide",
            "backward_halves queries float32 128/128",
            of_sequences,
            of_mask,
            by_warp,
        ]
        .map(found);
        all.truncate(3);
        all.extend(others);
    }
    let Some(compiled) = compile(&all) else { return };
    for facts in compiled.unwrap_or_else(|error| panic!("{error}")) {
        println!("{}: {} registers, {} bytes spilled", facts.variant, facts.registers, facts.spilled_bytes);
        let most = if hot.contains(&facts.variant) { 0 } else { 160 };
        assert!(facts.spilled_bytes <= most, "{} spills {} bytes", facts.variant, facts.spilled_bytes);
        let is_serial = facts.has_serial_products && hot.contains(&facts.variant);
        assert!(!is_serial, "{} has products done one by one", facts.variant);
    }
}

/// What compute capability 9.0 has of its own: kernels that are hot, and others.
fn on_hopper(plain: &Options, capped: &Options) -> (Vec<KernelVariant>, Vec<KernelVariant>) {
    let of = |spec| variants(&spec, &caps(Arch::Sm90a)).unwrap();
    let bf16 = |lengths, mask, options| of(spec(DType::BF16, lengths, mask, options));
    let (mut hot, mut all) = (Vec::new(), Vec::new());
    for head_dim in [96, 128] {
        hot.extend(of(spec(DType::F32, [8, 2048, 2048, head_dim], None, plain)));
    }
    hot.extend(of(spec(DType::F32, [1, 4096, 4096, 512], None, plain)));
    all.extend(bf16([2, 100, 100, 500], Some(DType::BF16), capped));
    all.extend(of(spec(DType::F32, [2, 100, 100, 300], Some(DType::Bool), capped)));
    all.extend(of(spec_of_dims(DType::F16, [2, 100, 100], [64, 320], Some(DType::Bool), plain)));
    // Sums fill the registers here: a spill would be in the loop.
    for head_dim in [96, 192, 256] {
        hot.extend(bf16([8, 2048, 2048, head_dim], None, plain));
    }
    hot.extend(bf16([8, 1024, 1024, 96], None, plain));
    hot.extend(bf16([8, 4096, 77, 64], None, plain));
    // Tiles of 64 keys: four groups, and two.
    hot.extend(bf16([768, 197, 197, 64], None, plain));
    hot.extend(bf16([8, 197, 197, 64], None, plain));
    hot.extend(bf16([8, 2048, 2048, 80], None, plain));
    for (head_dim, mask) in [64, 128, 256].into_iter().flat_map(|d| [(d, DType::Bool), (d, DType::BF16)]) {
        hot.extend(bf16([8, 2048, 2048, head_dim], Some(mask), plain));
    }
    for head_dim in [48, 64, 80, 128, 256] {
        hot.extend(bf16([8, 2048, 2048, head_dim], None, capped));
    }
    // Where registers are scarcest: something else beside each kind of mask, and 32-bit biases beside the widest heads.
    hot.extend(bf16([8, 2048, 2048, 64], Some(DType::Bool), capped));
    hot.extend(bf16([8, 2048, 2048, 64], Some(DType::BF16), capped));
    hot.extend(bf16([8, 2048, 2048, 128], Some(DType::BF16), capped));
    hot.extend(bf16([8, 2048, 2048, 256], Some(DType::F32), capped));
    hot.extend(of(spec(DType::F32, [8, 2048, 2048, 128], Some(DType::Bool), plain)));
    // Values wider and narrower than keys, as they share out shared memory otherwise.
    for dims in [[192, 128], [96, 64], [64, 96], [64, 128], [128, 64], [64, 256], [256, 64]] {
        all.extend(of(spec_of_dims(DType::BF16, [8, 4096, 4096], dims, None, plain)));
    }
    // Element by element.
    for (head_dim, mask) in [(95, None), (127, Some(DType::Bool)), (255, Some(DType::F32))] {
        hot.extend(bf16([8, 2048, 2048, head_dim], mask, capped));
    }
    hot.extend(of(spec(DType::F32, [8, 2048, 2048, 127], Some(DType::F32), capped)));
    (hot, all)
}

#[test]
fn all_kernels_compile_and_the_hot_ones_do_not_spill() {
    let plain = Options::default();
    let capped = plain.with_softcap(30.0).with_causal(Causal::TopLeft);
    let mut all = Vec::new();
    let mut hot = Vec::new();
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120] {
        let of = |spec| variants(&spec, &caps(arch)).unwrap();
        let bf16 = |lengths, mask, options| of(spec(DType::BF16, lengths, mask, options));
        hot.extend(bf16([8, 1, 8192, 128], None, &plain));
        hot.extend(bf16([8, 1, 65536, 64], None, &plain));
        hot.extend(bf16([8, 2048, 2048, 64], None, &plain));
        hot.extend(bf16([8, 2048, 2048, 128], None, &plain));
        hot.extend(of(spec(DType::F32, [8, 1, 2048, 128], None, &plain)));
        // Its careful run is part of it on compute capability 9.0, and spills a word or two.
        all.extend(bf16([1, 4096, 4096, 512], None, &plain));
        hot.extend(of(spec(DType::F32, [8, 2048, 2048, 64], None, &plain)));
    }
    let (of_hopper, more_of_hopper) = on_hopper(&plain, &capped);
    hot.extend(of_hopper);
    all.extend(more_of_hopper);
    // The other forms of the sources, once: what they differ in does not depend on the architecture.
    let of =
        |dtype, lengths, mask, options| variants(&spec(dtype, lengths, mask, options), &caps(Arch::Sm90a)).unwrap();
    all.extend(of(DType::F16, [2, 100, 100, 24], Some(DType::F32), &capped));
    all.extend(of(DType::F64, [8, 100, 100, 40], Some(DType::F64), &capped));
    all.extend(over_codes(&plain));
    hot.extend(prompts_over_codes(&plain));
    all.extend(over_codes(&capped).into_iter().filter(|variant| variant.algorithm == Algorithm::Mma));
    let (of_caches, more_of_caches) = caches();
    hot.extend(of_caches);
    all.extend(more_of_caches);
    all.extend(latent());
    // What drops weights.
    let dropping = plain.with_dropout_p(0.1);
    hot.extend(of(DType::BF16, [8, 2048, 2048, 128], None, &dropping));
    hot.extend(of(DType::BF16, [8, 2048, 2048, 64], None, &dropping));
    all.extend(of(DType::F32, [8, 2048, 2048, 64], None, &dropping));
    // Sequences one after another.
    hot.extend(varlen(Arch::Sm90a, DType::BF16, 64));
    hot.extend(varlen(Arch::Sm90a, DType::BF16, 128));
    all.extend(varlen(Arch::Sm90a, DType::F32, 64));
    all.extend(varlen(Arch::Sm80, DType::BF16, 128));
    let (of_codes, more_of_codes) = varlen_over_codes();
    hot.extend(of_codes);
    all.extend(more_of_codes);
    all.extend(swizzled());
    all.extend(of(DType::F16, [2, 1, 100, 24], Some(DType::Bool), &plain));
    all.extend(of(DType::BF16, [2, 1, 100, 33], Some(DType::BF16), &plain));
    all.extend(of(DType::BF16, [2, 100, 100, 33], Some(DType::Bool), &plain));
    all.extend(of(DType::BF16, [2, 100, 100, 256], None, &plain));
    all.extend(of(DType::F16, [2, 100, 100, 300], Some(DType::F16), &plain));
    all.extend(of(DType::F32, [2, 100, 100, 128], None, &plain));
    all.extend(of(DType::F32, [2, 100, 100, 80], Some(DType::F32), &capped));
    let count = hot.len();
    all.splice(0..0, hot.iter().copied());
    let mut seen = HashSet::new();
    all.retain(|variant| seen.insert(*variant));
    if std::env::var("RAPT_WHOLE").is_ok_and(|whole| whole == "1") {
        println!("all of {} kernels", all.len());
    } else {
        let whole = all.len();
        fewest_that_show_all(&mut all);
        println!("{} of {whole} kernels, without RAPT_WHOLE=1", all.len());
    }
    let Some(compiled) = compile(&all) else { return };
    let compiled = compiled.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(compiled.len(), all.len());
    assert!(count > 0);
    for facts in &compiled {
        println!("{}: {} registers, {} bytes spilled", facts.variant, facts.registers, facts.spilled_bytes);
        assert!(facts.registers <= 255 && facts.cubin_bytes > 0);
        let most = if hot.contains(&facts.variant) { 0 } else { 160 };
        assert!(facts.spilled_bytes <= most, "{} spills {} bytes", facts.variant, facts.spilled_bytes);
    }
}
