//! What `explain` says is what the launch plan holds: over a grid of requests, on host memory and, without a device, on GPUs.
//!
//! Each row is compared with the payload (kernel variants, work, launch) and the request, and never with another text. No view
//! lies on memory: a spec asks for shapes, strides and alignment, never for elements.
#![allow(missing_docs)]

use std::collections::{BTreeSet, HashMap};

use rapt::{Arch, Causal, CpuLaunch, CpuStep, DType, Device, Extent, Options, Plan, Shape, Spec, View, Window, Work};
use rapt_cuda::{Algorithm, CudaLaunch, KernelVariant, Loads};

#[derive(Clone, Copy, Debug)]
struct Request {
    dtype: DType,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    head_dim_v: usize,
    mask: Option<DType>,
    options: Options,
    device: Device,
    /// Of every tensor, in bytes beyond a multiple of 16.
    offset: usize,
}

impl Request {
    fn spec(&self) -> Spec {
        let view = |name, dtype, shape: [usize; 4]| {
            let (shape, at) = (Shape::from(shape), std::ptr::without_provenance((1 << 40) + self.offset));
            let strides = shape.contiguous().unwrap();
            // SAFETY: never read: only a spec is built from it.
            unsafe { View::from_raw_parts(name, at, dtype, shape, strides, self.device, Extent::Declared) }.unwrap()
        };
        let q = view("q", self.dtype, [2, self.q_heads, self.q_len, self.head_dim]);
        let k = view("k", self.dtype, [2, self.kv_heads, self.kv_len, self.head_dim]);
        let v = view("v", self.dtype, [2, self.kv_heads, self.kv_len, self.head_dim_v]);
        let mask = self.mask.map(|dtype| view("mask", dtype, [1, 1, self.q_len, self.kv_len]));
        Spec::builder(&q, &k, &v, &self.options).mask(mask.as_ref()).build().unwrap()
    }

    /// The rows that depend on the request alone.
    fn words(&self) -> [(&'static str, String); 2] {
        let mask = match self.mask {
            None => "none".to_owned(),
            Some(DType::Bool) => "bool, True = attend, read in place".to_owned(),
            Some(dtype) => format!("additive {dtype}, read in place"),
        };
        let causal = match self.options.causal {
            None => "no causal mask".to_owned(),
            Some(Causal::TopLeft) => "causal top_left, diagonal at j = i + 0".to_owned(),
            Some(Causal::BottomRight) => {
                format!("causal bottom_right, diagonal at j = i + {}", self.kv_len as i64 - self.q_len as i64)
            }
        };
        let window = match self.options.window {
            Window { left: None, right: None } => "",
            Window { left: Some(16), right: Some(0) } => "; window left 16, right 0",
            _ => "; window left unbounded, right 3",
        };
        [("mask", mask), ("positions", format!("{causal}{window}"))]
    }

    /// The row of tiles for blocks of so many queries and keys of `work`; without one, of `items`.
    fn tiles(&self, block_m: usize, block_n: usize, work: Option<Work>, items: usize) -> String {
        let splits = work.map_or(1, |work| self.kv_len.div_ceil(work.keys_per_item));
        let items = work.map_or(items, |work| work.tasks * work.rows.div_ceil(work.rows_per_item) * splits);
        format!("{block_m} queries × {block_n} keys, {items} pieces of work, keys split in {splits}")
    }
}

fn grid(device: Device, offset: usize, judge: impl Fn(&Request)) {
    let lengths = [(1, 200), (1, 700), (1, 20_000), (16, 90), (300, 520), (2048, 2048), (5, 0), (0, 7)];
    let (top_left, bottom_right) = (Some(Causal::TopLeft), Some(Causal::BottomRight));
    let none = Window::default();
    let positions = [
        (None, none),
        (top_left, none),
        (bottom_right, Window { left: Some(16), right: Some(0) }),
        (None, Window { left: None, right: Some(3) }),
    ];
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        for (q_len, kv_len) in lengths {
            for (q_heads, kv_heads) in [(4, 4), (8, 2), (6, 1)] {
                for (head_dim, head_dim_v) in [(64, 64), (128, 72), (257, 64)] {
                    for mask in [None, Some(DType::Bool), Some(dtype)] {
                        for (causal, window) in positions {
                            let options = Options { causal, window, ..Options::default() };
                            let sizes = Request {
                                dtype,
                                q_heads,
                                kv_heads,
                                q_len,
                                kv_len,
                                head_dim,
                                head_dim_v,
                                mask,
                                options,
                                device,
                                offset,
                            };
                            judge(&sizes);
                        }
                    }
                }
            }
        }
    }
}

/// The rows of `plan` by name; those that say the same thing twice would be lost here, and none may.
fn rows(plan: &Plan) -> HashMap<&'static str, String> {
    let rows = plan.explain().rows();
    let count = rows.len();
    let rows: HashMap<_, _> = rows.into_iter().collect();
    assert_eq!(rows.len(), count, "a row of each name");
    rows
}

