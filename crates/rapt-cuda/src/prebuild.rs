//! Which kernels are worth shipping, and their compilation: on all cores, without a device, each kept by its hash.
//!
//! The kernels are those that [`select`](crate::select) takes for requests that are common; what it takes is asked of it,
//! so that a new kernel or tile is shipped without a word here.

use std::path::Path;
use std::sync::Mutex;

use rapt_core::{
    Arch, BackwardSpec, Causal, CodesForm, DType, Device, Extent, Format, GradientForms, Granularity, Options, Qkv,
    Result as CoreResult, Shape, Spec, SpecBuilder, TensorLayout, View,
};
use rustc_hash::FxHashSet;

use crate::artifacts::bundled;
use crate::artifacts::cache::{Cache, Name};
use crate::artifacts::nvrtc::{CompiledFacts, compile_with_log};
use crate::codes::{Codes, TileScales};
use crate::driver::{Compiler, Cubin, Nvrtc};
use crate::error::{CudaError, Result};
use crate::select::{Caps, backward_variants, variants};
use crate::variant::{Algorithm, DECODE_BLOCK_M, KernelVariant, Sequences};

/// How much is compiled ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assortment {
    /// Every kernel of forward in the forms that are asked for most, for the architectures that each change is compiled for.
    Core,
    /// What a package ships: what models of today ask for.
    Whole,
}

impl Assortment {
    /// Architectures that machine code is compiled for; those above within a family run it too.
    #[must_use]
    pub const fn archs(self) -> &'static [Arch] {
        match self {
            Assortment::Core => &[Arch::Sm80, Arch::Sm90a, Arch::Sm120],
            Assortment::Whole => &[Arch::Sm80, Arch::Sm90a, Arch::Sm100, Arch::Sm120],
        }
    }
}

/// Devices that differ in what selection asks: multiprocessors and shared memory per block, in KiB.
const DEVICES: [(Arch, u32, u32); 6] = [
    (Arch::Sm80, 108, 163),
    (Arch::Sm86, 84, 99),
    (Arch::Sm89, 142, 99),
    (Arch::Sm90a, 132, 227),
    (Arch::Sm100, 148, 227),
    (Arch::Sm120, 170, 99),
];

/// `[q_len, kv_len]`: prompts from short to long, a step of decoding with few keys and with many, a speculative one, a part of a prompt.
const LENGTHS: [[usize; 2]; 8] =
    [[32, 32], [77, 77], [512, 512], [4096, 4096], [1, 64], [1, 8192], [5, 8192], [512, 8192]];

/// Codes that caches of keys and values are kept in.
const CACHES: [(Format, Granularity); 6] = [
    (Format::Int8, Granularity::Token),
    (Format::Int8, Granularity::Head),
    (Format::E4m3fn, Granularity::Token),
    (Format::E4m3fn, Granularity::Head),
    (Format::Int4, Granularity::Token),
    (Format::Nvfp4, Granularity::Block(16)),
];

/// What a model asks for, but for its lengths and heads.
#[derive(Clone, Copy)]
struct Request {
    dtype: DType,
    /// head_dim and head_dim_v.
    dims: (usize, usize),
    mask: Option<DType>,
    softcap: Option<f64>,
    /// What k and v are codes of.
    codes: Option<(Format, Granularity)>,
    /// Whether they are caches of sequences with lengths of their own, or sequences one after another.
    sequences: Sequences,
}

impl Request {
    const fn new(dtype: DType, head_dim: usize, mask: Option<DType>) -> Self {
        Request { dtype, dims: (head_dim, head_dim), mask, softcap: None, codes: None, sequences: Sequences::Even }
    }

    /// Whether its gradients are asked for too.
    fn is_trained(&self) -> bool {
        let is_plain = self.mask.is_none() && self.softcap.is_none() && self.codes.is_none();
        is_plain
            && self.sequences == Sequences::Even
            && self.dtype != DType::F64
            && matches!(self.dims, (64, 64) | (128, 128))
    }
}

