//! The host side against a driver and a compiler that record what they are asked, without a device.

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rapt_core::{
    Arch, Codes, DType, Device, DeviceMemory, Error, Extent, Format, Operands, Options, Plan, Qkv, Shape, Spec,
    Tensors, View, ViewMut,
};

use crate::artifacts::cache::{Cache, Name};
use crate::artifacts::{Artifacts, Provenance, bundled};
use crate::backend::Backend;
use crate::driver::{Compiler, Cubin, Driver, Facts, Function, Grid};
use crate::error::{CudaError, Result};
use crate::launch::CudaLaunch;
use crate::params::{HopperParams, LaunchParams, Params};
use crate::tensor_map::{TensorMap, TmaTensor, documented_refusal};
use crate::variant::{Algorithm, KernelVariant, Loads};

mod backward;
mod cache;
mod codes;
mod deviation;
// Where the compiler that is found makes libraries of the test's own kind, and has its contexts: tests of other platforms run on emulators.
#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]
mod host;
mod varlen;

/// What was asked, in order.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Compile { options: Vec<String> },
    Load { device: u32, entry: String, cubin: Vec<u8> },
    Encode { tensor: TmaTensor, address: usize },
    Launch { handle: usize, grid: Grid, stream: usize, params: Vec<u8> },
    Allocate { bytes: usize, stream: usize },
    Free { address: usize, stream: usize },
    Record { stream: usize },
    Wait { stream: usize, event: usize },
    End { event: usize },
    Read { address: usize, bytes: usize, stream: usize },
}

/// What was asked so far, and whether a plan is being run: then nothing is compiled, loaded, looked up or allocated.
#[derive(Clone, Debug, Default)]
struct Log {
    calls: Arc<Mutex<Vec<Call>>>,
    running: Arc<AtomicBool>,
}

impl Log {
    fn add(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
    fn refuse_in_run(&self, what: &str) {
        assert!(!self.running.load(Ordering::SeqCst), "a run {what}");
    }
    /// What `enqueue` answers, as the body of a run.
    fn during_run<T>(&self, enqueue: impl FnOnce() -> T) -> T {
        self.running.store(true, Ordering::SeqCst);
        let answer = enqueue();
        self.running.store(false, Ordering::SeqCst);
        answer
    }
}

#[derive(Debug)]
struct RecordedDriver {
    log: Log,
    capability: (u32, u32),
    /// Fails every launch.
    broken: bool,
    /// Takes only machine code that begins so.
    takes: &'static [u8],
    /// Encodes no tensor map.
    mapless: bool,
    /// The machine code of each function.
    functions: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl RecordedDriver {
    fn new(log: &Log) -> Self {
        RecordedDriver {
            log: log.clone(),
            capability: (9, 0),
            broken: false,
            takes: b"",
            mapless: false,
            functions: Arc::default(),
        }
    }
}

fn refusal(call: &'static str) -> CudaError {
    CudaError::Driver { call, code: 200, name: "CUDA_ERROR_INVALID_IMAGE".into(), text: "recorded".into() }
}

impl Driver for RecordedDriver {
    fn count(&self) -> Result<u32> {
        Ok(1)
    }
    fn facts(&self, device: u32) -> Result<Facts> {
        self.log.refuse_in_run("asks what a device is");
        if device > 0 {
            return Err(CudaError::NoDevice { index: device, count: 1 });
        }
        Ok(Facts {
            name: "recorded".into(),
            capability: self.capability,
            multiprocessors: 132,
            shared_bytes: 227 * 1024,
            clock_hz: 1.98e9,
            bandwidth: 4.8e12,
        })
    }
    fn load(&self, device: u32, cubin: &[u8], entry: &CStr, _shared_bytes: u32) -> Result<Function> {
        self.log.refuse_in_run("loads a kernel");
        self.log.add(Call::Load { device, entry: entry.to_str().unwrap().into(), cubin: cubin.into() });
        if !cubin.starts_with(self.takes) {
            return Err(refusal("cuModuleLoadData"));
        }
        let mut functions = self.functions.lock().unwrap();
        functions.push(cubin.into());
        Ok(Function { device, handle: functions.len() - 1, registers: 100, local_bytes: 0 })
    }
    unsafe fn launch(&self, function: &Function, grid: Grid, stream: usize, params: &[u8]) -> Result<()> {
        self.log.add(Call::Launch { handle: function.handle, grid, stream, params: params.into() });
        if self.broken { Err(refusal("cuLaunchKernel")) } else { Ok(()) }
    }
    fn encode(&self, tensor: &TmaTensor, address: usize) -> Result<TensorMap> {
        assert_eq!(documented_refusal(tensor, address), None, "{tensor:?} at {address:#x}");
        self.log.add(Call::Encode { tensor: *tensor, address });
        if self.mapless { Err(refusal("cuTensorMapEncodeTiled")) } else { Ok(TensorMap([address as u64; 16])) }
    }

