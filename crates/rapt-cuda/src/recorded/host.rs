//! Whole runs of int8.cu, of gradients (backward.rs), of forward passes that drop weights (dropout.rs), and of the kernels that judge heads (deviation.rs), on this machine's processor: from a spec by way of the plan, the
//! compiler and the launch to what is written, held against the definition. A kernel's own source is compiled as C++, with stand-ins for
//! what a block of threads and the tensor cores do (tests/host/block.hpp): every map, every strided read, every barrier and wait, and all
//! arithmetic but that of `ex2.approx`.
//!
//! Needs a C++ compiler (`CXX`, else `c++`) and contexts of POSIX, so that it is of Linux on x86_64 alone. Deliberately absent: memory of a device, and what runs at once.

mod backward;
mod deviation;
mod dropout;
mod items;
mod key_tiles;
mod varlen_backward;

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::{Library, Symbol};
use rapt_core::{Alignment, Kernel, Window};
use rapt_testkit::{Case, Config, Engine, Guard, Places, conformance, replay};

use super::*;

/// What stands in for an instruction, or for what CUDA C++ has: the definitions that get another name.
const STANDS_IN: [&str; 20] = [
    "inline u32 shared_address(",
    "inline void ldmatrix(u32",
    "inline void ldmatrix_trans(u32 (&r)[4]",
    "inline void mma_int8(",
    "inline void mma(float",
    "inline void mma_of(float",
    "inline void mma_tf32(float",
    "inline u32 reread_ctaid(",
    "inline void cp_async(",
    "inline u32 pack_as(float low, float high)",
    "inline void cp_async_zfill(",
    "inline void cp_async_commit(",
    "inline void cp_async_wait(",
    "inline u32 load_acquire(",
    "inline void nanosleep(",
    "inline float exp2_approx(",
    "inline float f16_to_float(",
    "inline u16 float_to_f16(",
    "inline u16 float_to_bf16(",
    "inline u16 double_to_f16(",
];

/// C++ of a kernel's source.
fn on_this_machine(source: &str) -> String {
    let mut text = source.replace("asm volatile(", "asm(");
    for definition in STANDS_IN {
        // A kernel includes some of the files that have them: int8.cu all.
        if !text.contains(definition) {
            continue;
        }
        let (of, name) = definition.split_at(definition[..definition.find('(').unwrap()].rfind(' ').unwrap() + 1);
        text = text.replace(definition, &format!("{of}device_{name}"));
    }
    let pack = "__device__ inline u32 pack(float low, float high) {";
    let stand_in = "inline u32 pack(float low, float high) { return packed<MMA_HALF>(low, high); }\ninline u32 device_pack(float low, float high) {";
    let memory = [128, 16].map(|bytes| format!("extern __shared__ __align__({bytes}) u8 memory[];"));
    text = text.replace(pack, stand_in);
    if let Some(memory) = memory.iter().find(|memory| text.contains(*memory)) {
        text = text.replace(memory, "u8* const memory = host::shared;");
    }
    let entry = ["attention", "backward", "deviation", "deviation_end"]
        .into_iter()
        .find(|entry| text.contains(&format!(" {entry}(const __grid_constant__ ")))
        .expect("a kernel");
    format!("#include \"block.hpp\"\n{text}\n#define ENTRY {entry}\n#include \"launch.hpp\"\n")
}

/// Where it is compiled.
fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("rapt-host-{}", std::process::id()))
}

/// Compiles for this machine: its machine code is the name of a library.
#[derive(Debug)]
struct HostCompiler;

impl Compiler for HostCompiler {
    fn version(&self) -> (i32, i32) {
        (0, 0)
    }
    fn compile(&self, _name: &str, source: &str, options: &[String]) -> Result<std::result::Result<Cubin, String>> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        std::fs::create_dir_all(folder()).unwrap();
        let at = |ending: &str, n: usize| folder().join(format!("{n}.{ending}"));
        let n = COUNT.fetch_add(1, Ordering::SeqCst);
        std::fs::write(at("cpp", n), on_this_machine(source)).unwrap();
        let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        command.args([
            "-std=c++17",
            "-U_FORTIFY_SOURCE",
            "-O0",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-w",
            "-D__CUDA_ARCH__=800",
        ]);
        command.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/host"));
        command.args(options.iter().filter(|option| option.starts_with("-D")));
        let output = command.arg(at("cpp", n)).arg("-o").arg(at("so", n)).output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{log}");
        Ok(Ok(Cubin { bytes: at("so", n).to_str().unwrap().as_bytes().to_vec(), log }))
    }
}

/// Runs what it was given.
#[derive(Debug, Default)]
struct HostDriver {
    libraries: Mutex<Vec<Library>>,
    launches: AtomicUsize,
}

