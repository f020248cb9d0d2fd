//! The GPU's interfaces where there may be no GPU: typed refusals, and nothing else changes.

use rapt::{
    Codes, DType, Device, DeviceMemory, Engine, Error, Extent, Format, Operands, Options, Qkv, Queue, ScaleLayout,
    SerialExecutor, Shape, Spec, Tensors, View, ViewMut,
};

fn spec_on(device: Device) -> Spec {
    let shape = Shape::from([1, 2, 8, 16]);
    let (ptr, strides) = (std::ptr::without_provenance(1 << 20), shape.contiguous().unwrap());
    // SAFETY: nobody reads it.
    let q = unsafe { View::from_raw_parts("q", ptr, DType::F32, shape, strides, device, Extent::Declared) }.unwrap();
    Spec::builder(&q, &q, &q, &Options::default()).build().unwrap()
}

#[test]
fn without_a_gpu_a_plan_is_refused_by_a_typed_error() {
    let engine = Engine::new(Some(1)).unwrap();
    // No machine has this many.
    let far = engine.plan(&spec_on(Device::Cuda(9999))).unwrap_err();
    assert!(matches!(far, Error::DeviceUnavailable { device: Device::Cuda(9999), .. }), "{far}");
    if !rapt::cuda::is_available() {
        let near = engine.plan(&spec_on(Device::Cuda(0))).unwrap_err();
        assert!(matches!(near, Error::DeviceUnavailable { device: Device::Cuda(0), .. }), "{near}");
    }
    let other = engine.plan(&spec_on(Device::Other { dlpack_code: 8, index: 0 })).unwrap_err();
    assert!(matches!(other, Error::DeviceUnavailable { .. }), "{other}");
    assert!(rapt::cuda::report().iter().any(|(name, _)| name == "cuda"));
}

#[test]
fn a_queue_of_another_kind_is_refused() {
    let engine = Engine::new(Some(1)).unwrap();
    let (data, mut out) = ([1f32; 4], [0f32; 4]);
    let q = View::contiguous("q", &data, [1, 2, 2].into()).unwrap();
    let plan = engine.plan(&Spec::builder(&q, &q, &q, &Options::default()).build().unwrap()).unwrap();
    let out = ViewMut::contiguous("out", &mut out, [1, 2, 2].into()).unwrap();
    let tensors = Tensors::new(q, q, q, out);
    let mut operands = Operands::check(tensors, plan.spec()).unwrap();
    let stream = Queue::Cuda { device: 0, stream: 0 };
    assert!(matches!(engine.run_on(&plan, &mut operands, &stream), Err(Error::Unsupported { .. })));
    // SAFETY: host memory is never enqueued: the call is refused.
    let refused = unsafe { engine.run_async(&plan, &mut operands, DeviceMemory::default(), &stream) };
    assert!(matches!(refused, Err(Error::DeviceMismatch { expected: Device::Cpu, .. })));
    let host = Queue::Host(&SerialExecutor);
    // SAFETY: as above.
    let refused = unsafe { engine.run_async(&plan, &mut operands, DeviceMemory::default(), &host) };
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}

#[test]
fn threads_of_the_host_touch_no_memory_of_a_gpu() {
    let engine = Engine::new(Some(1)).unwrap();
    let device = Device::Cuda(0);
    let (shape, rows) = (Shape::from([1, 1, 2, 4]), Shape::from([1, 1, 2]));
    let at = |n: usize| std::ptr::without_provenance_mut::<u8>(n << 20);
    let view = |name, ptr: *mut u8, shape: Shape| {
        let strides = shape.contiguous().unwrap();
        // SAFETY: nobody reads it.
        unsafe { View::from_raw_parts(name, ptr, DType::F32, shape, strides, device, Extent::Declared) }.unwrap()
    };
    let view_mut = |name, ptr: *mut u8, shape: Shape| {
        let strides = shape.contiguous().unwrap();
        // SAFETY: nobody writes it.
        unsafe { ViewMut::from_raw_parts(name, ptr, DType::F32, shape, strides, device, Extent::Declared) }.unwrap()
    };
    let (q, v) = (view("q", at(1), shape), view("v", at(2), shape));
    let tensors =
        Tensors { lse: Some(view_mut("lse", at(4), rows)), ..Tensors::new(q, q, v, view_mut("out", at(3), shape)) };
    let spec = rapt::spec_of(&tensors, &Options::default()).unwrap();
    let caps = rapt_cuda::Caps {
        arch: rapt::Arch::Sm80,
        multiprocessors: 108,
        shared_bytes: 163 * 1024,
        clock_hz: None,
        bandwidth: None,
    };
    let plan = rapt_cuda::select(&spec, &caps).unwrap();
    let mut operands = Operands::check(tensors, plan.spec()).unwrap();
    let refused = engine.run(&plan, &mut operands).unwrap_err();
    assert!(matches!(refused, Error::DeviceMismatch { tensor: "queue", expected: Device::Cuda(0), .. }), "{refused}");
}

#[test]
fn swizzled_scales_are_served_on_a_gpu_and_refused_where_sequences_have_lengths_of_their_own() {
    let caps = rapt_cuda::Caps {
        arch: rapt::Arch::Sm90a,
        multiprocessors: 132,
        shared_bytes: 227 * 1024,
        clock_hz: None,
        bandwidth: None,
    };
    let view = |name, dtype, shape: &[usize]| {
        let (shape, ptr) = (Shape::new(shape).unwrap(), std::ptr::without_provenance(1 << 20));
        let strides = shape.contiguous().unwrap();
        // SAFETY: nobody reads it.
        unsafe { View::from_raw_parts(name, ptr, dtype, shape, strides, Device::Cuda(0), Extent::Declared) }.unwrap()
    };
    let (q, k) = (view("q", DType::BF16, &[1, 2, 8, 64]), view("k", DType::F8E4M3FN, &[1, 2, 8, 64]));
    let lengths = view("cache_seqlens", DType::I32, &[1]);
    for (scale_layout, scales) in [(ScaleLayout::Plain, &[1, 2, 8, 2][..]), (ScaleLayout::Swizzle32x4x4, &[1, 2, 512])]
    {
        let scales = view("k_descale", DType::F8E8M0FNU, scales);
        let codes = Codes { scale_layout, ..Codes::new(Format::Mxfp8, scales) };
        let codes = Qkv { q: None, k: Some(&codes), v: None };
        let options = Options::default();
        let mut builder = Spec::builder(&q, &k, &q, &options);
        let plan = rapt_cuda::select(&builder.codes(codes).build().unwrap(), &caps).unwrap();
        let says = plan.explain().to_string();
        assert_eq!(
            says.contains("a scale for each block of 32, swizzled"),
            scale_layout != ScaleLayout::Plain,
            "{says}"
        );
        let ragged = builder.lengths(Some(&lengths), 0).build().unwrap();
        match (scale_layout, rapt_cuda::select(&ragged, &caps)) {
            (ScaleLayout::Plain, plan) => assert!(plan.is_ok()),
            (ScaleLayout::Swizzle32x4x4, Err(Error::Unsupported { what, instead, .. })) => {
                assert!(what.contains("k with scale_layout=\"swizzle_32_4_4\" in sequences"), "{what}");
                assert!(instead.contains("quantize k with scale_layout=\"plain\""), "{instead}");
            }
            (_, other) => panic!("{other:?}"),
        }
    }
}