    fn allocate(&self, device: u32, bytes: usize, stream: usize) -> Result<usize> {
        self.log.refuse_in_run("allocates");
        self.facts(device)?;
        self.log.add(Call::Allocate { bytes, stream });
        let full = CudaError::Driver { call: "cuMemAllocAsync", code: 2, name: "OUT".into(), text: "recorded".into() };
        if bytes > 1 << 40 { Err(full) } else { Ok(4096) }
    }
    fn free(&self, _device: u32, address: usize, stream: usize) -> Result<()> {
        self.log.add(Call::Free { address, stream });
        Ok(())
    }
    fn record(&self, _device: u32, stream: usize) -> Result<usize> {
        self.log.refuse_in_run("records an event");
        self.log.add(Call::Record { stream });
        Ok(stream + 1000)
    }
    fn has_passed(&self, _device: u32, event: usize) -> Result<bool> {
        if self.broken { Err(refusal("cuEventQuery")) } else { Ok(event != 1007) }
    }
    fn wait(&self, _device: u32, stream: usize, event: usize) -> Result<()> {
        self.log.refuse_in_run("waits");
        self.log.add(Call::Wait { stream, event });
        Ok(())
    }
    fn end_event(&self, _device: u32, event: usize) -> Result<()> {
        self.log.add(Call::End { event });
        Ok(())
    }
    fn is_capturing(&self, _device: u32, stream: usize) -> Result<bool> {
        Ok(stream == CAPTURED)
    }
    unsafe fn read(&self, _device: u32, address: usize, to: &mut [u8], stream: usize) -> Result<()> {
        self.log.refuse_in_run("waits for a stream");
        self.log.add(Call::Read { address, bytes: to.len(), stream });
        // Head n: its figures are n + 1, n + 2, ...
        to.chunks_exact_mut(8)
            .enumerate()
            .for_each(|(n, to)| to.copy_from_slice(&((n / 5 + n % 5 + 1) as f64).to_le_bytes()));
        Ok(())
    }
}

/// A stream that is captured into a graph.
const CAPTURED: usize = 99;

/// Its machine code is a word and the options that it was asked for.
#[derive(Debug)]
struct RecordedCompiler(Log);

fn machine_code(variant: &KernelVariant) -> Vec<u8> {
    format!("new machine code {}", variant.options().join(" ")).into_bytes()
}

impl Compiler for RecordedCompiler {
    fn version(&self) -> (i32, i32) {
        (13, 0)
    }
    fn compile(&self, _name: &str, _source: &str, options: &[String]) -> Result<std::result::Result<Cubin, String>> {
        self.0.refuse_in_run("compiles");
        self.0.add(Call::Compile { options: options.into() });
        let bytes = format!("new machine code {}", options.join(" ")).into_bytes();
        Ok(Ok(Cubin { bytes, log: String::new() }))
    }
}

fn compiled(calls: &[Call]) -> usize {
    calls.iter().filter(|call| matches!(call, Call::Compile { .. })).count()
}

struct Recorded {
    log: Log,
    backend: Backend,
    functions: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// What a [`Recorded`] has besides its driver.
#[derive(Default)]
struct Parts {
    cache: Option<PathBuf>,
    bundled: Option<PathBuf>,
    no_compiler: bool,
}

impl Recorded {
    fn new(parts: Parts, change: impl FnOnce(&mut RecordedDriver)) -> Self {
        let log = Log::default();
        let mut driver = RecordedDriver::new(&log);
        change(&mut driver);
        let functions = Arc::clone(&driver.functions);
        let compiler: Result<Box<dyn Compiler>> = if parts.no_compiler {
            Err(CudaError::NoCompiler { searched: vec!["nowhere".into()] })
        } else {
            Ok(Box::new(RecordedCompiler(log.clone())))
        };
        let artifacts = Artifacts::with_parts(compiler, Cache::new(parts.cache), parts.bundled);
        Recorded { log, backend: Backend::with_parts(Box::new(driver), artifacts), functions }
    }

