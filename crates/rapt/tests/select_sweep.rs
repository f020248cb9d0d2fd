//! `select` over a grid of requests and instruction sets, without a device: total, deterministic, bounded; and what
//! `explain` says of typical requests, word for word.
//!
//! The views lie on no memory: a spec asks for shapes and strides, never for elements. The texts lie in `snapshots/`;
//! `RAPT_UPDATE_SNAPSHOTS=1` writes them anew.
#![allow(missing_docs)]

use std::collections::BTreeSet;
use std::path::PathBuf;

use rapt::quant::{Form, Scheme};
use rapt::{
    Arch, Caps, Causal, CodesForm, Compute, DType, Device, Error, Extent, Format, Granularity, Kernel, MaskClass,
    Options, Plan, Qkv, ScaleLayout, Shape, Spec, Strides, TensorLayout, View, Window, select,
};

const ARCHES: [Arch; 6] = [Arch::Scalar, Arch::Avx2, Arch::Avx512, Arch::Avx512Vnni, Arch::Avx512Bf16, Arch::Amx];
const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
/// Most bytes of packed K and V per thread, whatever the length, for head_dim up to 4096.
const PANEL_CAP: usize = 2 << 20;
/// Rows of every explanation.
const ROWS: [&str; 16] = [
    "kernel",
    "why",
    "problem",
    "positions",
    "mask",
    "accumulation",
    "p is rounded",
    "tiles",
    "threads",
    "flops",
    "bytes read",
    "bytes written",
    "floor",
    "bytes_copied",
    "bytes_packed",
    "workspace_bytes",
];

fn caps(arch: Arch, threads: usize) -> Caps {
    Caps { arch, threads, clock_hz: None }
}

/// The instruction sets of the sweep that this build has kernels for.
fn built() -> impl Iterator<Item = Arch> {
    ARCHES.into_iter().filter(|&arch| arch == Arch::Scalar || cfg!(target_arch = "x86_64"))
}

#[derive(Clone, Copy, Debug)]
struct Request {
    dtype: DType,
    batch: usize,
    kv_heads: usize,
    group: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    head_dim_v: usize,
    mask: Option<DType>,
    options: Options,
    walk: Walk,
    /// Those of q, k and v that are codes.
    codes: Qkv<Option<Scheme>>,
}

/// How q, k and v lie.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Walk {
    RowMajor,
    /// The last two dimensions turned round in memory: inner stride ≠ 1.
    Turned,
    Negative,
}

impl Request {
    fn plain(dtype: DType, [batch, heads, q_len, kv_len, head_dim]: [usize; 5]) -> Self {
        Request {
            dtype,
            batch,
            kv_heads: heads,
            group: 1,
            q_len,
            kv_len,
            head_dim,
            head_dim_v: head_dim,
            mask: None,
            options: Options::default(),
            walk: Walk::RowMajor,
            codes: Qkv::default(),
        }
    }

    fn spec(&self) -> Spec {
        let of = |heads, len, dim| match self.options.layout {
            TensorLayout::Bhsd => Shape::from([self.batch, heads, len, dim]),
            TensorLayout::Bshd => Shape::from([self.batch, len, heads, dim]),
        };
        let heads = self.kv_heads * self.group;
        let operand = |tensor, scheme, shape| self.operand(tensor, scheme, shape);
        let (q, q_codes) = operand("q", self.codes.q, of(heads, self.q_len, self.head_dim));
        let (k, k_codes) = operand("k", self.codes.k, of(self.kv_heads, self.kv_len, self.head_dim));
        let (v, v_codes) = operand("v", self.codes.v, of(self.kv_heads, self.kv_len, self.head_dim_v));
        let codes = Qkv { q: q_codes, k: k_codes, v: v_codes };
        let mask_shape = Shape::from([self.batch, heads, self.q_len, self.kv_len]);
        let mask = self.mask.map(|dtype| unread("mask", dtype, mask_shape, Walk::RowMajor));
        let mut builder = Spec::builder(&q, &k, &v, &self.options);
        builder.codes(codes).mask(mask.as_ref()).return_lse(true).build().unwrap()
    }

