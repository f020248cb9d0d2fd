//! An engine on a GPU, asked by the façade: tensors of the host, its plans, and what it refuses.
//!
//! Without an adapter nothing is tested, which is printed, and is a failure if `RAPT_REQUIRE` names `vulkan` (`cargo xtask vulkan`).

use rapt::vulkan::{BufferTensor, BufferTensors, adapters, wgpu};
use rapt::{DType, Device, Engine, Error, Operands, Options, Queue, Spec, Tensors, VarlenTensors, spec_of};
use rapt_testkit::{Config, conformance};

fn engine() -> Option<Engine> {
    if adapters().is_empty() {
        let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|name| name == "vulkan"), "RAPT_REQUIRE asks for vulkan: there is no adapter");
        println!("no Vulkan adapter: nothing is tested");
        return None;
    }
    Some(Engine::gpu(0).unwrap())
}

/// Problems of every dtype. What the kernels compute is rapt-wgpu's to test: here, that the engine brings tensors there and back.
fn conforms_through_the_engine(engine: &Engine, problems: usize, quantized: usize) {
    let attend = |spec: &Spec, tensors: Tensors<'_>| {
        let plan = engine.plan(spec)?;
        engine.run(&plan, &mut Operands::check(tensors, spec)?)
    };
    let dtypes = vec![DType::F32, DType::F16, DType::BF16, DType::F64];
    let config = Config { problems, max_work: 200_000, dtypes, quantized, fixed: false, ..Config::default() };
    let tally = conformance(&mut [Box::new(attend)], &config).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(
        tally.count("random") > problems / 2 && tally.count("unsupported") > quantized,
        "float64 and codes are refused, the rest is served: {tally}"
    );
}

#[test]
fn tensors_of_the_host_conform_through_the_engine() {
    let Some(engine) = engine() else { return };
    conforms_through_the_engine(&engine, 8, 1);
}

#[test]
#[ignore = "compiles many kernels, for which a processor takes a minute"]
fn many_tensors_of_the_host_conform_through_the_engine() {
    let Some(engine) = engine() else { return };
    conforms_through_the_engine(&engine, 24, 4);
}

#[test]
fn a_plan_counts_the_bytes_that_are_copied() {
    let Some(engine) = engine() else { return };
    let numbers = vec![0.5f32; 2 * 8 * 4];
    let view = |shape: [usize; 4]| rapt::View::contiguous("q", &numbers, shape.into()).unwrap();
    let (q, kv) = (view([1, 2, 8, 4]), view([1, 1, 8, 4]));
    let spec = Spec::builder(&q, &kv, &kv, &Options::default()).return_lse(true).build().unwrap();
    let plan = engine.plan(&spec).unwrap();
    plan.launch_plan::<rapt::Copied>().unwrap();
    // q and out of 64 numbers, k and v of 32, lse of 16.
    assert_eq!(plan.cost().bytes_copied, (64 + 32 + 32 + 64 + 16) * 4);
    let text = plan.explain().to_string();
    assert!(text.contains("decode float32 on wgsl") && text.contains("copied to vulkan:0 and back"), "{text}");
    assert!(text.contains("bytes_copied     832 (to the device and back)"), "{text}");
    assert!(std::sync::Arc::ptr_eq(&plan, &engine.plan(&spec).unwrap()), "plans are kept");
}

#[test]
fn an_engine_of_the_host_and_one_of_a_gpu_agree() {
    let Some(gpu) = engine() else { return };
    let host = Engine::new(Some(1)).unwrap();
    let numbers: Vec<f32> = (0..3 * 10 * 4u16).map(|n| (f32::from(n) * 0.37).sin()).collect();
    let run = |engine: &Engine| {
        let mut out = vec![0f32; numbers.len()];
        let view = rapt::View::contiguous("q", &numbers, [3, 10, 4].into()).unwrap();
        let tensors =
            Tensors::new(view, view, view, rapt::ViewMut::contiguous("out", &mut out, [3, 10, 4].into()).unwrap());
        engine.attention_into(tensors, &Options::default().with_causal(rapt::Causal::TopLeft)).unwrap();
        out
    };
    let (on_host, on_gpu) = (run(&host), run(&gpu));
    assert!(on_host.iter().zip(&on_gpu).all(|(a, b)| (a - b).abs() < 1e-6), "{on_host:?} {on_gpu:?}");
}

#[test]
fn tensors_in_buffers_are_attended_to_where_they_lie() {
    let Some(engine) = engine() else { return };
    let gpu = engine.vulkan().unwrap();
    let (device, queue) = gpu.wgpu();
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
    let buffer =
        || device.create_buffer(&wgpu::BufferDescriptor { label: None, size: 16, usage, mapped_at_creation: false });
    let (qkv, out) = (buffer(), buffer());
    queue.write_buffer(&qkv, 0, &[0.25f32, 0.5, 0.75, 1.0].map(f32::to_le_bytes).concat());
    let of = |buffer| BufferTensor::contiguous("x", buffer, DType::F32, [1, 1, 4].into()).unwrap();
    let tensors = BufferTensors::new(of(&qkv), of(&qkv), of(&qkv), of(&out));
    let spec = spec_of(&tensors.views(gpu.device()).unwrap(), &Options::default()).unwrap();
    let plan = engine.plan(&spec).unwrap();
    assert_eq!((plan.spec().device, plan.cost().bytes_copied), (Device::Vulkan(0), 0));
    gpu.run(&plan, &tensors).unwrap();
    // Plans of buffers are not run on tensors of the host, nor the other way round.
    let host = Engine::new(Some(1)).unwrap();
    assert!(matches!(host.plan(&spec), Err(Error::DeviceUnavailable { device: Device::Vulkan(0), .. })));
}

#[test]
fn what_the_gpu_has_no_kernel_for_is_refused_and_not_computed_on_the_host() {
    let Some(engine) = engine() else { return };
    let (numbers, offsets, mut out) = ([0.5f32; 3 * 4], [0i32, 1, 3], [f32::NAN; 3 * 4]);
    let view = || rapt::View::contiguous("q", &numbers, [3, 1, 4].into()).unwrap();
    let ends = || rapt::View::contiguous("cu_seqlens_q", &offsets, [3].into()).unwrap();
    let tensors = VarlenTensors {
        q: view(),
        k: view(),
        v: view(),
        cu_seqlens_q: ends(),
        cu_seqlens_kv: ends(),
        codes: rapt::Qkv::default(),
        sinks: None,
        alibi_slopes: None,
        dropout: None,
        out: rapt::ViewMut::contiguous("out", &mut out, [3, 1, 4].into()).unwrap(),
        lse: None,
    };
    let error = engine.varlen_attention(tensors, &Options::default(), &Queue::Host(engine.executor())).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.ends_with("on vulkan:0")), "{error}");
    assert!(out.iter().all(|x| x.is_nan()), "nothing was written");
}

#[test]
fn an_adapter_that_is_not_there_is_an_error() {
    let error = Engine::gpu(4711).unwrap_err();
    assert!(matches!(error, Error::DeviceUnavailable { device: Device::Vulkan(4711), .. }), "{error}");
}