    fn plan(&self, request: Request) -> rapt_core::Result<Plan> {
        request.with(|spec, _| self.backend.plan(spec))
    }

    /// Plans and runs, and says what the run alone asked of the driver.
    fn run(&self, request: Request, workspace: usize) -> rapt_core::Result<Vec<Call>> {
        request.with(|spec, tensors| {
            let plan = self.backend.plan(spec)?;
            let before = self.log.take();
            let memory = DeviceMemory { address: at(9, 0).addr(), len_bytes: workspace };
            let mut operands = Operands::check(tensors, plan.spec())?;
            // SAFETY: the recorded driver touches no memory.
            let ran = self.log.during_run(|| unsafe { self.backend.run(&plan, &mut operands, memory, 77) });
            let calls = self.log.take();
            self.log.calls.lock().unwrap().extend(before.into_iter().chain(calls.iter().cloned()));
            ran.map(|()| calls)
        })
    }
}

/// Where tensors lie that nobody reads: tensor `n`, so many bytes on.
fn at(n: usize, offset: usize) -> *mut u8 {
    std::ptr::without_provenance_mut((n << 32) + offset)
}

/// `[1, 2, q_len, head_dim]` over `[1, 2, kv_len, head_dim]` of bf16.
#[derive(Clone, Copy, Debug)]
struct Request {
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    /// The dtype of a mask `[1, 1, q_len, kv_len]`.
    mask: Option<DType>,
    /// How far q, k, v, out and the mask lie from an address that everything divides.
    offsets: [usize; 5],
    /// Whether k and v are int8 codes with a descale `[1, 2, kv_len]` each.
    is_coded: bool,
    /// Whether k and v are pages of 16 keys, of which a table and a length are given.
    is_cache: bool,
    device: u32,
}

impl Request {
    const fn new(q_len: usize, kv_len: usize) -> Self {
        Request {
            q_len,
            kv_len,
            head_dim: 64,
            mask: None,
            offsets: [0; 5],
            is_coded: false,
            is_cache: false,
            device: 0,
        }
    }

    /// With q, k and v so far from an aligned address.
    const fn moved(self, offset: usize) -> Self {
        Request { offsets: [offset, offset, offset, 0, 0], ..self }
    }

