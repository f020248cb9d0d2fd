//! The host side against a driver and a compiler that record what they are asked, without a device.

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use rapt_core::{DType, Device, DeviceMemory, Error, Extent, Operands, Options, Shape, Spec, Tensors, View, ViewMut};

use crate::backend::Backend;
use crate::cache::Cache;
use crate::error::{CudaError, Result};
use crate::result::driver::{Driver, Facts, Function, Grid};
use crate::result::nvrtc::{Compiler, Cubin};
use crate::tensor_map::{Copied, CopyMap};

/// What was asked, in order.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Compile(String),
    Load { device: u32, entry: String, cubin: Vec<u8> },
    CopyMap(Copied),
    Launch { handle: usize, grid: Grid, stream: usize, bytes: usize },
    Allocate { bytes: usize, stream: usize },
    Free { address: usize, stream: usize },
    Record { stream: usize },
    Wait { stream: usize, event: usize },
    End { event: usize },
}

#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Vec<Call>>>);

impl Log {
    fn add(&self, call: Call) {
        self.0.lock().unwrap().push(call);
    }
    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.0.lock().unwrap())
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
    /// Encodes no tensor for the copy engine.
    mapless: bool,
}

fn refusal(call: &'static str) -> CudaError {
    CudaError::Driver { call, code: 200, name: "CUDA_ERROR_INVALID_IMAGE".into(), text: "recorded".into() }
}

impl Driver for RecordedDriver {
    fn count(&self) -> Result<u32> {
        Ok(1)
    }
    fn facts(&self, device: u32) -> Result<Facts> {
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
        self.log.add(Call::Load { device, entry: entry.to_str().unwrap().into(), cubin: cubin.into() });
        if !cubin.starts_with(self.takes) {
            return Err(refusal("cuModuleLoadData"));
        }
        let handle = if entry == c"combine" { 2 } else { 1 };
        Ok(Function { device, handle, registers: 100, local_bytes: 0 })
    }
    unsafe fn launch(&self, function: &Function, grid: Grid, stream: usize, params: &[u8]) -> Result<()> {
        self.log.add(Call::Launch { handle: function.handle, grid, stream, bytes: params.len() });
        if self.broken { Err(refusal("cuLaunchKernel")) } else { Ok(()) }
    }
    fn copy_map(&self, copied: &Copied) -> Result<CopyMap> {
        self.log.add(Call::CopyMap(*copied));
        if self.mapless { Err(refusal("cuTensorMapEncodeTiled")) } else { Ok(CopyMap::default()) }
    }

    fn allocate(&self, device: u32, bytes: usize, stream: usize) -> Result<usize> {
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
        self.log.add(Call::Record { stream });
        Ok(stream + 1000)
    }
    fn has_passed(&self, _device: u32, event: usize) -> Result<bool> {
        if self.broken { Err(refusal("cuEventQuery")) } else { Ok(event != 1007) }
    }
    fn wait(&self, _device: u32, stream: usize, event: usize) -> Result<()> {
        self.log.add(Call::Wait { stream, event });
        Ok(())
    }
    fn end_event(&self, _device: u32, event: usize) -> Result<()> {
        self.log.add(Call::End { event });
        Ok(())
    }
}

#[derive(Debug)]
struct RecordedCompiler(Log);

impl Compiler for RecordedCompiler {
    fn version(&self) -> (i32, i32) {
        (13, 0)
    }
    fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<std::result::Result<Cubin, String>> {
        assert!(source.contains("__global__") && options.iter().any(|option| option == "-arch=sm_90a"));
        self.0.add(Call::Compile(name.into()));
        Ok(Ok(Cubin { bytes: b"new machine code".to_vec(), log: String::new() }))
    }
}

fn backend(log: &Log, cache: Option<PathBuf>, change: impl FnOnce(&mut RecordedDriver)) -> Backend {
    let mut driver = RecordedDriver { log: log.clone(), capability: (9, 0), broken: false, mapless: false, takes: b"" };
    change(&mut driver);
    let compiler = OnceLock::new();
    compiler.set(Ok(Box::new(RecordedCompiler(log.clone())) as Box<dyn Compiler>)).unwrap();
    Backend::with_parts(Box::new(driver), compiler, Cache::new(cache))
}