    /// A tensor of numbers, or of codes with what makes numbers of them.
    fn operand(
        &self,
        tensor: &'static str,
        scheme: Option<Scheme>,
        shape: Shape,
    ) -> (View<'static>, Option<CodesForm>) {
        let Some(scheme) = scheme else { return (unread(tensor, self.dtype, shape, self.walk), None) };
        let (form, format) = (Form::new(scheme, shape).unwrap(), scheme.format());
        let part = |tensor, dtype| unread(tensor, dtype, *form.scale_shape(), Walk::RowMajor);
        let codes = CodesForm {
            zero_point: format.has_zero_point().then(|| (&part("zero_point", DType::U8)).into()),
            has_global_scale: format.has_global_scale(),
            granularity: Some(scheme.granularity()),
            head_dim: shape.last().copied(),
            ..CodesForm::new(format, &part("descale", format.scale_dtype()))
        };
        (unread(tensor, format.code_dtype(), *form.codes_shape(), self.walk), Some(codes))
    }
}

fn unread(tensor: &'static str, dtype: DType, shape: Shape, walk: Walk) -> View<'static> {
    let mut strides: Vec<isize> = shape.contiguous().unwrap().to_vec();
    let last = strides.len().saturating_sub(1);
    match walk {
        Walk::RowMajor => {}
        Walk::Turned => (strides[last - 1], strides[last]) = (1, shape[last - 1].max(1) as isize),
        Walk::Negative => strides.iter_mut().for_each(|stride| *stride = -*stride),
    }
    let address = std::ptr::without_provenance(1 << 50);
    let strides = Strides::new(&strides).unwrap();
    // SAFETY: never read: only a spec is built from it.
    unsafe { View::from_raw_parts(tensor, address, dtype, shape, strides, Device::Cpu, Extent::Declared) }.unwrap()
}

/// Every combination of the axes, each axis thinned to what changes a choice.
fn grid() -> Vec<Request> {
    let lengths = [(1, 1), (1, 4096), (3, 700), (8, 64), (77, 77), (1024, 1024), (300, 0), (0, 5), (4096, 131_072)];
    let heads = [(1, 1), (2, 4), (3, 1), (1, 12)];
    let dims = [(1, 1), (64, 64), (40, 72), (128, 128), (257, 3), (4096, 4096)];
    let positions = [
        (None, None, None),
        (Some(Causal::TopLeft), None, None),
        (Some(Causal::BottomRight), Some(16), Some(0)),
        (None, None, Some(3)),
    ];
    // Masks run along with how the values lie, so that the grid stays small.
    let layouts = [
        (TensorLayout::Bhsd, Walk::RowMajor, false, false),
        (TensorLayout::Bshd, Walk::RowMajor, true, false),
        (TensorLayout::Bhsd, Walk::Turned, false, true),
        (TensorLayout::Bhsd, Walk::Negative, false, false),
    ];
    let mut all = Vec::new();
    for dtype in DTYPES {
        for (q_len, kv_len) in lengths {
            for (kv_heads, group) in heads {
                for (head_dim, head_dim_v) in dims {
                    for (causal, left, right) in positions {
                        for (layout, walk, boolean, additive) in layouts {
                            let window = Window { left, right };
                            let options = Options { causal, window, layout, ..Options::default() };
                            let plain = Request::plain(dtype, [2, kv_heads, q_len, kv_len, head_dim]);
                            let mask = boolean.then_some(DType::Bool).or(additive.then_some(dtype));
                            all.push(Request { group, head_dim_v, mask, options, walk, ..plain });
                        }
                    }
                }
            }
        }
    }
    all.extend(quantized());
    all.extend(int8());
    all
}

fn scheme(format: Format, granularity: Option<Granularity>) -> Option<Scheme> {
    Some(Scheme::new(format, granularity, ScaleLayout::Plain).unwrap())
}

/// Every format as k and v, in turn with each granularity; and codes as q.
fn quantized() -> impl Iterator<Item = Request> {
    use Granularity::{Block, Channel, Head, Tensor, Token};
    let own = [Tensor, Head, Token, Channel, Block(16)];
    let formats = Format::ALL.into_iter().enumerate();
    let schemes = formats.map(move |(n, format)| {
        let granularity = |n: usize| format.own_block_size().is_none().then(|| own[n % own.len()]);
        [scheme(format, granularity(n)), scheme(format, granularity(n + 1))]
    });
    schemes.flat_map(|[k, v]| {
        let lengths = [(1, 4096), (8, 64), (300, 700), (77, 0)];
        lengths.into_iter().enumerate().map(move |(n, (q_len, kv_len))| {
            let dtype = [DType::F32, DType::F16, DType::BF16][n % 3];
            let is_q = n == 2;
            Request {
                group: 1 + n % 2,
                head_dim_v: 40,
                walk: [Walk::RowMajor, Walk::Negative][n % 2],
                codes: Qkv { q: if is_q { k } else { None }, k: if n == 1 { None } else { k }, v },
                options: Options { out_dtype: is_q.then_some(dtype), ..Options::default() },
                ..Request::plain(dtype, [2, 3, q_len, kv_len, 64])
            }
        })
    })
}

/// Products of int8, with each granularity that they are served with.
fn int8() -> impl Iterator<Item = Request> {
    use Granularity::{Channel, Head, Tensor, Token};
    let sizes = [(1, 4096, 64), (8, 64, 40), (77, 0, 128), (300, 700, 257), (4096, 131_072, 128), (90, 90, 4096)];
    let granularities = [(Token, Channel), (Head, Head), (Tensor, Channel)];
    sizes.into_iter().enumerate().flat_map(move |(n, (q_len, kv_len, head_dim))| {
        granularities.into_iter().map(move |(k, v)| Request {
            group: 1 + n % 3,
            walk: [Walk::RowMajor, Walk::Turned, Walk::Negative][n % 3],
            mask: (n % 2 == 1).then_some([DType::Bool, DType::F32][n / 2 % 2]),
            codes: Qkv { q: None, k: scheme(Format::Int8, Some(k)), v: scheme(Format::Int8, Some(v)) },
            options: Options { compute: Compute::Int8, ..Options::default() },
            ..Request::plain([DType::F32, DType::F16, DType::BF16][n % 3], [2, 3, q_len, kv_len, head_dim])
        })
    })
}

/// What must hold of every plan.
fn check(request: &Request, plan: &Plan, arch: Arch, threads: usize) {
    let size = request.dtype.accumulation().size_bytes();
    assert_eq!(plan.cost().bytes_copied, 0, "{request:?}");
    let is_quantized = request.codes != Qkv::default();
    let is_int8 = request.options.compute == Compute::Int8;
    assert_eq!(plan.explain().rows().iter().any(|(row, text)| *row == "compute" && text.contains("int8")), is_int8);
    assert!(!is_int8 || matches!(plan.key().kernel, Kernel::ForwardInt8 | Kernel::Empty), "{request:?}");
    // Numbers of codes are float32: no kernel rounds them to pairs of bf16. Codes may be pairs as they are, beside queries of bf16.
    let may_pair = arch == Arch::Avx512Bf16 && request.dtype == DType::BF16 && request.codes.q.is_none();
    // Beside queries of 16 bits decode multiplies codes that are small integers as quads of bytes.
    let may_quad = request.dtype != DType::F32 && request.codes.q.is_none() && plan.key().kernel == Kernel::Decode;
    let arch = match arch {
        Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx
            if is_quantized && !is_int8 && !(may_pair && plan.key().arch == Arch::Avx512Bf16) =>
        {
            if may_quad && plan.key().arch == Arch::Avx512Vnni { Arch::Avx512Vnni } else { Arch::Avx512 }
        }
        Arch::Avx512Vnni if !is_int8 => Arch::Avx512,
        // Tiles of parts are for many queries, and there for q, k and v of one dtype; float64 has none.
        Arch::Amx if !is_int8 && request.dtype != DType::BF16 && plan.key().arch == Arch::Avx512 => Arch::Avx512,
        arch => arch,
    };
    let is_codes_alone = request.codes.named().iter().all(|(_, codes)| codes.is_some());
    let storage = if is_codes_alone { DType::F32 } else { request.dtype };
    assert_eq!((plan.key().arch, plan.key().storage), (arch, storage));
    assert!(plan.threads() >= 1 && plan.threads() <= threads, "{request:?}: {} threads", plan.threads());
    assert!(plan.cost().flops.is_finite() && plan.cost().floor_cycles >= 0.0);
    let mask = match request.mask {
        None => MaskClass::None,
        Some(DType::Bool) => MaskClass::Bool,
        Some(_) => MaskClass::Additive,
    };
    assert_eq!(plan.key().mask, mask);
    let rows = plan.explain().rows();
    let of_codes: Vec<&str> =
        request.codes.named().iter().filter(|(_, codes)| codes.is_some()).map(|(q, _)| *q).collect();
    for tensor in of_codes {
        assert!(rows.iter().any(|(row, _)| row.strip_suffix(" codes") == Some(tensor)), "{tensor}: {rows:?}");
    }
    for name in ROWS {
        assert!(rows.iter().any(|(row, text)| *row == name && !text.is_empty()), "{name} is missing: {rows:?}");
    }
    let is_empty = request.kv_len == 0 || request.q_len == 0;
    assert_eq!(plan.key().kernel == Kernel::Empty, is_empty, "{request:?}");
    if is_empty {
        assert_eq!(plan.workspace_bytes(), 0);
        return;
    }
    assert!(plan.block_m() >= 1 && plan.block_n() >= 1 && plan.items() >= 1 && plan.num_splits() >= 1);
    let panel = plan.cost().bytes_packed.div_ceil(plan.threads());
    assert!(panel <= PANEL_CAP, "{request:?} on {arch:?}: {panel} bytes of panels per thread");
    // Decode keeps one partial row per chunk of keys; everything else is scratch per thread, whatever the lengths.
    let partials = if plan.key().kernel == Kernel::Decode {
        let rows = request.batch * request.kv_heads * request.group * request.q_len;
        rows * plan.num_splits() * (request.head_dim_v + 17) * size
    } else {
        0
    };
    let scratch = plan.workspace_bytes().saturating_sub(partials).div_ceil(plan.threads());
    assert!(scratch <= 4 << 20, "{request:?} on {arch:?}: {scratch} bytes of scratch per thread");
}

/// What the bits of a row depend on, besides its own values.
fn cut_of_keys(plan: &Plan) -> (Kernel, usize, usize) {
    (plan.key().kernel, plan.block_n(), plan.num_splits())
}

#[test]
fn select_is_total_deterministic_and_bounded() {
    let mut kernels = BTreeSet::new();
    for request in grid() {
        let spec = request.spec();
        for arch in built() {
            let alone = select(&spec, &caps(arch, 1)).unwrap();
            assert_eq!(alone, select(&spec, &caps(arch, 1)).unwrap(), "{request:?}: the same twice");
            check(&request, &alone, arch, 1);
            kernels.insert(alone.key().kernel.name());
            for threads in [7, 64] {
                let plan = select(&spec, &caps(arch, threads)).unwrap();
                check(&request, &plan, arch, threads);
                assert_eq!(cut_of_keys(&plan), cut_of_keys(&alone), "{request:?}: depends on {threads} threads");
            }
        }
    }
    assert_eq!(kernels.into_iter().collect::<Vec<_>>(), ["decode", "empty", "forward", "forward_int8"]);
}

#[test]
fn the_cut_of_the_keys_forgets_batch_heads_and_how_the_values_lie() {
    for arch in built() {
        for dtype in DTYPES {
            for (q_len, kv_len) in [(1, 4096), (77, 77), (1024, 3000)] {
                let one = Request::plain(dtype, [1, 1, q_len, kv_len, 64]);
                let cut = |request: &Request| cut_of_keys(&select(&request.spec(), &caps(arch, 8)).unwrap());
                let bshd = Options { layout: TensorLayout::Bshd, ..one.options };
                for other in [
                    Request { batch: 9, kv_heads: 5, ..one },
                    Request { walk: Walk::Turned, ..one },
                    Request { walk: Walk::Negative, ..one },
                    Request { options: bshd, ..one },
                ] {
                    assert_eq!(cut(&other), cut(&one), "{other:?} on {arch:?}");
                }
            }
        }
    }
}

#[test]
fn sizes_that_no_memory_holds_are_planned_without_wrapping_or_refused() {
    let sizes = [
        [1, 1, 1, 1 << 61, 64],
        [8, 8, 8, 1 << 61, 1],
        [1 << 20, 64, 1, 1 << 55, 8],
        [1, 1, 16, 16, 1 << 60],
        [1, 1, 1, 16, 1 << 31],
        [0, 1, 1 << 61, 1 << 61, 1],
        [1, 0, 1 << 61, 1 << 61, 1],
        [1 << 31, 1 << 31, 1 << 31, 1 << 31, 1 << 31],
    ];
    let mut planned = 0;
    for [batch, heads, q_len, kv_len, head_dim] in sizes {
        for causal in [None, Some(Causal::TopLeft), Some(Causal::BottomRight)] {
            let element = [0f32];
            let view = |tensor, len| {
                let shape = [batch, heads, len, head_dim].into();
                View::strided(tensor, &element, 0, shape, [0; 4].into()).unwrap()
            };
            let options = Options { causal, ..Options::default() };
            let (q, k, v) = (view("q", q_len), view("k", kv_len), view("v", kv_len));
            let Ok(spec) = Spec::builder(&q, &k, &v, &options).build() else { continue };
            for (arch, threads) in built().flat_map(|arch| [(arch, 1), (arch, 64)]) {
                let Ok(plan) = select(&spec, &caps(arch, threads)) else { continue };
                planned += 1;
                // Every item of decode has a partial row: fewer bytes than items is a product that wrapped.
                let wrapped = plan.key().kernel == Kernel::Decode && plan.workspace_bytes() < plan.items();
                assert!(!wrapped, "{:?} {causal:?} on {arch:?}: {} bytes", q.shape(), plan.workspace_bytes());
            }
        }
    }
    assert!(planned > 0, "some of these are plans");
}

#[test]
fn absurd_machines_are_planned_for_without_wrapping() {
    // Met by fuzzing: four times the threads overflowed, and a clock of 0 Hz gave a floor of NaN.
    for shape in [[1, 2, 4096, 4096, 64], [1, 2, 1, 1 << 20, 64], [1, 1, 0, 16, 8]] {
        let spec = Request::plain(DType::F32, shape).spec();
        for (arch, threads) in built().flat_map(|arch| [(arch, usize::MAX), (arch, usize::MAX / 4 + 1)]) {
            let plan = select(&spec, &Caps { clock_hz: Some(0.0), ..caps(arch, threads) }).unwrap();
            assert_eq!(plan.cost().floor_seconds, None);
            assert!(
                plan.key().kernel == Kernel::Empty || plan.workspace_bytes() > 1 << 62,
                "{}",
                plan.workspace_bytes()
            );
        }
    }
}

#[test]
fn few_rows_per_key_head_are_decoded() {
    let cases = [(1, 1, "decode"), (8, 1, "decode"), (9, 1, "forward"), (2, 4, "decode"), (1, 9, "forward")];
    for (group, q_len, expect) in cases {
        let request = Request { group, ..Request::plain(DType::F32, [1, 2, q_len, 2048, 64]) };
        let plan = select(&request.spec(), &caps(Arch::Scalar, 4)).unwrap();
        assert_eq!(plan.key().kernel.name(), expect, "group {group}, q_len {q_len}");
    }
}

#[test]
fn what_a_build_lacks_is_refused_with_what_to_do_instead() {
    let spec = Request::plain(DType::F32, [1, 1, 16, 16, 64]).spec();
    let missing = if cfg!(target_arch = "x86_64") { Arch::Neon } else { Arch::Avx512 };
    match select(&spec, &caps(missing, 1)).unwrap_err() {
        Error::Unsupported { what, instead, .. } => {
            assert!(what.contains(missing.name()) && instead.contains("RAPT_ISA"), "{what} {instead}");
        }
        other => panic!("{other}"),
    }
}

/// Compares `text` with the file of this name.
fn snapshot(name: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(format!("{name}.txt"));
    if std::env::var("RAPT_UPDATE_SNAPSHOTS").as_deref() == Ok("1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let held = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(held, text, "{} differs; RAPT_UPDATE_SNAPSHOTS=1 writes it anew", path.display());
}

#[test]
#[cfg(target_arch = "x86_64")]
fn explain_says_word_for_word() {
    let causal = Options::default().with_causal(Causal::TopLeft);
    let windowed = causal.with_window(Some(255), None).with_softcap(30.0);
    let padded = Request::plain(DType::F32, [8, 12, 77, 77, 32]);
    let token = Request::plain(DType::BF16, [1, 8, 1, 8192, 128]);
    let prefill = Request::plain(DType::F16, [1, 24, 1024, 1024, 128]);
    let double = Request::plain(DType::F64, [2, 3, 33, 50, 24]);
    let pairs = Request::plain(DType::BF16, [1, 24, 1024, 1024, 128]);
    let kv = |format, granularity| {
        let scheme = scheme(format, granularity);
        Qkv { q: None, k: scheme, v: scheme }
    };
    let for_int8 = Qkv {
        q: None,
        k: scheme(Format::Int8, Some(Granularity::Token)),
        v: scheme(Format::Int8, Some(Granularity::Channel)),
    };
    let all_codes = Qkv {
        q: scheme(Format::E4m3fn, Some(Granularity::Head)),
        k: scheme(Format::Uint8, Some(Granularity::Channel)),
        v: scheme(Format::Int4, Some(Granularity::Block(12))),
    };
    let as_half = Options { out_dtype: Some(DType::F16), ..Options::default() };
    let typical = [
        ("encoder_padding_mask", Arch::Avx2, Request { mask: Some(DType::Bool), ..padded }),
        ("decode_grouped", Arch::Avx2, Request { group: 4, ..token }),
        ("prefill_causal_window", Arch::Avx2, Request { options: windowed, ..prefill }),
        ("turned_double", Arch::Avx2, Request { walk: Walk::Turned, head_dim_v: 40, ..double }),
        ("bfloat16_pairs", Arch::Avx512Bf16, pairs),
        (
            "decode_int8_token",
            Arch::Avx2,
            Request { group: 4, codes: kv(Format::Int8, Some(Granularity::Token)), ..token },
        ),
        ("prefill_nvfp4", Arch::Avx512, Request { codes: kv(Format::Nvfp4, None), ..prefill }),
        (
            "prefill_int8",
            Arch::Avx512Bf16,
            Request { codes: for_int8, options: causal.with_compute(Compute::Int8), ..pairs },
        ),
        ("codes_alone", Arch::Avx2, Request { codes: all_codes, options: as_half, ..padded }),
    ];
    for (name, arch, request) in typical {
        let caps = Caps { arch, threads: 4, clock_hz: Some(3.0e9) };
        let plan = select(&request.spec(), &caps).unwrap();
        snapshot(name, &plan.explain().to_string());
    }
}