    fn with<T>(self, run: impl FnOnce(&Spec, Tensors<'_>) -> T) -> T {
        let Request { q_len, kv_len, head_dim, mask, offsets, is_coded, is_cache, device } = self;
        let device = Device::Cuda(device);
        let read = |name, n: usize, dtype, shape: &[usize]| {
            let shape = Shape::new(shape).unwrap();
            let strides = shape.contiguous().unwrap();
            let offset = offsets.get(n - 1).copied().unwrap_or(0);
            // SAFETY: the recorded driver reads nothing.
            unsafe { View::from_raw_parts(name, at(n, offset), dtype, shape, strides, device, Extent::Declared) }
                .unwrap()
        };
        let of_keys = if is_coded { DType::I8 } else { DType::BF16 };
        let q = read("q", 1, DType::BF16, &[1, 2, q_len, head_dim]);
        let [blocks, rows] = if is_cache { [1000, 16] } else { [1, kv_len] };
        let k = read("k", 2, of_keys, &[blocks, 2, rows, head_dim]);
        let v = read("v", 3, of_keys, &[blocks, 2, rows, head_dim]);
        let page_table = is_cache.then(|| read("page_table", 10, DType::I32, &[1, kv_len.div_ceil(16)]));
        let lengths = is_cache.then(|| read("cache_seqlens", 11, DType::I32, &[1]));
        let mask = mask.map(|dtype| read("mask", 5, dtype, &[1, 1, q_len, kv_len]));
        let codes = |name, n| {
            let descale = read(name, n, DType::F32, &[blocks, 2, rows]);
            is_coded.then(|| Box::new(Codes::new(Format::Int8, descale)))
        };
        let codes = Qkv { q: None, k: codes("k_descale", 6), v: codes("v_descale", 7) };
        let shape = Shape::from([1, 2, q_len, head_dim]);
        let (strides, ptr) = (shape.contiguous().unwrap(), at(4, offsets[3]));
        // SAFETY: the recorded driver writes nothing.
        let out = unsafe { ViewMut::from_raw_parts("out", ptr, DType::BF16, shape, strides, device, Extent::Declared) };
        let out = out.unwrap();
        let options = Options::default();
        let mut builder = Spec::builder(&q, &k, &v, &options);
        if let Some(table) = &page_table {
            builder.pages(table, kv_len).lengths(lengths.as_ref(), 0);
        }
        let spec = builder.codes(codes.as_deref()).mask(mask.as_ref()).out(&out).build().unwrap();
        run(&spec, Tensors { mask, codes, page_table, lengths, ..Tensors::new(q, k, v, out) })
    }
}

fn launch_plan(plan: &Plan) -> &CudaLaunch {
    plan.launch_plan().unwrap()
}

#[test]
fn a_kernel_is_compiled_once_and_launched_on_the_given_stream() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let request = Request::new(300, 700);
    let variant = *launch_plan(&recorded.plan(request).unwrap()).variant().unwrap();
    assert_eq!((variant.algorithm, variant.loads), (Algorithm::Hopper, Loads::Tma));
    let planned = recorded.log.take();
    assert!(
        matches!(&planned[..], [Call::Compile { options }, Call::Load { device: 0, entry, .. }] if *options == variant.options() && entry == "attention")
    );
    let ran = recorded.run(request, 0).unwrap();
    let maps: Vec<_> = ran
        .iter()
        .filter_map(|call| match call {
            Call::Encode { tensor, address } => Some((address >> 32, tensor.sizes, tensor.box_rows)),
            _ => None,
        })
        .collect();
    let of = |n, rows, box_rows| (n, [64, rows, 2, 1], box_rows);
    assert_eq!(maps, [of(1, 300, 192), of(2, 700, 128), of(3, 700, 128), of(4, 300, 16)]);
    let Some(Call::Launch { grid, params, stream: 77, .. }) = ran.last().cloned() else { panic!("{ran:?}") };
    assert!(!grid.overlaps);
    assert_eq!((grid.blocks, grid.threads, params.len()), (2 * 5, 512, size_of::<HopperParams>()));
    // Another length is the same kernel, in no more blocks than multiprocessors.
    recorded.log.take();
    let ran = recorded.run(Request::new(40_000, 700), 0).unwrap();
    assert!(matches!(ran.last(), Some(Call::Launch { grid: Grid { blocks: 132, .. }, .. })));
    assert_eq!(compiled(&recorded.log.take()), 0);
    // Another alignment is another kernel, and compiled when it is planned.
    recorded.plan(request.moved(2)).unwrap();
    assert_eq!(compiled(&recorded.log.take()), 1);
    recorded.plan(request.moved(2)).unwrap();
    assert_eq!(recorded.log.take(), []);
}

/// What a plan says and what its run asks of the driver, for one request on one device.
fn check_that_run_enqueues_the_plan(recorded: &Recorded, request: Request) {
    let plan = recorded.plan(request).unwrap();
    let (ran, launched) = (recorded.run(request, 1 << 24).unwrap(), plan.launch().unwrap());
    let says = launch_plan(&plan);
    let variant = says.variant().unwrap();
    let is_aligned = request.offsets[..3].iter().all(|offset| offset % 16 == 0);
    assert_eq!(variant.loads == Loads::ByElement, !is_aligned, "{request:?}");
    assert_eq!(variant.loads == Loads::Tma, is_aligned && variant.algorithm == Algorithm::Hopper, "{request:?}");
    assert_eq!(plan.explain().to_string().contains("by TMA"), variant.loads == Loads::Tma, "{request:?}");
    // Which tensors TMA moves: q, k and v together, out from shared memory, the mask beside the others.
    let encoded: Vec<_> = ran
        .iter()
        .filter_map(|call| if let Call::Encode { address, .. } = call { Some(*address) } else { None })
        .collect();
    let lies = |n: usize| at(n, request.offsets[n - 1]).addr();
    let is_aligned_at = |n: usize| request.offsets[n - 1].is_multiple_of(16);
    let mut expected: Vec<usize> = Vec::new();
    if variant.loads == Loads::Tma {
        expected.extend([1, 2, 3].map(lies));
        expected.extend((variant.is_staged() && is_aligned_at(4)).then(|| lies(4)));
        expected.extend((request.mask.is_some() && is_aligned_at(5)).then(|| lies(5)));
    }
    assert_eq!(encoded, expected, "{request:?}");
    // Launches: the functions that were loaded for these variants, in the planned geometry, and nothing besides.
    let launches: Vec<_> = ran.iter().filter(|call| matches!(call, Call::Launch { .. })).collect();
    let variants: Vec<_> = [Some(variant), says.combine()].into_iter().flatten().collect();
    assert_eq!(ran.len(), encoded.len() + launches.len(), "{ran:?}");
    assert_eq!(launches.len(), variants.len());
    for (call, variant) in launches.iter().zip(&variants) {
        let Call::Launch { handle, grid, stream: 77, .. } = call else { panic!("{call:?}") };
        assert_eq!(recorded.functions.lock().unwrap()[*handle], machine_code(variant), "{request:?}");
        assert_eq!((grid.threads, grid.shared_bytes), (variant.threads(), variant.shared_bytes()));
    }
    let Call::Launch { grid, params, .. } = launches[0] else { unreachable!() };
    assert_eq!((grid.blocks as usize, grid.threads as usize), (launched.blocks, launched.block_threads));
    // The parameters begin with the addresses; those of hopper.cu with the maps.
    let from = if variant.algorithm == Algorithm::Hopper { 5 * size_of::<TensorMap>() } else { 0 };
    let word = |n: usize| usize::from_le_bytes(params[from + 8 * n..][..8].try_into().unwrap());
    let mask = request.mask.map_or(0, |_| lies(5));
    assert_eq!([0, 1, 2, 3, 6, 8].map(word), [lies(1), lies(2), lies(3), mask, lies(4), at(9, 0).addr()]);
}

#[test]
fn a_run_enqueues_what_was_planned_wherever_tensors_lie() {
    for capability in [(8, 0), (9, 0), (12, 0)] {
        let recorded = Recorded::new(Parts::default(), |driver| driver.capability = capability);
        for (q_len, kv_len, head_dim) in [(300, 304, 64), (300, 304, 256), (1, 2000, 64), (70, 64, 128)] {
            for mask in [None, Some(DType::Bool), Some(DType::BF16)] {
                let request = Request { head_dim, mask, ..Request::new(q_len, kv_len) };
                for tensor in 0..5 {
                    for offset in [0, 2, 4, 8, 16, 24, 32] {
                        let mut offsets = [0; 5];
                        offsets[tensor] = offset;
                        check_that_run_enqueues_the_plan(&recorded, Request { offsets, ..request });
                    }
                }
                for offset in [2, 8, 16] {
                    check_that_run_enqueues_the_plan(&recorded, Request { offsets: [offset; 5], ..request });
                }
            }
        }
    }
}

#[test]
fn a_tensor_map_that_the_driver_refuses_is_its_error_and_no_other_path() {
    let recorded = Recorded::new(Parts::default(), |driver| driver.mapless = true);
    let refused = recorded.run(Request::new(300, 300), 0).unwrap_err();
    assert!(
        matches!(&refused, Error::DeviceFailed { device: Device::Cuda(0), why } if why.contains("cuTensorMapEncodeTiled")),
        "{refused}"
    );
    assert!(!recorded.log.take().iter().any(|call| matches!(call, Call::Launch { .. })));
}

#[test]
fn a_plan_that_was_selected_without_a_device_is_not_run() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let caps = recorded.backend.device(0).unwrap().caps.clone();
    Request::new(300, 300).with(|spec, tensors| {
        let plan = crate::select(spec, &caps).unwrap();
        let mut operands = Operands::check(tensors, plan.spec()).unwrap();
        // SAFETY: the recorded driver touches no memory.
        let refused = unsafe { recorded.backend.run(&plan, &mut operands, DeviceMemory::default(), 0) }.unwrap_err();
        assert!(matches!(refused, Error::DeviceUnavailable { device: Device::Cuda(0), .. }), "{refused}");
        // But for its functions it is what the backend plans.
        let planned = recorded.backend.plan(spec).unwrap();
        assert_eq!(launch_plan(&plan).variant(), launch_plan(&planned).variant());
        assert_eq!((plan.why(), plan.work()), (planned.why(), planned.work()));
    });
}

#[test]
fn split_keys_take_a_second_launch_and_a_workspace() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let needed = 2 * 4 * (64 + 2) * 4;
    let short = recorded.run(Request::new(1, 2000), needed - 1).unwrap_err();
    assert_eq!(short, Error::OutOfMemory { bytes: needed });
    let calls = recorded.log.take();
    assert!(!calls.iter().any(|call| matches!(call, Call::Launch { .. })), "nothing is launched on short memory");
    let ran = recorded.run(Request::new(1, 2000), needed).unwrap();
    let launches: Vec<_> = ran
        .iter()
        .filter_map(|call| match call {
            Call::Launch { handle, grid, .. } => Some((*handle, grid.blocks, grid.threads, grid.overlaps)),
            _ => None,
        })
        .collect();
    // Both take their places while the launch before them runs; two warps of combine.cu have 64 columns.
    assert_eq!(launches, [(0, 2 * 4, 9 * 32, true), (1, 2, 2 * 32, true)]);
}

#[test]
fn an_empty_output_launches_nothing() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    assert_eq!(recorded.run(Request::new(0, 10), 0).unwrap(), []);
    assert_eq!(recorded.log.take(), []);
}