/// What the recorded driver's device has.
fn caps() -> crate::select::Caps {
    let driver = RecordedDriver { log: Log::default(), capability: (9, 0), broken: false, mapless: false, takes: b"" };
    let facts = driver.facts(0).unwrap();
    crate::select::Caps {
        arch: rapt_core::Arch::Sm90a,
        multiprocessors: facts.multiprocessors,
        shared_bytes: facts.shared_bytes,
        clock_hz: None,
        bandwidth: None,
    }
}

/// Where tensors lie that nobody reads.
fn at(n: usize) -> *mut u8 {
    std::ptr::without_provenance_mut(n << 32)
}

fn request<T>(q_len: usize, kv_len: usize, offset: usize, device: u32, run: impl FnOnce(&Spec, Tensors<'_>) -> T) -> T {
    let read = |name, n: usize, len: usize| {
        let shape = Shape::from([1, 2, len, 64]);
        let (strides, ptr) = (shape.contiguous().unwrap(), at(n).wrapping_add(offset));
        // SAFETY: the recorded driver reads nothing.
        unsafe { View::from_raw_parts(name, ptr, DType::BF16, shape, strides, Device::Cuda(device), Extent::Declared) }
            .unwrap()
    };
    let shape = Shape::from([1, 2, q_len, 64]);
    let strides = shape.contiguous().unwrap();
    let ptr = at(4);
    // SAFETY: the recorded driver writes nothing.
    let out = unsafe {
        ViewMut::from_raw_parts("out", ptr, DType::BF16, shape, strides, Device::Cuda(device), Extent::Declared)
    };
    let (q, k, v, out) = (read("q", 1, q_len), read("k", 2, kv_len), read("v", 3, kv_len), out.unwrap());
    let spec = Spec::builder(&q, &k, &v, &Options::default()).build().unwrap();
    run(&spec, Tensors { q, k, v, mask: None, sinks: None, alibi_slopes: None, out, lse: None })
}

fn run(backend: &Backend, [q_len, kv_len, offset]: [usize; 3], workspace: usize) -> rapt_core::Result<()> {
    request(q_len, kv_len, offset, 0, |spec, tensors| {
        let plan = backend.plan(spec)?;
        let memory = DeviceMemory { address: 5 << 32, len_bytes: workspace };
        let mut operands = Operands::check(tensors, plan.spec())?;
        // SAFETY: the recorded driver touches no memory.
        unsafe { backend.run(&plan, &mut operands, memory, 77) }
    })
}

#[test]
fn a_kernel_is_compiled_once_and_launched_on_the_given_stream() {
    let log = Log::default();
    let backend = backend(&log, None, |_| ());
    run(&backend, [300, 300, 0], 0).unwrap();
    let calls = log.take();
    assert!(
        matches!(&calls[..], [Call::Compile(name), Call::Load { device: 0, .. }, .., Call::Launch { stream: 77, .. }]
        if name == "hopper.cu")
    );
    let maps: Vec<_> = calls
        .iter()
        .filter_map(|call| match call {
            Call::CopyMap(copied) => Some((copied.address >> 32, copied.sizes, copied.box_rows)),
            _ => None,
        })
        .collect();
    let of = |n, rows, box_rows| (n, [64, rows, 2, 1], box_rows);
    assert_eq!(maps, [of(1, 300, 192), of(2, 300, 128), of(3, 300, 128), of(4, 300, 16)]);
    let Some(Call::Launch { grid, bytes, .. }) = calls.last().cloned() else { unreachable!() };
    assert!(!grid.overlaps);
    assert_eq!((grid.blocks, grid.threads, bytes), (2 * 5, 512, size_of::<crate::params::HopperParams>()));
    // Another length is the same kernel; another alignment is not: the copy engine does not read it. No more blocks than
    // multiprocessors.
    run(&backend, [40_000, 700, 0], 0).unwrap();
    let calls = log.take();
    assert!(matches!(calls.last(), Some(Call::Launch { grid: Grid { blocks: 132, .. }, .. })) && calls.len() == 5);
    run(&backend, [300, 300, 2], 0).unwrap();
    assert_eq!(log.take().len(), 3);
    run(&backend, [300, 300, 2], 0).unwrap();
    assert_eq!(log.take().len(), 1);
}

#[test]
fn what_the_driver_encodes_no_map_of_is_loaded_element_by_element() {
    let log = Log::default();
    run(&backend(&log, None, |driver| driver.mapless = true), [300, 300, 0], 0).unwrap();
    let calls = log.take();
    let compiled = calls.iter().filter(|call| matches!(call, Call::Compile(_))).count();
    assert_eq!(compiled, 2, "planned for the copy engine, run without it");
    assert!(matches!(calls.last(), Some(Call::Launch { .. })));
}

#[test]
fn split_keys_take_a_second_launch_and_a_workspace() {
    let log = Log::default();
    let backend = backend(&log, None, |_| ());
    let needed = 2 * 4 * (64 + 2) * 4;
    let short = run(&backend, [1, 2000, 0], needed - 1).unwrap_err();
    assert_eq!(short, Error::OutOfMemory { bytes: needed });
    assert!(!log.take().iter().any(|call| matches!(call, Call::Launch { .. })), "nothing is launched on short memory");
    run(&backend, [1, 2000, 0], needed).unwrap();
    let handles: Vec<_> = log
        .take()
        .iter()
        .filter_map(|call| match call {
            Call::Launch { handle, grid, .. } => Some((*handle, grid.blocks, grid.threads, grid.overlaps)),
            _ => None,
        })
        .collect();
    // Both take their places while the launch before them runs; two warps of combine.cu have 64 columns.
    assert_eq!(handles, [(1, 2 * 4, 9 * 32, true), (2, 2, 2 * 32, true)]);
}

#[test]
fn an_empty_output_launches_nothing() {
    let log = Log::default();
    run(&backend(&log, None, |_| ()), [0, 10, 0], 0).unwrap();
    assert_eq!(log.take(), []);
}

#[test]
fn machine_code_is_kept_and_what_the_driver_refuses_is_compiled_anew() {
    let folder = std::env::temp_dir().join(format!("rapt-backend-test-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let log = Log::default();
    let compiled = |calls: &[Call]| calls.iter().filter(|call| matches!(call, Call::Compile(_))).count();
    run(&backend(&log, Some(folder.clone()), |_| ()), [300, 300, 0], 0).unwrap();
    assert_eq!(compiled(&log.take()), 1);
    run(&backend(&log, Some(folder.clone()), |_| ()), [300, 300, 0], 0).unwrap();
    assert_eq!(compiled(&log.take()), 0);
    // Whole, and yet not for this driver.
    let entry = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let name = entry.file_stem().unwrap().to_str().unwrap().to_owned();
    Cache::new(Some(folder.clone())).put(&crate::cache::Name::known(name), b"other machine code");
    run(&backend(&log, Some(folder.clone()), |driver| driver.takes = b"new"), [300, 300, 0], 0).unwrap();
    let calls = log.take();
    assert_eq!(compiled(&calls), 1);
    assert_eq!(calls.iter().filter(|call| matches!(call, Call::Load { .. })).count(), 2);
    std::fs::remove_dir_all(folder).unwrap();
}

/// A compiler that is not there.
fn without_compiler(log: &Log, cache: Option<PathBuf>, takes: &'static [u8]) -> Backend {
    let driver = RecordedDriver { log: log.clone(), capability: (9, 0), broken: false, mapless: false, takes };
    let compiler = OnceLock::new();
    compiler.set(Err(CudaError::NoCompiler { searched: vec!["nowhere".into()] })).unwrap();
    Backend::with_parts(Box::new(driver), compiler, Cache::new(cache))
}

#[test]
fn a_shipped_kernel_needs_no_compiler_and_a_damaged_one_is_passed_over() {
    let folder = std::env::temp_dir().join(format!("rapt-shipped-test-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let log = Log::default();
    let alone = |takes| without_compiler(&log, None, takes).with_shipped(folder.clone());
    let shape = [300, 300, 0];
    let source = |backend: &Backend| {
        let plan = request(300, 300, 0, 0, |spec, _| backend.plan(spec).unwrap());
        plan.launch().unwrap().compiled.unwrap().source
    };
    // Nothing is shipped: the error names the mend.
    let refused = run(&alone(b""), shape, 0).unwrap_err();
    assert!(
        matches!(&refused, Error::DeviceUnavailable { why, .. } if why.contains("pip install nvidia-cuda-nvrtc")),
        "{refused}"
    );
    let code = crate::select::codes(&request(300, 300, 0, 0, |spec, _| spec.clone()), &caps()).unwrap()[0];
    // Another code of the same file, and one whose bytes do not shrink.
    let other = crate::select::codes(&request(300, 300, 2, 0, |spec, _| spec.clone()), &caps()).unwrap()[0];
    let other = crate::code::Code { block_m: other.block_m + 1, ..other };
    let machine = [b"machine code".as_slice(), &[0; 4096]].concat();
    crate::shipped::write(&folder, code.arch, (13, 0), &[(other, b"x"), (code, &machine)]).unwrap();
    let facts = alone(b"").shipped(code.arch).unwrap();
    assert_eq!((facts.kernels, facts.compiler, facts.arch), (2, (13, 0), rapt_core::Arch::Sm90a));
    log.take();
    run(&alone(b""), shape, 0).unwrap();
    let calls: Vec<Call> = log.take().into_iter().filter(|call| !matches!(call, Call::CopyMap(_))).collect();
    assert!(matches!(&calls[..], [Call::Load { cubin, .. }, Call::Launch { .. }] if *cubin == machine));
    assert_eq!(source(&alone(b"")), "shipped with the package");
    // A compiler of any version beside it changes nothing.
    let beside = backend(&log, None, |_| ()).with_shipped(folder.clone());
    assert_eq!(source(&beside), "shipped with the package");
    // Whole, and not for this driver: the compiler is asked.
    let newer = backend(&log, None, |driver| driver.takes = b"new").with_shipped(folder.clone());
    assert_eq!(source(&newer), "compiled by NVRTC in this process");
    assert!(matches!(run(&alone(b"new"), shape, 0), Err(Error::DeviceUnavailable { .. })));
    // Each byte counts: in the head, the index, the entry.
    let path = crate::shipped::path(&folder, code.arch);
    let whole = std::fs::read(&path).unwrap();
    let used = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        crate::shipped::get(&folder, &code).inspect(|cubin| assert_eq!(*cubin, machine)).is_some()
    };
    assert!(used(&whole));
    let mut still = 0;
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x40;
        still += usize::from(used(&flipped));
    }
    // The compiler's version, the other entry (its 76 bytes of index, its 3 packed ones), and bits that fill deflate's last byte.
    assert!(still <= 8 + 76 + 3 + 1, "{still} of {} damaged files were used", whole.len());
    for cut in 0..whole.len() {
        assert!(!used(&whole[..cut]) || cut + 3 >= whole.len(), "cut to {cut} of {}", whole.len());
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_family_shares_what_is_shipped() {
    use crate::shipped::{family, path};
    use rapt_core::Arch;
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
    let log = Log::default();
    let broken = run(&backend(&log, None, |driver| driver.broken = true), [300, 300, 0], 0).unwrap_err();
    assert!(
        matches!(&broken, Error::DeviceFailed { device: Device::Cuda(0), why } if why.contains("cuLaunchKernel")),
        "{broken}"
    );
    let refused = run(&backend(&log, None, |driver| driver.takes = b"x"), [300, 300, 0], 0).unwrap_err();
    assert!(matches!(refused, Error::DeviceFailed { .. }), "{refused}");
    for capability in [(7, 5), (13, 0)] {
        let old = run(&backend(&log, None, |driver| driver.capability = capability), [300, 300, 0], 0).unwrap_err();
        assert!(matches!(&old, Error::DeviceUnavailable { why, .. } if why.contains("compute capability")), "{old}");
    }
    let second = request(3, 3, 0, 1, |spec, _| backend(&log, None, |_| ()).plan(spec).unwrap_err());
    assert!(
        matches!(&second, Error::DeviceUnavailable { device: Device::Cuda(1), why } if why.contains("sees 1")),
        "{second}"
    );
}

#[test]
fn memory_is_given_back_where_its_stream_comes_to_and_marks_order_streams() {
    let log = Log::default();
    let backend: &'static Backend = Box::leak(Box::new(backend(&log, None, |_| ())));
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
    let log = Log::default();
    let backend = backend(&log, None, |_| ());
    let plan = request(300, 300, 0, 0, |spec, _| backend.plan(spec).unwrap());
    request(300, 301, 0, 0, |spec, tensors| {
        let mut operands = Operands::check(tensors, spec).unwrap();
        // SAFETY: the recorded driver touches no memory.
        let refused = unsafe { backend.run(&plan, &mut operands, DeviceMemory::default(), 0) };
        assert!(matches!(refused, Err(Error::NotAsPlanned { .. })));
    });
}
