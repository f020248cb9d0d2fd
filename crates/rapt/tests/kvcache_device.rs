//! A cache on a GPU, as far as there need be none: what the host proves before anything is launched.

use rapt::{
    CacheCodes, CacheView, Causal, DType, Device, Engine, Error, ErrorKind, Extent, Format, KvCacheTensors, Options,
    Queue, SerialExecutor, Shape, View, ViewMut,
};

/// No machine has it: a request that is right comes as far as this device.
const DEVICE: Device = Device::Cuda(9999);
const BF16: DType = DType::BF16;

fn read(name: &'static str, place: usize, dtype: DType, shape: &[usize]) -> View<'static> {
    let shape = Shape::new(shape).unwrap();
    let ptr = std::ptr::without_provenance(place << 30);
    // SAFETY: nobody reads it.
    unsafe { View::from_raw_parts(name, ptr, dtype, shape, shape.contiguous().unwrap(), DEVICE, Extent::Declared) }
        .unwrap()
}

fn written(name: &'static str, place: usize, dtype: DType, shape: &[usize]) -> ViewMut<'static> {
    let shape = Shape::new(shape).unwrap();
    let ptr = std::ptr::without_provenance_mut(place << 30);
    // SAFETY: nobody writes it.
    unsafe { ViewMut::from_raw_parts(name, ptr, dtype, shape, shape.contiguous().unwrap(), DEVICE, Extent::Declared) }
        .unwrap()
}

/// One query of each of 3 sequences over pages of 16 keys, 4 of which each may have.
fn paged() -> KvCacheTensors<'static> {
    KvCacheTensors {
        q: read("q", 1, BF16, &[3, 1, 8, 64]),
        k_cache: CacheView::Read(read("k_cache", 2, BF16, &[12, 16, 2, 64])),
        v_cache: CacheView::Read(read("v_cache", 3, BF16, &[12, 16, 2, 64])),
        k_codes: None,
        v_codes: None,
        k: None,
        v: None,
        cache_seqlens: Some(read("cache_seqlens", 4, DType::I32, &[3])),
        page_table: Some(read("page_table", 5, DType::I32, &[3, 4])),
        sinks: None,
        alibi_slopes: None,
        out: written("out", 6, BF16, &[3, 1, 8, 64]),
        lse: None,
    }
}

/// The same in one tensor of 64 keys, with `new` keys to be written.
fn growing(new: usize) -> KvCacheTensors<'static> {
    KvCacheTensors {
        k_cache: CacheView::Write(written("k_cache", 2, BF16, &[3, 64, 2, 64])),
        v_cache: CacheView::Write(written("v_cache", 3, BF16, &[3, 64, 2, 64])),
        k: Some(read("k", 7, BF16, &[3, new, 2, 64])),
        v: Some(read("v", 8, BF16, &[3, new, 2, 64])),
        page_table: None,
        ..paged()
    }
}

fn refusal(tensors: &KvCacheTensors<'_>, options: &Options) -> Error {
    Engine::new(Some(1)).unwrap().plan_with_kvcache(tensors, options).unwrap_err()
}

fn comes_through(tensors: &KvCacheTensors<'_>) {
    let error = refusal(tensors, &Options::default());
    assert!(matches!(error, Error::DeviceUnavailable { device: DEVICE, .. }), "{error}");
}

fn is_refused(tensors: &KvCacheTensors<'_>, kind: ErrorKind, word: &str) {
    let error = refusal(tensors, &Options::default());
    assert!(error.kind() == kind && error.to_string().contains(word), "{kind:?} {word}: {error}");
}

