//! Sequences one after another on a GPU, as far as there need be none: what the host proves before anything is launched.

use rapt::{
    Causal, Codes, Compute, DType, Device, Engine, Error, ErrorKind, Extent, Format, Options, Qkv, Queue,
    SerialExecutor, Shape, VarlenTensors, View, ViewMut,
};

/// No machine has it: a request that is right comes as far as this device.
const DEVICE: Device = Device::Cuda(9999);
const BF16: DType = DType::BF16;

fn read(name: &'static str, place: usize, dtype: DType, shape: &[usize], device: Device) -> View<'static> {
    let shape = Shape::new(shape).unwrap();
    let ptr = std::ptr::without_provenance(place << 30);
    // SAFETY: nobody reads it.
    unsafe { View::from_raw_parts(name, ptr, dtype, shape, shape.contiguous().unwrap(), device, Extent::Declared) }
        .unwrap()
}

fn written(name: &'static str, place: usize, dtype: DType, shape: &[usize]) -> ViewMut<'static> {
    let shape = Shape::new(shape).unwrap();
    let ptr = std::ptr::without_provenance_mut(place << 30);
    // SAFETY: nobody writes it.
    unsafe { ViewMut::from_raw_parts(name, ptr, dtype, shape, shape.contiguous().unwrap(), DEVICE, Extent::Declared) }
        .unwrap()
}

/// 100 queries and 300 keys of 5 sequences.
fn five() -> VarlenTensors<'static> {
    VarlenTensors {
        q: read("q", 1, BF16, &[100, 8, 64], DEVICE),
        k: read("k", 2, BF16, &[300, 2, 64], DEVICE),
        v: read("v", 3, BF16, &[300, 2, 32], DEVICE),
        cu_seqlens_q: read("cu_seqlens_q", 4, DType::I32, &[6], DEVICE),
        cu_seqlens_kv: read("cu_seqlens_kv", 5, DType::I32, &[6], DEVICE),
        codes: Qkv::default(),
        sinks: None,
        alibi_slopes: None,
        dropout: None,
        out: written("out", 6, BF16, &[100, 8, 32]),
        lse: Some(written("lse", 7, DType::F32, &[8, 100])),
    }
}

/// The same with k and v as int8 codes, and factors of these shapes.
fn coded(k_descale: &[usize], v_descale: &[usize]) -> VarlenTensors<'static> {
    let codes = |name, place, shape: &[usize]| {
        Some(Box::new(Codes::new(Format::Int8, read(name, place, DType::F32, shape, DEVICE))))
    };
    VarlenTensors {
        k: read("k", 2, DType::I8, &[300, 2, 64], DEVICE),
        v: read("v", 3, DType::I8, &[300, 2, 32], DEVICE),
        codes: Qkv { q: None, k: codes("k_descale", 9, k_descale), v: codes("v_descale", 10, v_descale) },
        ..five()
    }
}

fn refusal(tensors: &VarlenTensors<'_>, options: &Options) -> Error {
    Engine::new(Some(1)).unwrap().plan_varlen(tensors, options).unwrap_err()
}

#[test]
fn what_is_right_comes_as_far_as_the_device() {
    let top_left = Options::default().with_causal(Causal::TopLeft);
    for options in [Options::default(), top_left, Options::default().with_causal(Causal::BottomRight)] {
        for tensors in [
            five(),
            VarlenTensors { sinks: Some(read("sinks", 8, DType::F32, &[8], DEVICE)), lse: None, ..five() },
            VarlenTensors { alibi_slopes: Some(read("alibi_slopes", 8, DType::F32, &[8], DEVICE)), ..five() },
            // Factors of keys, of all of a head, of columns and of blocks.
            coded(&[300, 2], &[2]),
            coded(&[1, 2, 64], &[300, 2, 4]),
        ] {
            let error = refusal(&tensors, &options);
            assert!(matches!(error, Error::DeviceUnavailable { device: DEVICE, .. }), "{error}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let i32s = |name, place, shape: &[usize], device| read(name, place, DType::I32, shape, device);
    for (tensors, kind, word) in [
        (VarlenTensors { q: read("q", 1, BF16, &[1, 100, 8, 64], DEVICE), ..five() }, ErrorKind::Shape, "q has"),
        (VarlenTensors { v: read("v", 3, BF16, &[299, 2, 32], DEVICE), ..five() }, ErrorKind::Shape, "total_kv"),
        (
            VarlenTensors { k: read("k", 2, DType::F16, &[300, 2, 64], DEVICE), ..five() },
            ErrorKind::DtypeMismatch,
            "float16",
        ),
        (VarlenTensors { out: written("out", 6, BF16, &[100, 8, 64]), ..five() }, ErrorKind::Shape, "out"),
        (coded(&[299, 2], &[2]), ErrorKind::Shape, "k_descale"),
        (VarlenTensors { codes: Qkv::default(), ..coded(&[], &[]) }, ErrorKind::UnsupportedDtype, "k_descale"),
        (
            VarlenTensors { cu_seqlens_q: i32s("cu_seqlens_q", 4, &[6], Device::Cpu), ..five() },
            ErrorKind::Device,
            "cu_seqlens_q",
        ),
        (
            VarlenTensors { cu_seqlens_kv: read("cu_seqlens_kv", 5, DType::I64, &[6], DEVICE), ..five() },
            ErrorKind::UnsupportedDtype,
            "cu_seqlens_kv",
        ),
        (
            VarlenTensors { cu_seqlens_kv: i32s("cu_seqlens_kv", 5, &[7], DEVICE), ..five() },
            ErrorKind::Shape,
            "sequences",
        ),
        (
            VarlenTensors { cu_seqlens_q: i32s("cu_seqlens_q", 4, &[6, 1], DEVICE), ..five() },
            ErrorKind::Shape,
            "one number",
        ),
        (
            VarlenTensors { cu_seqlens_q: i32s("cu_seqlens_q", 4, &[0], DEVICE), ..five() },
            ErrorKind::Option,
            "begin with 0",
        ),
    ] {
        let error = refusal(&tensors, &Options::default());
        assert!(
            error.kind() == kind && error.to_string().contains(word),
            "{kind:?} {word}: {:?} {error}",
            error.kind()
        );
    }
}

#[test]
fn products_of_int8_come_as_far_as_the_device() {
    let int8 = Options::default().with_compute(Compute::Int8);
    let error = refusal(&coded(&[300, 2], &[2]), &int8);
    assert!(matches!(error, Error::DeviceUnavailable { device: DEVICE, .. }), "{error}");
    // Factors of blocks of v have no place between its integers.
    let error = refusal(&coded(&[300, 2], &[300, 2, 4]), &int8);
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("with v of int8 codes"), "{error}");
}

#[test]
fn the_call_that_ends_with_its_run_is_of_host_memory() {
    let engine = Engine::new(Some(1)).unwrap();
    let error = engine.varlen_attention(five(), &Options::default(), &Queue::Host(&SerialExecutor)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}