/// The requests of an assortment on an architecture. Which kernels they come to is select's matter: most head dims of float32
/// are one kernel but on compute capability 9.0.
fn requests(assortment: Assortment, arch: Arch) -> Vec<Request> {
    const PLAIN: [Option<DType>; 2] = [None, Some(DType::Bool)];
    let mut requests = Vec::new();
    let mut add = |dtype, head_dims: &[usize], masks: &[Option<DType>]| {
        for head_dim in head_dims {
            requests.extend(masks.iter().map(|mask| Request::new(dtype, *head_dim, *mask)));
        }
    };
    add(DType::BF16, &[64, 128], &[None]);
    add(DType::F32, &[64], &[None]);
    // The forms of one source, once: what they differ in does not depend on the architecture. Those of compute capability 9.0, which has
    // kernels of its own, are in the list of tests/compile.rs.
    if assortment == Assortment::Whole || arch == Arch::Sm80 {
        add(DType::BF16, &[64], &[Some(DType::BF16)]);
        add(DType::BF16, &[128], &[Some(DType::Bool)]);
        // Autoencoders of images; few queries of such heads take the kernel that serves everything.
        add(DType::BF16, &[512], &[None]);
        add(DType::F16, &[64], &[None]);
        add(DType::F64, &[64], &[None]);
    }
    if assortment == Assortment::Core {
        return requests;
    }
    for dtype in [DType::F16, DType::BF16] {
        add(dtype, &[64, 80, 96, 128, 256], &PLAIN);
        add(dtype, &[64, 128], &[Some(dtype)]);
        add(dtype, &[512], &[None]);
    }
    add(DType::F32, &[64, 80, 96, 128], &[None, Some(DType::Bool), Some(DType::F32)]);
    add(DType::F32, &[512], &[None]);
    // Latent attention (DeepSeek) unpacked, and over its latent cache; capped scores (Gemma 2).
    requests.push(Request { dims: (192, 128), ..Request::new(DType::BF16, 192, None) });
    for sequences in [Sequences::Even, Sequences::Ragged, Sequences::Paged] {
        requests.push(Request { dims: (576, 512), sequences, ..Request::new(DType::BF16, 576, None) });
    }
    let capped = |head_dim| Request { softcap: Some(50.0), ..Request::new(DType::BF16, head_dim, None) };
    requests.extend([128, 256].map(capped));
    // Caches of numbers and of codes.
    for head_dim in [64, 128] {
        let plain = Request::new(DType::BF16, head_dim, None);
        let of_codes = CACHES.map(|codes| Request { codes: Some(codes), ..plain });
        let paged = Request { sequences: Sequences::Paged, ..of_codes[0] };
        requests.extend(of_codes);
        requests.push(paged);
        for sequences in [Sequences::Ragged, Sequences::Paged, Sequences::Varlen] {
            requests.extend([DType::BF16, DType::F16].map(|dtype| Request { dtype, sequences, ..plain }));
        }
    }
    requests
}

/// Keys of a page of the specs of this file.
const PAGE: usize = 16;