#[test]
fn machine_code_is_kept_and_what_the_driver_refuses_is_compiled_anew() {
    let folder = std::env::temp_dir().join(format!("rapt-backend-test-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let kept = |takes| {
        let parts = Parts { cache: Some(folder.clone()), ..Parts::default() };
        Recorded::new(parts, |driver| driver.takes = takes)
    };
    let provenance = |recorded: &Recorded| launch_plan(&recorded.plan(Request::new(300, 300)).unwrap()).provenance();
    assert_eq!(provenance(&kept(b"")), Some(Provenance::Compiled));
    assert_eq!(provenance(&kept(b"")), Some(Provenance::Cached));
    // Whole, and yet not for this driver.
    let entry = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let name = entry.file_stem().unwrap().to_str().unwrap().to_owned();
    Cache::new(Some(folder.clone())).put(&Name::of_file(name), b"other machine code");
    let newer = kept(b"new");
    assert_eq!(provenance(&newer), Some(Provenance::Compiled));
    assert_eq!(newer.log.take().iter().filter(|call| matches!(call, Call::Load { .. })).count(), 2);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_shipped_kernel_needs_no_compiler_and_a_damaged_one_is_passed_over() {
    let folder = std::env::temp_dir().join(format!("rapt-shipped-test-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let shipped = |no_compiler, takes| {
        let parts = Parts { bundled: Some(folder.clone()), no_compiler, ..Parts::default() };
        Recorded::new(parts, |driver| driver.takes = takes)
    };
    let request = Request::new(300, 300);
    let provenance = |recorded: &Recorded| launch_plan(&recorded.plan(request).unwrap()).provenance();
    // Nothing is shipped: the error says what to install.
    let refused = shipped(true, b"").run(request, 0).unwrap_err();
    assert!(
        matches!(&refused, Error::DeviceUnavailable { why, .. } if why.contains("pip install nvidia-cuda-nvrtc")),
        "{refused}"
    );
    let variant_of = |request: Request| {
        let recorded = Recorded::new(Parts::default(), |_| ());
        *launch_plan(&recorded.plan(request).unwrap()).variant().unwrap()
    };
    // Another variant of the same file, and one whose bytes do not shrink.
    let (variant, other) = (variant_of(request), variant_of(request.moved(2)));
    assert_ne!(variant, other);
    let machine = [b"machine code".as_slice(), &[0; 4096]].concat();
    bundled::write(&folder, variant.arch, (13, 0), &[(other, b"x"), (variant, &machine)]).unwrap();
    let facts = shipped(true, b"").backend.shipped(variant.arch).unwrap();
    assert_eq!((facts.kernels, facts.compiler, facts.arch), (2, (13, 0), Arch::Sm90a));
    let alone = shipped(true, b"");
    assert_eq!(provenance(&alone), Some(Provenance::Bundled));
    assert!(matches!(&alone.log.take()[..], [Call::Load { cubin, .. }] if *cubin == machine));
    alone.run(request, 0).unwrap();
    // A compiler of any version beside it changes nothing.
    assert_eq!(provenance(&shipped(false, b"")), Some(Provenance::Bundled));
    // Whole, and not for this driver: the compiler is asked.
    assert_eq!(provenance(&shipped(false, b"new")), Some(Provenance::Compiled));
    assert!(matches!(shipped(true, b"new").plan(request), Err(Error::DeviceUnavailable { .. })));
    // Each byte counts: in the head, the index, the entry.
    let path = bundled::path(&folder, variant.arch);
    let whole = std::fs::read(&path).unwrap();
    let used = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        bundled::get(&folder, &variant).inspect(|cubin| assert_eq!(*cubin, machine)).is_some()
    };
    assert!(used(&whole));
    let mut still = 0;
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x40;
        still += usize::from(used(&flipped));
    }
    // The compiler's version, the other entry (its 80 bytes of index, its one byte), and the end of the block that both share:
    // the range coder's last bytes and LZMA2's end mark.
    assert!(still <= 8 + 80 + 1 + 6, "{still} of {} damaged files were used", whole.len());
    for cut in 0..whole.len() {
        assert!(!used(&whole[..cut]) || cut + 3 >= whole.len(), "cut to {cut} of {}", whole.len());
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_family_shares_what_is_shipped() {
    use bundled::{family, path};
    let folder = PathBuf::from("x");
    for (arch, own) in
        [(Arch::Sm86, Arch::Sm80), (Arch::Sm89, Arch::Sm80), (Arch::Sm103, Arch::Sm100), (Arch::Sm121, Arch::Sm120)]
    {
        assert_eq!(family(arch), own);
        assert_eq!(path(&folder, arch), path(&folder, own));
    }
    // Its machine code runs on nothing else, and nothing else's on it.
    assert_eq!((family(Arch::Sm90a), family(Arch::Sm110)), (Arch::Sm90a, Arch::Sm110));
}

#[test]
fn every_failure_is_typed() {
    let run = |change: fn(&mut RecordedDriver)| {
        Recorded::new(Parts::default(), change).run(Request::new(300, 300), 0).unwrap_err()
    };
    let broken = run(|driver| driver.broken = true);
    assert!(
        matches!(&broken, Error::DeviceFailed { device: Device::Cuda(0), why } if why.contains("cuLaunchKernel")),
        "{broken}"
    );
    let refused = run(|driver| driver.takes = b"x");
    assert!(matches!(refused, Error::DeviceFailed { .. }), "{refused}");
    for change in
        [(|driver| driver.capability = (7, 5)) as fn(&mut RecordedDriver), |driver| driver.capability = (13, 0)]
    {
        let old = run(change);
        assert!(matches!(&old, Error::DeviceUnavailable { why, .. } if why.contains("compute capability")), "{old}");
    }
    let second = Request { device: 1, ..Request::new(3, 3) };
    let second = Recorded::new(Parts::default(), |_| ()).plan(second).unwrap_err();
    assert!(
        matches!(&second, Error::DeviceUnavailable { device: Device::Cuda(1), why } if why.contains("sees 1")),
        "{second}"
    );
}

#[test]
fn memory_is_given_back_where_its_stream_comes_to_and_marks_order_streams() {
    let Recorded { log, backend, .. } = Recorded::new(Parts::default(), |_| ());
    let backend: &'static Backend = Box::leak(Box::new(backend));
    // SAFETY: the recorded driver has no streams.
    unsafe {
        let memory = backend.lend(0, 100, 7).unwrap();
        assert_eq!((memory.get(), memory.device()), (DeviceMemory { address: 4096, len_bytes: 100 }, 0));
        let mark = backend.mark(0, 7).unwrap();
        assert!(!mark.has_passed().unwrap() && backend.mark(0, 8).unwrap().has_passed().unwrap());
        mark.hold(9).unwrap();
        drop((mark, memory));
        assert_eq!(backend.lend(0, 1 << 41, 7).unwrap_err(), Error::OutOfMemory { bytes: 1 << 41 });
        assert!(matches!(backend.lend(1, 1, 0), Err(Error::DeviceUnavailable { device: Device::Cuda(1), .. })));
    }
    let calls = log.take();
    let expected = [
        Call::Allocate { bytes: 100, stream: 7 },
        Call::Record { stream: 7 },
        Call::Record { stream: 8 },
        Call::End { event: 1008 },
        Call::Wait { stream: 9, event: 1007 },
        Call::End { event: 1007 },
        Call::Free { address: 4096, stream: 7 },
    ];
    assert_eq!(calls[..expected.len()], expected);
}

#[test]
fn operands_of_another_spec_are_refused() {
    let recorded = Recorded::new(Parts::default(), |_| ());
    let plan = recorded.plan(Request::new(300, 300)).unwrap();
    // Another length; and another alignment, which the plan's kernel does not read.
    for other in [Request::new(300, 301), Request::new(300, 300).moved(2)] {
        other.with(|spec, tensors| {
            let mut operands = Operands::check(tensors, spec).unwrap();
            // SAFETY: the recorded driver touches no memory.
            let refused = unsafe { recorded.backend.run(&plan, &mut operands, DeviceMemory::default(), 0) };
            assert!(matches!(refused, Err(Error::NotAsPlanned { .. })));
        });
    }
}