#[test]
fn what_is_right_comes_as_far_as_the_device() {
    comes_through(&paged());
    comes_through(&growing(0));
    comes_through(&growing(1));
    comes_through(&growing(64));
    // None are written, so the cache may be read-only.
    comes_through(&KvCacheTensors {
        page_table: None,
        k_cache: CacheView::Read(read("k_cache", 2, BF16, &[3, 64, 2, 64])),
        ..growing(0)
    });
    let codes = |n| {
        let descale = CacheView::Read(read("descale", n, DType::F32, &[12, 16, 2]));
        let (zero_point, global_scale, granularity, head_dim) = (None, None, None, None);
        Some(CacheCodes { format: Format::Int8, descale, zero_point, global_scale, granularity, head_dim })
    };
    let cache = |name, n| CacheView::Read(read(name, n, DType::I8, &[12, 16, 2, 64]));
    comes_through(&KvCacheTensors {
        k_cache: cache("k_cache", 2),
        v_cache: cache("v_cache", 3),
        k_codes: codes(9),
        v_codes: codes(10),
        ..paged()
    });
}

#[test]
fn lengths_lie_on_the_device_or_are_one_number() {
    static LENGTHS: [[i32; 3]; 4] = [[20; 3], [20, 20, 21], [65; 3], [-1; 3]];
    let host = |lengths: &'static [i32]| View::contiguous("cache_seqlens", lengths, [3].into()).unwrap();
    comes_through(&KvCacheTensors { cache_seqlens: Some(host(&LENGTHS[0])), ..paged() });
    let differing = KvCacheTensors { cache_seqlens: Some(host(&LENGTHS[1])), ..paged() };
    is_refused(&differing, ErrorKind::Device, "cache_seqlens");
    for out_of_range in &LENGTHS[2..] {
        let tensors = KvCacheTensors { cache_seqlens: Some(host(out_of_range)), ..paged() };
        is_refused(&tensors, ErrorKind::Index, "cache_seqlens");
    }
    is_refused(&KvCacheTensors { cache_seqlens: None, ..paged() }, ErrorKind::Option, "cache_seqlens");
    let wide = read("cache_seqlens", 4, DType::I64, &[3]);
    is_refused(&KvCacheTensors { cache_seqlens: Some(wide), ..paged() }, ErrorKind::UnsupportedDtype, "int32");
    let few = read("cache_seqlens", 4, DType::I32, &[2]);
    is_refused(&KvCacheTensors { cache_seqlens: Some(few), ..paged() }, ErrorKind::Shape, "cache_seqlens");
}

#[test]
fn a_page_table_of_the_host_or_of_another_form_is_refused() {
    static TABLE: [i32; 12] = [0; 12];
    let host = View::contiguous("page_table", &TABLE, [3, 4].into()).unwrap();
    is_refused(&KvCacheTensors { page_table: Some(host), ..paged() }, ErrorKind::Device, "page_table");
    let wide = read("page_table", 5, DType::I64, &[3, 4]);
    is_refused(&KvCacheTensors { page_table: Some(wide), ..paged() }, ErrorKind::UnsupportedDtype, "page_table");
    let few = read("page_table", 5, DType::I32, &[2, 4]);
    is_refused(&KvCacheTensors { page_table: Some(few), ..paged() }, ErrorKind::Shape, "page_table");
}

#[test]
fn new_keys_that_do_not_fit_the_cache_are_refused() {
    is_refused(&growing(65), ErrorKind::Shape, "65");
    let other = read("k", 7, DType::F16, &[3, 1, 2, 64]);
    is_refused(&KvCacheTensors { k: Some(other), ..growing(1) }, ErrorKind::DtypeMismatch, "float16");
    let read_only = CacheView::Read(read("k_cache", 2, BF16, &[3, 64, 2, 64]));
    let error = refusal(&KvCacheTensors { k_cache: read_only, ..growing(1) }, &Options::default());
    assert!(matches!(error, Error::ReadOnly { tensor: "k_cache" }), "{error}");
    let inside = read("k", 2, BF16, &[3, 1, 2, 64]);
    let error = refusal(&KvCacheTensors { k: Some(inside), ..growing(1) }, &Options::default());
    assert!(matches!(error, Error::OutputOverlaps { .. }), "{error}");
}