/// A tensor that is never read.
fn view(name: &'static str, dtype: DType, shape: &[usize]) -> CoreResult<View<'static>> {
    let shape = Shape::new(shape).unwrap_or(Shape::from([0; 4]));
    let strides = shape.contiguous().unwrap_or(rapt_core::Strides::from([0; 4]));
    let nowhere = std::ptr::without_provenance(1 << 20);
    // SAFETY: a spec is made of it, which holds no pointer; nobody reads it.
    unsafe { View::from_raw_parts(name, nowhere, dtype, shape, strides, Device::Cuda(0), Extent::Declared) }
}

/// The gradients of `[1, heads, len, head_dim]` tensors without a mask.
fn gradients(
    request: &Request,
    [heads, kv_heads]: [usize; 2],
    [q_len, kv_len]: [usize; 2],
    options: &Options,
) -> CoreResult<BackwardSpec> {
    let (dtype, (head_dim, head_dim_v)) = (request.dtype, request.dims);
    let q = view("q", dtype, &[1, heads, q_len, head_dim])?;
    let k = view("k", dtype, &[1, kv_heads, kv_len, head_dim])?;
    let v = view("v", dtype, &[1, kv_heads, kv_len, head_dim_v])?;
    let d_o = view("d_o", dtype, &[1, heads, q_len, head_dim_v])?;
    let forward = Spec::builder(&q, &k, &v, options).return_lse(true).build()?;
    let [dq, dk, dv] = [&q, &k, &v].map(|of| Some(of.into()));
    BackwardSpec::new(forward, &GradientForms { dq, dk, dv, ..GradientForms::new(&d_o) })
}

/// The spec of `[1, heads, len, head_dim]` tensors, with a `[1, 1, q_len, kv_len]` mask, a cache, or sequences one after another.
fn spec(
    request: &Request,
    [heads, kv_heads]: [usize; 2],
    [q_len, kv_len]: [usize; 2],
    options: &Options,
) -> CoreResult<Spec> {
    let (dtype, (head_dim, head_dim_v)) = (request.dtype, request.dims);
    if request.sequences == Sequences::Varlen {
        let options = Options { layout: TensorLayout::Bshd, ..*options };
        let [q, k] = [("q", [q_len, heads]), ("k", [kv_len, kv_heads])]
            .map(|(name, [len, heads])| view(name, dtype, &[len, heads, head_dim]));
        let (v, offsets) = (view("v", dtype, &[kv_len, kv_heads, head_dim_v])?, view("cu_seqlens", DType::I32, &[2])?);
        return Spec::builder(&q?, &k?, &v, &options).varlen(&offsets, &offsets).build();
    }
    let q = view("q", dtype, &[1, heads, q_len, head_dim])?;
    let mask = request.mask.map(|dtype| view("mask", dtype, &[1, 1, q_len, kv_len])).transpose()?;
    let (blocks, rows) =
        if request.sequences == Sequences::Paged { (kv_len.div_ceil(PAGE), PAGE) } else { (1, kv_len) };
    let build = |mut builder: SpecBuilder| -> CoreResult<_> {
        if request.sequences == Sequences::Paged {
            builder.pages(&view("page_table", DType::I32, &[blocks])?, kv_len);
        }
        if request.sequences != Sequences::Even {
            builder.lengths(Some(&view("cache_seqlens", DType::I32, &[1])?), 1);
        }
        builder.mask(mask.as_ref()).build()
    };
    let Some((format, granularity)) = request.codes else {
        let k = view("k", dtype, &[blocks, kv_heads, rows, head_dim])?;
        let v = view("v", dtype, &[blocks, kv_heads, rows, head_dim_v])?;
        return build(Spec::builder(&q, &k, &v, options));
    };
    let codes = |name, dim: usize| -> CoreResult<_> {
        let shape = [blocks, kv_heads, rows, dim / format.codes_per_byte()];
        let groups: &[usize] = match granularity {
            Granularity::Head => &[1, kv_heads],
            Granularity::Block(size) => &[blocks, kv_heads, rows, dim / size],
            _ => &[blocks, kv_heads, rows],
        };
        let mut form = CodesForm::new(format, &view("descale", format.scale_dtype(), groups)?);
        form.has_global_scale = format.has_global_scale();
        Ok((view(name, format.code_dtype(), &shape)?, form))
    };
    let ((k, of_k), (v, of_v)) = (codes("k", head_dim)?, codes("v", head_dim_v)?);
    let codes = Qkv { q: None, k: Some(of_k), v: Some(of_v) };
    let mut builder = Spec::builder(&q, &k, &v, options);
    builder.codes(codes);
    build(builder)
}

/// Whether a kernel over codes that is asked for is one of those that are asked for most.
fn is_common(variant: &KernelVariant) -> bool {
    match (variant.algorithm, variant.codes) {
        // More rows over codes than a product takes are rare: drafted tokens of grouped heads.
        (Algorithm::DecodeCodes, _) => variant.block_m < DECODE_BLOCK_M,
        // Of prompts over codes one granularity of each format; others take a compiler seconds, once.
        (Algorithm::Mma, Codes::Tiles { k, .. }) => {
            k.scales != TileScales::Uniform && variant.dims.0 == 128 && variant.sequences == Sequences::Even
        }
        _ => true,
    }
}

/// The kernels of an assortment on devices that run machine code of `arch`, each once.
///
/// # Errors
/// As [`select`](crate::select).
pub fn common_variants(arch: Arch, assortment: Assortment) -> CoreResult<Vec<KernelVariant>> {
    let requests = requests(assortment, arch);
    let (mut seen, mut all) = (FxHashSet::default(), Vec::new());
    for (device, multiprocessors, shared_kib) in DEVICES.into_iter().filter(|(own, ..)| bundled::family(*own) == arch) {
        let caps =
            Caps { arch: device, multiprocessors, shared_bytes: shared_kib * 1024, clock_hz: None, bandwidth: None };
        for request in &requests {
            let is_cache = matches!(request.sequences, Sequences::Ragged | Sequences::Paged);
            let lengths = LENGTHS.into_iter().filter(|[q_len, kv_len]| !is_cache || q_len < kv_len);
            let causals = [None, Some(Causal::BottomRight), Some(Causal::TopLeft)];
            for lengths in lengths {
                for heads in [[8, 8], [8, 2]] {
                    for causal in causals.into_iter().take(if is_cache { 2 } else { 3 }) {
                        let options = Options { causal, softcap: request.softcap, ..Options::default() };
                        let mut found = variants(&spec(request, heads, lengths, &options)?, &caps)?;
                        found.retain(is_common);
                        if assortment == Assortment::Whole && request.is_trained() && lengths[0] == lengths[1] {
                            found.extend(backward_variants(&gradients(request, heads, lengths, &options)?, &caps)?);
                        }
                        let found = found.iter().map(bundled::of_family);
                        all.extend(found.filter(|variant| seen.insert(*variant)));
                    }
                }
            }
        }
    }
    Ok(all)
}

/// A kernel, compiled.
#[derive(Clone, Debug)]
pub struct Built {
    /// What the compiler said of it.
    pub facts: CompiledFacts,
    cubin: Vec<u8>,
}

const WITH_LOG: &str = "with its log";

/// Compiles one kernel, or takes it from `kept`.
fn build(variant: &KernelVariant, compiler: &dyn Compiler, kept: &Cache) -> Result<Built> {
    let name = Name::new(variant, compiler.version(), WITH_LOG);
    // The length of the log, the log, the machine code.
    let unpack = |entry: Vec<u8>| {
        let (len, rest) = entry.split_first_chunk::<4>()?;
        let (log, bytes) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        Some(Cubin { bytes: bytes.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
    };
    let built = |cubin: Cubin| CompiledFacts::read(*variant, &cubin).map(|facts| Built { facts, cubin: cubin.bytes });
    if let Some(built) = kept.get(&name).and_then(unpack).and_then(built) {
        return Ok(built);
    }
    let cubin = compile_with_log(variant, compiler)?;
    let len = u32::try_from(cubin.log.len()).unwrap_or(0).to_le_bytes();
    let entry = [&len, cubin.log.as_bytes(), &cubin.bytes].concat();
    let log = cubin.log.clone();
    let built = built(cubin).ok_or_else(|| CudaError::Compile {
        kernel: variant.to_string(),
        arch: variant.arch.name(),
        log: format!("the compiler's log is not understood: {log}"),
    })?;
    kept.put(&name, &entry);
    Ok(built)
}

fn build_with(compiler: &dyn Compiler, variants: &[KernelVariant], kept: Option<&Path>) -> Result<Vec<Built>> {
    let kept = Cache::new(kept.map(Path::to_owned));
    let (jobs, built) = (Mutex::new(variants.iter().enumerate()), Mutex::new(Vec::with_capacity(variants.len())));
    let next = || jobs.lock().ok().and_then(|mut jobs| jobs.next());
    let work = || {
        while let Some((at, variant)) = next() {
            let one = build(variant, compiler, &kept);
            if let Ok(mut built) = built.lock() {
                built.push((at, one));
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(variants.len());
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    let mut built = built.into_inner().unwrap_or_default();
    built.sort_unstable_by_key(|(at, _)| *at);
    built.into_iter().map(|(_, one)| one).collect()
}

/// Compiles every kernel of `variants` with the NVRTC that is found, one per core at a time, without a device. What lies in
/// the folder `kept` from before is not compiled again.
///
/// # Errors
/// [`CudaError::NoCompiler`]; [`CudaError::Compile`] for the first that does not compile.
pub fn build_all(variants: &[KernelVariant], kept: Option<&Path>) -> std::result::Result<Vec<Built>, CudaError> {
    build_with(&Nvrtc::find(&[])?, variants, kept)
}

/// What [`ship`] wrote of one architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrote {
    /// The architecture.
    pub arch: Arch,
    /// Number of kernels.
    pub kernels: usize,
    /// Size of the file.
    pub file_bytes: u64,
    /// The compiler's version, major and minor.
    pub compiler: (i32, i32),
}

/// Compiles the kernels of an assortment and writes them into `folder`, a file per architecture, for
/// [`set_shipped_folder`](crate::set_shipped_folder).
///
/// # Errors
/// As [`build_all`]; [`CudaError::Archive`] where `folder` cannot be written; what [`common_variants`] answers.
pub fn ship(folder: &Path, assortment: Assortment, kept: Option<&Path>) -> std::result::Result<Vec<Wrote>, CudaError> {
    let compiler = Nvrtc::find(&[])?;
    let archive = |text: String| CudaError::Archive { folder: folder.display().to_string(), text };
    let mut all = Vec::new();
    for arch in assortment.archs() {
        all.extend(common_variants(*arch, assortment).map_err(|error| archive(error.to_string()))?);
    }
    // At once, so that no core waits at the end of each architecture.
    let built = build_with(&compiler, &all, kept)?;
    let write = |arch: &Arch| {
        let arch = *arch;
        let of_arch = built.iter().filter(|built| built.facts.variant.arch == arch);
        let kernels: Vec<_> = of_arch.map(|built| (built.facts.variant, built.cubin.as_slice())).collect();
        let written = bundled::write(folder, arch, compiler.version(), &kernels);
        let file_bytes = written.map_err(|error| archive(error.to_string()))?;
        Ok(Wrote { arch, kernels: kernels.len(), file_bytes, compiler: compiler.version() })
    };
    assortment.archs().iter().map(write).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source;
    use crate::variant::{Loads, Pass};

    fn distinct(arch: Arch, assortment: Assortment) -> FxHashSet<KernelVariant> {
        let variants = common_variants(arch, assortment).unwrap();
        let distinct: FxHashSet<_> = variants.iter().copied().collect();
        assert_eq!(distinct.len(), variants.len());
        assert!(variants.iter().all(|variant| variant.arch == arch));
        distinct
    }

    #[test]
    fn common_requests_are_covered_on_every_architecture() {
        for arch in Assortment::Whole.archs() {
            let variants = distinct(*arch, Assortment::Whole);
            let has = |algorithm, storage, mask: Option<DType>| {
                variants
                    .iter()
                    .any(|variant| (variant.algorithm, variant.storage, variant.mask) == (algorithm, storage, mask))
            };
            for storage in [DType::F16, DType::BF16] {
                for mask in [None, Some(DType::Bool), Some(storage)] {
                    assert!(has(Algorithm::Decode, storage, mask), "{arch:?} {storage} {mask:?}");
                }
                assert!(has(Algorithm::Combine, storage, None) && has(Algorithm::Generic, storage, None));
                let many = |variant: &&KernelVariant| {
                    matches!(variant.algorithm, Algorithm::Mma | Algorithm::Hopper) && variant.storage == storage
                };
                assert!(has(Algorithm::Wide, storage, None), "{arch:?} {storage}");
                for head_dim in [64, 80, 96, 128, 256] {
                    let found = variants.iter().filter(many).any(|variant| variant.dims == (head_dim, head_dim));
                    assert!(found, "{arch:?} {storage} {head_dim}");
                }
            }
            assert_eq!(has(Algorithm::Wide, DType::F32, None), *arch == Arch::Sm90a, "{arch:?}");
            for storage in [DType::F32, DType::F64] {
                assert!(has(Algorithm::Generic, storage, None) && has(Algorithm::Combine, storage, None));
            }
            for mask in [None, Some(DType::Bool), Some(DType::F32)] {
                let has = |head_dim| {
                    let (algorithm, dims) = (Algorithm::HopperF32, (head_dim, head_dim));
                    variants
                        .iter()
                        .any(|variant| (variant.algorithm, variant.mask, variant.dims) == (algorithm, mask, dims))
                };
                let count = [64, 80, 96, 128].into_iter().filter(|head_dim| has(*head_dim)).count();
                assert_eq!(count, if *arch == Arch::Sm90a { 4 } else { 0 }, "{arch:?} float32 {mask:?}");
            }
            let caches = variants.iter().filter(|variant| variant.algorithm == Algorithm::DecodeCodes);
            assert!(caches.count() >= 2 * CACHES.len(), "{arch:?} has no kernel for some cache of codes");
            let prompts =
                |variant: &&KernelVariant| variant.algorithm == Algorithm::Mma && variant.codes != Codes::None;
            assert_eq!(variants.iter().filter(prompts).count(), 4, "{arch:?}: int8, e4m3fn, int4 and nvfp4");
            assert!(variants.len() < 180, "{} kernels: too many for a wheel's build", variants.len());
        }
    }

    #[test]
    fn a_step_of_training_finds_its_kernels() {
        for arch in Assortment::Core.archs() {
            let is_without = distinct(*arch, Assortment::Core).iter().all(|variant| variant.algorithm.pass().is_none());
            assert!(is_without, "{arch:?}: each change would compile them");
        }
        for (arch, multiprocessors, shared_kib) in DEVICES {
            let whole = distinct(bundled::family(arch), Assortment::Whole);
            let caps = Caps { arch, multiprocessors, shared_bytes: shared_kib * 1024, clock_hz: None, bandwidth: None };
            for (dtype, head_dim) in
                [DType::F16, DType::BF16, DType::F32].into_iter().flat_map(|dtype| [(dtype, 64), (dtype, 128)])
            {
                for (causal, kv_heads) in [(None, 12), (Some(Causal::TopLeft), 12), (Some(Causal::TopLeft), 4)] {
                    let options = Options { causal, ..Options::default() };
                    let request = Request::new(dtype, head_dim, None);
                    let spec = gradients(&request, [12, kv_heads], [1000, 1000], &options).unwrap();
                    let mut needed = variants(spec.forward(), &caps).unwrap();
                    needed.extend(backward_variants(&spec, &caps).unwrap());
                    assert!(needed.iter().any(|variant| variant.algorithm.pass().is_some()));
                    for variant in needed {
                        assert!(whole.contains(&bundled::of_family(&variant)), "{arch:?}: {variant}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_core_is_part_of_the_whole_and_has_every_kernel() {
        for arch in Assortment::Core.archs() {
            let (core, whole) = (distinct(*arch, Assortment::Core), distinct(*arch, Assortment::Whole));
            assert!(core.is_subset(&whole) && core.len() * 2 < whole.len(), "{} of {}", core.len(), whole.len());
            let hopper: &[Algorithm] = &[Algorithm::Hopper, Algorithm::HopperF32];
            let many = if *arch == Arch::Sm90a { hopper } else { &[Algorithm::Mma] };
            assert_eq!(core.iter().any(|variant| variant.algorithm == Algorithm::Wide), *arch == Arch::Sm80);
            for algorithm in many.iter().chain(&[Algorithm::Generic, Algorithm::Decode, Algorithm::Combine]) {
                assert!(core.iter().any(|variant| variant.algorithm == *algorithm), "{arch:?} has no {algorithm:?}");
            }
        }
    }

    fn wide_with(mask: Option<DType>) -> KernelVariant {
        let request = Request::new(DType::BF16, 512, mask);
        let caps =
            Caps { arch: Arch::Sm90a, multiprocessors: 132, shared_bytes: 227 * 1024, clock_hz: None, bandwidth: None };
        let spec = spec(&request, [8, 8], [512, 512], &Options::default()).unwrap();
        variants(&spec, &caps).unwrap()[0]
    }

    /// With the options of a kernel that has every macro; the kernels themselves are compiled by tests/compile.rs.
    #[test]
    fn each_file_that_is_included_compiles_alone() {
        let compiler = match Nvrtc::find(&[]) {
            Ok(compiler) => compiler,
            Err(error) => {
                let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
                assert!(!required.split(',').any(|name| name == "nvrtc"), "RAPT_REQUIRE asks for nvrtc: {error}");
                println!("skipped: {error}");
                return;
            }
        };
        let variants = distinct(Arch::Sm90a, Assortment::Whole);
        for mask in [None, Some(DType::Bool), Some(DType::BF16)] {
            let find =
                |is_it: &dyn Fn(&KernelVariant) -> bool| *variants.iter().find(|variant| is_it(variant)).unwrap();
            let hopper = find(&|variant| variant.algorithm == Algorithm::Hopper && variant.mask == mask);
            // None of those that are compiled beforehand has a mask.
            let decode = KernelVariant { mask, ..find(&|variant| variant.algorithm == Algorithm::DecodeCodes) };
            let is_coded =
                |variant: &KernelVariant| variant.algorithm == Algorithm::Mma && variant.codes != Codes::None;
            let coded = KernelVariant { mask, ..find(&is_coded) };
            // None is compiled beforehand.
            let int8 = KernelVariant { algorithm: Algorithm::Int8, block_m: 64, block_n: 128, ..coded };
            let generic = KernelVariant::generic(Arch::Sm90a, DType::BF16, mask);
            let deviation = KernelVariant { algorithm: Algorithm::Deviation, codes: Codes::Any, ..generic };
            let backward = KernelVariant {
                algorithm: Algorithm::BackwardMma(Pass::Keys),
                dims: (64, 64),
                block_m: 64,
                block_n: 32,
                stages: 2,
                ..KernelVariant::backward(Arch::Sm90a, DType::BF16, mask, Pass::Keys)
            };
            let hopper_backward = KernelVariant {
                algorithm: Algorithm::BackwardHopper,
                loads: Loads::Tma,
                natural: false,
                block_m: 128,
                block_n: 128,
                ..backward
            };
            for (name, _) in source::FILES.iter().filter(|(name, _)| name.ends_with(".cuh")) {
                let variant = match name.split('/').next() {
                    Some("backward") if name.starts_with("backward/hopper") => hopper_backward,
                    Some("decode") => decode,
                    Some("wide") => wide_with(mask),
                    Some("mma") => coded,
                    Some("int8") => int8,
                    Some("deviation") => deviation,
                    Some("backward") => backward,
                    _ => hopper,
                };
                let compiled = compiler.compile(name, &source::text(name), &variant.options()).unwrap();
                assert!(compiled.is_ok(), "{name} by itself, for {variant}: {}", compiled.unwrap_err());
            }
        }
    }
}