#[test]
fn on_the_host_each_row_is_what_the_launch_plan_holds() {
    let seen = std::cell::RefCell::new(BTreeSet::new());
    let arches: &[Arch] = if cfg!(target_arch = "x86_64") {
        &[Arch::Scalar, Arch::Avx2, Arch::Avx512, Arch::Avx512Bf16, Arch::Amx]
    } else if cfg!(target_arch = "aarch64") {
        &[Arch::Scalar, Arch::Neon, Arch::NeonBf16]
    } else {
        &[Arch::Scalar]
    };
    for &arch in arches {
        grid(Device::Cpu, 0, |request| {
            let plan = rapt::select(&request.spec(), &rapt::Caps { arch, threads: 3, clock_hz: None }).unwrap();
            let rows = rows(&plan);
            for (name, text) in request.words() {
                assert_eq!(rows[name], text, "{request:?}");
            }
            let variants = plan.launch_plan::<CpuLaunch>().unwrap().variants();
            let dtype = request.dtype;
            let Some(main) = variants.first() else {
                assert!(request.q_len == 0 || request.kv_len == 0, "{request:?}");
                assert_eq!(rows["kernel"], format!("empty {dtype} on {}", plan.key().arch.name()));
                assert_eq!(rows["tiles"], request.tiles(0, 0, None, 0));
                return;
            };
            let work = plan.work().unwrap();
            let (kernel, why, block_m, block_n) = match main.step {
                CpuStep::Decode => {
                    let why =
                        format!("{} queries share each kv head", request.q_heads / request.kv_heads * request.q_len);
                    ("decode", why, work.rows, work.keys_per_item)
                }
                _ => ("forward", "many queries: they fill the lanes".to_owned(), plan.block_m(), plan.block_n()),
            };
            seen.borrow_mut().insert((kernel, variants.len()));
            assert_eq!(rows["kernel"], format!("{kernel} {} on {}", main.storage, main.arch.name()), "{request:?}");
            // Numbers in parts go into tiles where there are many queries; float64 has none.
            let may_be_tiled = matches!(dtype, DType::F32 | DType::F16) && kernel == "forward" && request.q_len >= 64;
            assert!(
                main.arch == arch || (arch == Arch::Amx && dtype != DType::BF16 && main.arch == Arch::Avx512),
                "{request:?}"
            );
            let is_in_parts = main.arch == Arch::Amx && dtype != DType::BF16;
            assert!(!is_in_parts || may_be_tiled, "{request:?}");
            assert!(rows["why"].starts_with(&why), "{request:?}: {}", rows["why"]);
            assert_eq!(rows["tiles"], request.tiles(block_m, block_n, Some(work), 0), "{request:?}");
            assert_eq!(
                variants.len() > 1,
                !rows["tiles"].ends_with("split in 1"),
                "parts are put together: {request:?}"
            );
            assert_eq!(rows["threads"], plan.threads().to_string());
            let is_paired = matches!(arch, Arch::Avx512Bf16 | Arch::Amx | Arch::NeonBf16)
                && dtype == DType::BF16
                && main.step == CpuStep::Forward
                || is_in_parts && dtype == DType::F16;
            assert_eq!(rows["p is rounded"].starts_with("nowhere"), !is_paired, "{request:?}");
            let in_place = rows["bytes_packed"].ends_with("are read where they lie)");
            assert_eq!(in_place, plan.cost().bytes_packed == 0, "{request:?}: {}", rows["bytes_packed"]);
        });
    }
    let all = [("decode", 1), ("decode", 2), ("forward", 1)];
    assert_eq!(seen.into_inner().into_iter().collect::<Vec<_>>(), all, "the grid has them all");
}

/// What the row `why` says of this variant.
fn why(request: &Request, variant: &KernelVariant, work: Work) -> Vec<String> {
    let loads = match variant.loads {
        Loads::Tma | Loads::TmaButMask => "K and V by TMA",
        Loads::By16Bytes => "K and V by loads of 16 bytes",
        Loads::ByElement => "K and V element by element",
    };
    let mut parts = match variant.algorithm {
        Algorithm::Generic
        | Algorithm::Combine
        | Algorithm::Append
        | Algorithm::Varlen
        | Algorithm::Deviation
        | Algorithm::DeviationEnd
        | Algorithm::Backward(_)
        | Algorithm::BackwardMma(_)
        | Algorithm::BackwardHalves(_)
        | Algorithm::BackwardHopper => {
            return vec!["it serves every request".to_owned()];
        }
        Algorithm::Decode | Algorithm::Latent | Algorithm::DecodeCodes => vec![
            format!("{} queries share each head of K and V", request.q_heads / request.kv_heads * request.q_len),
            format!(" {} chunks of keys", request.kv_len.div_ceil(work.keys_per_item)),
        ],
        Algorithm::Hopper => vec!["many queries: both products on the tensor cores by wgmma".to_owned()],
        Algorithm::HopperF32 => vec!["each float32 as two float16".to_owned()],
        Algorithm::Mma => vec!["many queries: both products on the tensor cores;".to_owned()],
        Algorithm::Int8 => vec!["both products of integers on the tensor cores".to_owned()],
        Algorithm::Wide if request.dtype == DType::F32 => vec!["each float32 as two of TF32".to_owned()],
        Algorithm::Wide => vec!["many queries of wide heads: both products on the tensor cores;".to_owned()],
    };
    parts.push(loads.to_owned());
    if work.rows.div_ceil(work.rows_per_item) > work.rows.div_ceil(variant.block_m as usize) {
        parts.push(format!("pieces of {} queries", work.rows_per_item));
    }
    parts
}