/// The cache of `growing` as codes with factors of this shape, with one new key in this dtype.
fn growing_codes(format: Format, factors: &[usize], new: DType) -> KvCacheTensors<'static> {
    let codes = |name, n| {
        let descale = CacheView::Write(written(name, n, format.scale_dtype(), factors));
        let global_scale = format.has_global_scale().then_some(0.5);
        Some(CacheCodes { format, descale, zero_point: None, global_scale, granularity: None, head_dim: None })
    };
    let width = 64 / format.codes_per_byte();
    let cache = |name, n| CacheView::Write(written(name, n, format.code_dtype(), &[3, 64, 2, width]));
    KvCacheTensors {
        k_cache: cache("k_cache", 2),
        v_cache: cache("v_cache", 3),
        k_codes: codes("k_descale", 9),
        v_codes: codes("v_descale", 10),
        k: Some(read("k", 7, new, &[3, 1, 2, 64])),
        v: Some(read("v", 8, new, &[3, 1, 2, 64])),
        ..growing(1)
    }
}

#[test]
fn new_keys_become_codes_where_a_number_without_a_code_can_be_told() {
    for new in [DType::F64, DType::F32, DType::F16, BF16] {
        comes_through(&growing_codes(Format::Int8, &[3, 64, 2], new));
        comes_through(&growing_codes(Format::Int4, &[3, 64, 2], new));
        comes_through(&growing_codes(Format::Mxfp4, &[3, 64, 2, 2], new));
        comes_through(&growing_codes(Format::Nvfp4, &[3, 64, 2, 4], new));
        comes_through(&growing_codes(Format::E4m3fn, &[], new));
        is_refused(&growing_codes(Format::Int8, &[], new), ErrorKind::Unsupported, "one factor");
        is_refused(&growing_codes(Format::Int4, &[], new), ErrorKind::Unsupported, "one factor");
        is_refused(&growing_codes(Format::Int8, &[3, 2], new), ErrorKind::Unsupported, "factors by head");
    }
    is_refused(&growing_codes(Format::Int8, &[3, 64, 2], DType::I32), ErrorKind::UnsupportedDtype, "int32");
    let mut odd = growing_codes(Format::Nvfp4, &[3, 64, 2, 4], BF16);
    odd.v_codes.as_mut().unwrap().global_scale = Some(f32::NAN);
    is_refused(&odd, ErrorKind::Unsupported, "NaN");
    let mut read_only = growing_codes(Format::Int8, &[3, 64, 2], BF16);
    read_only.k_codes.as_mut().unwrap().descale = CacheView::Read(read("k_descale", 9, DType::F32, &[3, 64, 2]));
    let error = refusal(&read_only, &Options::default());
    assert!(matches!(error, Error::ReadOnly { tensor: "k_descale" }), "{error}");
}

#[test]
fn parts_of_prompts_come_as_far_as_the_device() {
    for q_len in [9, 17, 300] {
        let q = read("q", 1, BF16, &[3, q_len, 8, 64]);
        comes_through(&KvCacheTensors { q, out: written("out", 6, BF16, &[3, q_len, 8, 64]), ..paged() });
    }
}

#[test]
fn new_keys_without_an_output_are_refused_as_nothing_would_write_them() {
    let no_queries = |new| KvCacheTensors {
        q: read("q", 1, BF16, &[3, 0, 8, 64]),
        out: written("out", 6, BF16, &[3, 0, 8, 64]),
        ..growing(new)
    };
    is_refused(&no_queries(1), ErrorKind::Unsupported, "empty output");
    comes_through(&no_queries(0));
}

#[test]
fn positions_count_from_the_last_key() {
    let options = Options::default();
    let top_left = refusal(&paged(), &options.with_causal(Causal::TopLeft));
    assert!(top_left.kind() == ErrorKind::Option, "{top_left}");
    let bottom_right = refusal(&paged(), &options.with_causal(Causal::BottomRight));
    assert!(matches!(bottom_right, Error::DeviceUnavailable { .. }), "{bottom_right}");
}

#[test]
fn threads_of_the_host_do_not_serve_it() {
    let engine = Engine::new(Some(1)).unwrap();
    let refused = engine.attention_with_kvcache(paged(), &Options::default(), &Queue::Host(&SerialExecutor));
    assert!(refused.unwrap_err().to_string().contains("queue"));
}