impl Driver for HostDriver {
    fn count(&self) -> Result<u32> {
        Ok(1)
    }
    fn facts(&self, _device: u32) -> Result<Facts> {
        Ok(Facts {
            name: "this machine".into(),
            capability: (8, 0),
            multiprocessors: 108,
            shared_bytes: 163 * 1024,
            clock_hz: 1.4e9,
            bandwidth: 1.5e12,
        })
    }
    fn load(&self, device: u32, cubin: &[u8], _entry: &CStr, _shared_bytes: u32) -> Result<Function> {
        let path = std::str::from_utf8(cubin).unwrap();
        // SAFETY: the library was compiled above, and does nothing when it is opened.
        let library = unsafe { Library::new(path) }.unwrap();
        // It is in memory now. The folder stays: another test may be about to write there.
        for file in [PathBuf::from(path), Path::new(path).with_extension("cpp")] {
            std::fs::remove_file(file).unwrap();
        }
        let mut libraries = self.libraries.lock().unwrap();
        libraries.push(library);
        Ok(Function { device, handle: libraries.len() - 1, registers: 0, local_bytes: 0 })
    }
    unsafe fn launch(&self, function: &Function, grid: Grid, _stream: usize, params: &[u8]) -> Result<()> {
        type Launch = unsafe extern "C" fn(*const c_void, c_uint, c_int) -> bool;
        // What stands in for a device is one for the process, whatever library asks: inline variables of C++ are shared by all.
        static DEVICE: Mutex<()> = Mutex::new(());
        let _alone = DEVICE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.launches.fetch_add(1, Ordering::SeqCst);
        let libraries = self.libraries.lock().unwrap();
        // SAFETY: launch.hpp defines it so; the parameters hold addresses of this process, whose extents the plan has proven.
        let is_done = unsafe {
            let launch: Symbol<'_, Launch> = libraries[function.handle].get(b"launch").unwrap();
            launch(params.as_ptr().cast(), grid.blocks, grid.threads as c_int)
        };
        assert!(is_done, "threads wait for one another for ever");
        Ok(())
    }
    fn encode(&self, _: &TmaTensor, _: usize) -> Result<TensorMap> {
        unreachable!("no tensor is moved by TMA")
    }
    fn allocate(&self, _: u32, _: usize, _: usize) -> Result<usize> {
        unreachable!("a run allocates nothing")
    }
    fn free(&self, _: u32, _: usize, _: usize) -> Result<()> {
        Ok(())
    }
    fn record(&self, _: u32, _: usize) -> Result<usize> {
        unreachable!("a run records nothing")
    }
    fn has_passed(&self, _: u32, _: usize) -> Result<bool> {
        Ok(true)
    }
    fn wait(&self, _: u32, _: usize, _: usize) -> Result<()> {
        unreachable!("a run waits for nothing")
    }
    fn end_event(&self, _: u32, _: usize) -> Result<()> {
        Ok(())
    }
    fn is_capturing(&self, _: u32, _: usize) -> Result<bool> {
        Ok(false)
    }
    unsafe fn read(&self, _: u32, address: usize, to: &mut [u8], _: usize) -> Result<()> {
        // SAFETY: an address of this process, where as many bytes lie.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }
}

const GPU: Device = Device::Cuda(0);

/// Of all tests: what one has compiled another need not.
fn backend() -> &'static Backend {
    static BACKEND: std::sync::OnceLock<Backend> = std::sync::OnceLock::new();
    BACKEND.get_or_init(|| {
        let artifacts = Artifacts::with_parts(Ok(Box::new(HostCompiler)), Cache::new(None), None);
        Backend::with_parts(Box::new(HostDriver::default()), artifacts)
    })
}

/// The same tensor as one of a GPU.
fn moved<'a>(name: &'static str, view: &View<'a>) -> View<'a> {
    let (dtype, shape, strides) = (view.dtype(), *view.shape(), *view.strides());
    // SAFETY: it is memory of this process, whatever it is called.
    unsafe { View::from_raw_parts(name, view.as_ptr(), dtype, shape, strides, GPU, view.extent()) }.unwrap()
}

fn moved_mut<'a>(name: &'static str, view: &mut ViewMut<'a>) -> ViewMut<'a> {
    let (dtype, shape, strides, extent) = (view.dtype(), *view.shape(), *view.strides(), view.extent());
    // SAFETY: as above; the view that it is made of is not used while it lives.
    unsafe { ViewMut::from_raw_parts(name, view.as_mut_ptr(), dtype, shape, strides, GPU, extent) }.unwrap()
}

fn moved_codes<'a>(name: &'static str, codes: &Option<Box<Codes<'a>>>) -> Option<Box<Codes<'a>>> {
    codes.as_deref().map(|codes| Box::new(Codes { descale: moved(name, &codes.descale), ..*codes }))
}