fn judge_on_gpu(request: &Request, arch: Arch) -> Option<(Algorithm, Loads)> {
    let caps =
        rapt_cuda::Caps { arch, multiprocessors: 132, shared_bytes: 227 * 1024, clock_hz: None, bandwidth: None };
    let plan = rapt_cuda::select(&request.spec(), &caps).unwrap();
    let (rows, launch_plan) = (rows(&plan), plan.launch_plan::<CudaLaunch>().unwrap());
    for (name, text) in request.words() {
        assert_eq!(rows[name], text, "{request:?}");
    }
    let Some(variant) = launch_plan.variant() else {
        assert_eq!(request.q_len, 0, "{request:?}");
        assert_eq!(rows["kernel"], format!("empty {} on {}", request.dtype, arch.name()));
        assert!(!rows.contains_key("launch"), "{request:?}");
        return None;
    };
    let kernel = match variant.algorithm {
        Algorithm::Mma | Algorithm::Hopper | Algorithm::HopperF32 | Algorithm::Wide => "forward",
        Algorithm::Decode | Algorithm::Latent | Algorithm::DecodeCodes => "decode",
        Algorithm::Int8 => "forward_int8",
        Algorithm::Generic
        | Algorithm::Combine
        | Algorithm::Append
        | Algorithm::Varlen
        | Algorithm::Deviation
        | Algorithm::DeviationEnd => "generic",
        Algorithm::Backward(_)
        | Algorithm::BackwardMma(_)
        | Algorithm::BackwardHalves(_)
        | Algorithm::BackwardHopper => "backward",
    };
    assert_eq!(rows["kernel"], format!("{kernel} {} on {}", variant.storage, variant.arch.name()), "{request:?}");
    assert_eq!((variant.storage, variant.mask), (request.dtype, request.mask), "{request:?}");
    let (block_m, block_n) = (variant.block_m as usize, variant.block_n as usize);
    assert_eq!(rows["tiles"], request.tiles(block_m, block_n, plan.work(), plan.items()), "{request:?}");
    if let Some(work) = plan.work() {
        for part in why(request, variant, work) {
            assert!(rows["why"].contains(&part), "{request:?}: no {part:?} in {:?}", rows["why"]);
        }
        let pieces = why(request, variant, work).last().is_some_and(|part| part.starts_with("pieces"));
        assert_eq!(rows["why"].contains("pieces of"), pieces, "{request:?}: {}", rows["why"]);
    }
    let is_generic = variant.algorithm == Algorithm::Generic;
    assert_eq!(rows.contains_key("why not faster"), is_generic, "{request:?}");
    let is_rounded = !is_generic && matches!(request.dtype, DType::F16 | DType::BF16);
    assert_eq!(rows["p is rounded"].starts_with("nowhere"), !is_rounded, "{request:?}");
    assert_eq!(launch_plan.combine().is_some(), rows["workspace_bytes"] != "0", "{request:?}");
    let launch = plan.launch().unwrap();
    assert!(rows["launch"].starts_with(&format!("{} blocks of {} threads", launch.blocks, launch.block_threads)));
    assert!(!rows.contains_key("registers"), "nothing was compiled");
    Some((variant.algorithm, variant.loads))
}

#[test]
fn on_a_gpu_each_row_is_what_the_launch_plan_holds() {
    let seen = std::cell::RefCell::new(Vec::new());
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm120] {
        for offset in [0, 8] {
            grid(Device::Cuda(0), offset, |request| {
                let found = judge_on_gpu(request, arch);
                if let Some(found) = found.filter(|found| !seen.borrow().contains(found)) {
                    seen.borrow_mut().push(found);
                }
            });
        }
    }
    for (algorithm, loads) in [
        (Algorithm::Generic, Loads::ByElement),
        (Algorithm::Mma, Loads::By16Bytes),
        (Algorithm::Mma, Loads::ByElement),
        (Algorithm::Hopper, Loads::Tma),
        (Algorithm::Hopper, Loads::ByElement),
        (Algorithm::HopperF32, Loads::By16Bytes),
        (Algorithm::HopperF32, Loads::ByElement),
        (Algorithm::Decode, Loads::By16Bytes),
        (Algorithm::Decode, Loads::ByElement),
    ] {
        assert!(seen.borrow().contains(&(algorithm, loads)), "the grid lacks {algorithm:?} with {loads:?}");
    }
}
