//! Specs of CUDA tensors without memory behind them: everything up to a launch needs no device.

#![allow(dead_code, reason = "each test file uses a part")]

use rapt_core::{
    Arch, BackwardSpec, CodesForm, Compute, DType, Device, Extent, Format, GradientForms, Granularity, Options, Qkv,
    ScaleLayout, Shape, Spec, TensorLayout, View, swizzle,
};
use rapt_cuda::Caps;

/// The capabilities of a device of this architecture; of `sm_80` the multiprocessor count and memory of an A100, and so on.
pub(crate) fn caps(arch: Arch) -> Caps {
    let (multiprocessors, shared_bytes) = match arch {
        Arch::Sm80 => (108, 163 * 1024),
        Arch::Sm90a => (132, 227 * 1024),
        _ => (128, 99 * 1024),
    };
    Caps { arch, multiprocessors, shared_bytes, clock_hz: Some(1.7e9), bandwidth: Some(3e12) }
}

/// A row-major tensor that is never read.
pub(crate) fn view(name: &'static str, dtype: DType, shape: &[usize]) -> View<'static> {
    let shape = Shape::new(shape).unwrap();
    let address = std::ptr::without_provenance(1 << 20);
    let strides = shape.contiguous().unwrap();
    // SAFETY: nobody reads it.
    unsafe { View::from_raw_parts(name, address, dtype, shape, strides, Device::Cuda(0), Extent::Declared) }.unwrap()
}

/// `[1, heads, q_len, head_dim]` over `[1, heads, kv_len, head_dim]`, with a `[1, 1, 1, kv_len]` mask of this dtype.
pub(crate) fn spec(
    dtype: DType,
    [heads, q_len, kv_len, head_dim]: [usize; 4],
    mask: Option<DType>,
    options: &Options,
) -> Spec {
    spec_of_dims(dtype, [heads, q_len, kv_len], [head_dim, head_dim], mask, options)
}

/// All gradients of [`spec`] with sinks, that of an additive mask too.
pub(crate) fn backward_spec(
    dtype: DType,
    [heads, q_len, kv_len, head_dim]: [usize; 4],
    mask: Option<DType>,
    options: &Options,
) -> BackwardSpec {
    backward_spec_of_dims(dtype, [heads, q_len, kv_len], [head_dim; 2], mask, options)
}

/// As [`backward_spec`], with values of another head dim.
pub(crate) fn backward_spec_of_dims(
    dtype: DType,
    [heads, q_len, kv_len]: [usize; 3],
    [head_dim, head_dim_v]: [usize; 2],
    mask: Option<DType>,
    options: &Options,
) -> BackwardSpec {
    let [q, k, v] = qkv(dtype, [heads, q_len, kv_len], [head_dim, head_dim_v]);
    let d_o = view("d_o", dtype, &[1, heads, q_len, head_dim_v]);
    let mask = mask.map(|dtype| view("mask", dtype, &[1, 1, 1, kv_len]));
    let sinks = view("sinks", DType::F32, &[heads]);
    let mut builder = Spec::builder(&q, &k, &v, options);
    let forward = builder.mask(mask.as_ref()).sinks(Some(&sinks)).return_lse(true).build().unwrap();
    let forms = GradientForms {
        dq: Some((&q).into()),
        dk: Some((&k).into()),
        dv: Some((&v).into()),
        d_mask: mask.as_ref().filter(|mask| mask.dtype() != DType::Bool).map(Into::into),
        d_sinks: Some((&sinks).into()),
        ..GradientForms::new(&d_o)
    };
    BackwardSpec::new(forward, &forms).unwrap()
}

/// Gradients of [`spec_of_varlen`], of numbers.
pub(crate) fn backward_spec_of_varlen(
    dtype: DType,
    [heads, kv_heads, total_q, total_kv]: [usize; 4],
    head_dim: usize,
    options: &Options,
) -> BackwardSpec {
    let (q, k) = (view("q", dtype, &[total_q, heads, head_dim]), view("k", dtype, &[total_kv, kv_heads, head_dim]));
    let offsets = view("cu_seqlens", DType::I32, &[6]);
    let options = Options { layout: TensorLayout::Bshd, ..*options };
    let mut builder = Spec::builder(&q, &k, &k, &options);
    let forward = builder.varlen(&offsets, &offsets).return_lse(true).build().unwrap();
    let [dq, dk] = [&q, &k].map(|view| Some(view.into()));
    BackwardSpec::new(forward, &GradientForms { dq, dk, dv: dk, ..GradientForms::new(&q) }).unwrap()
}

/// As [`spec`], with values of another head dim.
pub(crate) fn spec_of_dims(
    dtype: DType,
    [heads, q_len, kv_len]: [usize; 3],
    [head_dim, head_dim_v]: [usize; 2],
    mask: Option<DType>,
    options: &Options,
) -> Spec {
    let [q, k, v] = qkv(dtype, [heads, q_len, kv_len], [head_dim, head_dim_v]);
    let mask = mask.map(|dtype| view("mask", dtype, &[1, 1, 1, kv_len]));
    Spec::builder(&q, &k, &v, options).mask(mask.as_ref()).build().unwrap()
}

fn qkv(dtype: DType, [heads, q_len, kv_len]: [usize; 3], [head_dim, head_dim_v]: [usize; 2]) -> [View<'static>; 3] {
    [("q", q_len, head_dim), ("k", kv_len, head_dim), ("v", kv_len, head_dim_v)]
        .map(|(name, len, dim)| view(name, dtype, &[1, heads, len, dim]))
}

/// `q_len` queries of each of `heads` heads of `batch` sequences of at most `most` keys, one of them new where `page_size` is given, over one
/// head of keys whose values are narrower: in pages of `page_size` keys, in none where that is 0, or, without it, as one tensor of `most`.
pub(crate) fn spec_of_latent(
    dtype: DType,
    [batch, heads, q_len, most]: [usize; 4],
    [head_dim, head_dim_v]: [usize; 2],
    page_size: Option<usize>,
    options: &Options,
) -> Spec {
    let options = Options { layout: TensorLayout::Bshd, ..*options };
    let q = view("q", dtype, &[batch, q_len, heads, head_dim]);
    let (blocks, rows) = match page_size {
        None | Some(0) => (batch, most),
        Some(page_size) => (1000, page_size),
    };
    let [k, v] = [("k", head_dim), ("v", head_dim_v)].map(|(name, dim)| view(name, dtype, &[blocks, rows, 1, dim]));
    let mut builder = Spec::builder(&q, &k, &v, &options);
    if let Some(page_size @ 1..) = page_size {
        builder.pages(&view("page_table", DType::I32, &[batch, most.div_ceil(page_size)]), most);
    }
    if page_size.is_some() {
        builder.lengths(Some(&view("cache_seqlens", DType::I32, &[batch])), 1);
    }
    builder.build().unwrap()
}

/// `q_len` queries of `dtype` over keys and values of `format`.
pub(crate) fn spec_of_codes(
    dtype: DType,
    [heads, q_len, kv_len, head_dim]: [usize; 4],
    format: Format,
    granularity: Granularity,
    options: &Options,
) -> Spec {
    let q = view("q", dtype, &[1, heads, q_len, head_dim]);
    let codes = |name| view(name, format.code_dtype(), &[1, heads, kv_len, head_dim / format.codes_per_byte()]);
    let size = format.own_block_size().map_or(granularity, Granularity::Block);
    let shape: &[usize] = match size {
        Granularity::Tensor => &[],
        Granularity::Head => &[1, heads],
        Granularity::Token => &[1, heads, kv_len],
        Granularity::Channel => &[1, heads, 1, head_dim],
        Granularity::Block(size) => &[1, heads, kv_len, head_dim / size],
    };
    let form = form_of(format, shape);
    let codes_of = Qkv { q: None, k: Some(form), v: Some(form) };
    Spec::builder(&q, &codes("k"), &codes("v"), options).codes(codes_of).build().unwrap()
}

/// `[1, heads, q_len, head_dim]` over int8 codes of `[1, kv_heads, kv_len, head_dim]`, k by token and v by channel, for products of int8.
pub(crate) fn spec_of_int8(
    dtype: DType,
    [heads, kv_heads, q_len, kv_len]: [usize; 4],
    [head_dim, head_dim_v]: [usize; 2],
    [of_k, of_v]: [Granularity; 2],
    mask: Option<DType>,
    options: &Options,
) -> Spec {
    let q = view("q", dtype, &[1, heads, q_len, head_dim]);
    let codes = |name, dim| view(name, DType::I8, &[1, kv_heads, kv_len, dim]);
    let form = |granularity, dim| {
        let shape: &[usize] = match granularity {
            Granularity::Token => &[1, kv_heads, kv_len],
            Granularity::Channel => &[1, kv_heads, 1, dim],
            Granularity::Head => &[1, kv_heads],
            _ => &[],
        };
        Some(form_of(Format::Int8, shape))
    };
    let codes_of = Qkv { q: None, k: form(of_k, head_dim), v: form(of_v, head_dim_v) };
    let mask = mask.map(|dtype| view("mask", dtype, &[1, 1, 1, kv_len]));
    let options = options.with_compute(Compute::Int8);
    let (k, v) = (codes("k", head_dim), codes("v", head_dim_v));
    Spec::builder(&q, &k, &v, &options).mask(mask.as_ref()).codes(codes_of).build().unwrap()
}

/// The same over codes whose factors lie swizzled.
pub(crate) fn spec_of_swizzled(
    dtype: DType,
    [heads, q_len, kv_len, head_dim]: [usize; 4],
    format: Format,
    options: &Options,
) -> Spec {
    let q = view("q", dtype, &[1, heads, q_len, head_dim]);
    let k = view("k", format.code_dtype(), &[1, heads, kv_len, head_dim / format.codes_per_byte()]);
    let matrix = swizzle::padded_numel(kv_len, head_dim / format.own_block_size().unwrap()).unwrap();
    let scale_layout = ScaleLayout::Swizzle32x4x4;
    let form = CodesForm { scale_layout, ..form_of(format, &[1, heads, matrix]) };
    Spec::builder(&q, &k, &k, options).codes(Qkv { q: None, k: Some(form), v: Some(form) }).build().unwrap()
}

/// `total_q` queries over `total_kv` keys of sequences that lie one after another; `codes`: what keys and values are.
pub(crate) fn spec_of_varlen(
    dtype: DType,
    [heads, kv_heads, total_q, total_kv]: [usize; 4],
    head_dim: usize,
    codes: Option<(Format, Granularity)>,
    options: &Options,
) -> Spec {
    let q = view("q", dtype, &[total_q, heads, head_dim]);
    let (of_keys, width) =
        codes.map_or((dtype, head_dim), |(format, _)| (format.code_dtype(), head_dim / format.codes_per_byte()));
    let k = view("k", of_keys, &[total_kv, kv_heads, width]);
    let form = codes.map(|(format, granularity)| {
        let shape: &[usize] = match format.own_block_size().map_or(granularity, Granularity::Block) {
            Granularity::Tensor => &[],
            Granularity::Head => &[kv_heads],
            Granularity::Token => &[total_kv, kv_heads],
            Granularity::Channel => &[1, kv_heads, head_dim],
            Granularity::Block(size) => &[total_kv, kv_heads, head_dim / size],
        };
        form_of(format, shape)
    });
    let offsets = |name| view(name, DType::I32, &[6]);
    let options = Options { layout: TensorLayout::Bshd, ..*options };
    let (of_q, of_kv) = (offsets("cu_seqlens_q"), offsets("cu_seqlens_kv"));
    let mut builder = Spec::builder(&q, &k, &k, &options);
    builder.varlen(&of_q, &of_kv).codes(Qkv { q: None, k: form, v: form }).build().unwrap()
}

/// What makes numbers of codes of `format`, with factors of this shape.
fn form_of(format: Format, shape: &[usize]) -> CodesForm {
    let mut form = CodesForm::new(format, &view("descale", format.scale_dtype(), shape));
    form.has_global_scale = format.has_global_scale();
    form.zero_point = format.has_zero_point().then(|| (&view("zero_point", DType::U8, shape)).into());
    form
}

/// `q_len` queries of each of `batch` sequences of at most `most` keys, one of them new, over a cache of this dtype or of codes by token: in
/// pages of `page_size` keys, or, where that is 0, without pages.
pub(crate) fn spec_of_cache(
    dtype: DType,
    [batch, heads, kv_heads, q_len, most]: [usize; 5],
    [head_dim, page_size]: [usize; 2],
    format: Option<Format>,
    options: &Options,
) -> Spec {
    let q = view("q", dtype, &[batch, heads, q_len, head_dim]);
    let (blocks, rows) = if page_size == 0 { (batch, most) } else { (1000, page_size) };
    let dtype = format.map_or(dtype, Format::code_dtype);
    let width = format.map_or(head_dim, |format| head_dim / format.codes_per_byte());
    let cache = |name| view(name, dtype, &[blocks, kv_heads, rows, width]);
    let mut builder = Spec::builder(&q, &cache("k"), &cache("v"), options);
    if let Some(format) = format {
        let form = CodesForm::new(format, &view("descale", format.scale_dtype(), &[blocks, kv_heads, rows]));
        builder.codes(Qkv { q: None, k: Some(form), v: Some(form) });
    }
    if page_size > 0 {
        builder.pages(&view("page_table", DType::I32, &[batch, most.div_ceil(page_size)]), most);
    }
    builder.lengths(Some(&view("cache_seqlens", DType::I32, &[batch])), 1).build().unwrap()
}

/// The same for products of int8: bfloat16 queries over int8 codes, of keys by token and of values by tensor.
pub(crate) fn spec_of_int8_cache(
    [batch, heads, kv_heads, q_len, most]: [usize; 5],
    [head_dim, page_size]: [usize; 2],
    options: &Options,
) -> Spec {
    let q = view("q", DType::BF16, &[batch, heads, q_len, head_dim]);
    let (blocks, rows) = if page_size == 0 { (batch, most) } else { (1000, page_size) };
    let cache = |name| view(name, DType::I8, &[blocks, kv_heads, rows, head_dim]);
    let form = |shape: &[usize]| Some(form_of(Format::Int8, shape));
    let options = options.with_compute(Compute::Int8);
    let (k, v) = (cache("k"), cache("v"));
    let mut builder = Spec::builder(&q, &k, &v, &options);
    builder.codes(Qkv { q: None, k: form(&[blocks, kv_heads, rows]), v: form(&[]) });
    if page_size > 0 {
        builder.pages(&view("page_table", DType::I32, &[batch, most.div_ceil(page_size)]), most);
    }
    builder.lengths(Some(&view("cache_seqlens", DType::I32, &[batch])), 1).build().unwrap()
}