/// What a GPU would be asked: the spec knows what addresses are multiples of.
fn spec_of_gpu(spec: &Spec, tensors: &Tensors<'_>) -> Spec {
    let of = |view: &View<'_>| Alignment::of(GPU, view.address());
    let mut spec = spec.clone();
    spec.device = GPU;
    (spec.q.alignment, spec.k.alignment, spec.v.alignment) = (of(&tensors.q), of(&tensors.k), of(&tensors.v));
    spec.out.alignment = Alignment::of(GPU, tensors.out.address());
    if let (Some(mask), Some(view)) = (&mut spec.mask, &tensors.mask) {
        mask.alignment = of(view);
    }
    for (codes, given) in [(&mut spec.codes.k, &tensors.codes.k), (&mut spec.codes.v, &tensors.codes.v)] {
        if let (Some(codes), Some(given)) = (codes, given) {
            codes.descale.alignment = of(&given.descale);
        }
    }
    spec
}

/// Runs by one of `kernels`. `by_16`: counts runs whose tiles are copied 16 bytes at a time.
fn engine<'a>(backend: &'a Backend, kernels: [Kernel; 2], by_16: &'a Cell<usize>) -> Box<Engine<'a>> {
    Box::new(move |spec, mut tensors| {
        let spec = spec_of_gpu(spec, &tensors);
        let Tensors { codes, mask, sinks, alibi_slopes, .. } = &tensors;
        let codes = Qkv { q: None, k: moved_codes("k_descale", &codes.k), v: moved_codes("v_descale", &codes.v) };
        let [mask, sinks, alibi_slopes] = [("mask", mask), ("sinks", sinks), ("alibi_slopes", alibi_slopes)]
            .map(|(name, view)| view.as_ref().map(|view| moved(name, view)));
        let on_gpu = Tensors {
            codes,
            mask,
            sinks,
            alibi_slopes,
            dropout: tensors.dropout,
            lse: tensors.lse.as_mut().map(|lse| moved_mut("lse", lse)),
            ..Tensors::new(
                moved("q", &tensors.q),
                moved("k", &tensors.k),
                moved("v", &tensors.v),
                moved_mut("out", &mut tensors.out),
            )
        };
        let plan = backend.plan(&spec)?;
        assert!(kernels.contains(&plan.key().kernel) && plan.workspace_bytes() == 0, "{}", plan.explain());
        let is_wide = launch_plan(&plan).variant().is_some_and(|variant| variant.loads == Loads::By16Bytes);
        by_16.set(by_16.get() + usize::from(is_wide));
        let mut operands = Operands::check(on_gpu, plan.spec())?;
        // SAFETY: the driver runs on this thread, and has ended when it answers.
        unsafe { backend.run(&plan, &mut operands, DeviceMemory { address: 16, len_bytes: 0 }, 0) }
    })
}

/// What the first case of each kind has.
const KINDS: [fn(&Case) -> bool; 7] = [
    |case| case.poison && case.mask.is_some_and(|mask| mask.dtype == DType::Bool) && case.q[2] > 64,
    |case| case.mask.is_some_and(|mask| mask.dtype != DType::Bool) && case.sinks.is_some() && case.kv_len > 128,
    |case| case.causal.is_some() && case.mask.is_none() && case.kv_len > 128,
    |case| case.window != Window::default() && case.kv_len > 128,
    |case| case.softcap.is_some() && case.alibi_slopes.is_some() && case.q[1] > case.num_kv_heads,
    |case| case.q[2] == 1 && case.head_dim_v != case.q[3] && case.kv_len > 128,
    |case| case.dtype == DType::BF16 && case.mask.is_none() && case.softcap.is_none() && case.q[3] > 32,
];

#[test]
fn int8_computes_its_definition_on_any_strides() {
    let backend = backend();
    let by_16 = Cell::new(0);
    let mut engine = engine(backend, [Kernel::ForwardInt8, Kernel::Empty], &by_16);
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    for (n, kind) in KINDS.iter().enumerate() {
        let cases = (0..10_000).map(|seed| Case::random_int8(seed, &dtypes, 400_000));
        let case = cases.into_iter().find(kind).unwrap_or_else(|| panic!("no case of kind {n}"));
        replay(&mut *engine, &case).unwrap_or_else(|failure| panic!("kind {n}: {failure}"));
    }
    // Whole units of 16 bytes side by side, head dims that are swizzled and that are padded, and a group of heads in one block.
    let plain = Case { places: Places::default(), guard: Guard::Heap { shift: 0 }, ..Case::random_int8(0, &dtypes, 1) };
    for (n, (q, head_dim_v)) in [([1, 4, 70, 128], 64), ([2, 4, 5, 32], 96)].into_iter().enumerate() {
        let case =
            Case { q, head_dim_v, num_kv_heads: 2, kv_len: 300, rank: 4, mask: None, out_dtype: None, ..plain.clone() };
        replay(&mut *engine, &case).unwrap_or_else(|failure| panic!("by 16 bytes: {failure}"));
        assert!(by_16.get() > n, "tiles are copied 16 bytes at a time");
    }
    if std::env::var("RAPT_WHOLE").is_ok_and(|whole| whole == "1") {
        let config = Config { problems: 0, int8: 100, fixed: false, dtypes: dtypes.to_vec(), ..Config::default() };
        let report = conformance(&mut [engine], &config).unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!((report.count("int8"), report.count("unsupported")), (100, 0), "{report}");
    }
}
