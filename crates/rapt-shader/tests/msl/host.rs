//! Texts in Metal's language as programs of this machine.
//!
//! ```text
//! text ─► added lines ─► c++ -std=c++20 -fsanitize=thread ─┬─► shared library ─► rapt_run(buffers, workgroups)
//!                              lockstep.cpp ─► c++ ────────┘
//! ```
//! No line of the text is changed; added are the definition of `threadgroup` where it declares memory and not a pointer, which bytes that memory
//! has, the call of the kernel, and where the fields of `Params` must lie. Deliberately absent: Metal, and any library of ThreadSanitizer.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use libloading::Library;
use rapt_shader::{KernelVariant, Params};

const STDLIB: &str = include_str!("host/stdlib.h");
const MLX: &str = include_str!("host/mlx.h");
const SIMDGROUP: &str = include_str!("host/simdgroup.h");
const LOCKSTEP: &str = include_str!("host/lockstep.cpp");

/// Names by which `RAPT_REQUIRE` asks for a compiler of C++.
const NAME: &str = "c++";

/// The library of C checks, where it is asked to, that a jump stays on its stack; threads here have one each.
const FLAGS: [&str; 13] = [
    "-std=c++20",
    "-U_FORTIFY_SOURCE",
    "-O1",
    "-fPIC",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-missing-field-initializers",
    "-Werror",
    "-Wno-attributes",
    "-Wno-unknown-pragmas",
    "-c",
];

/// What the compiler may do with numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arithmetic {
    /// What compilers of Metal do that cannot be told otherwise: sums regrouped, quotients approximated, as if NaN and infinities did not exist.
    Fast,
    /// What the text says, and asks for. Numbers without a suffix are float32, as in Metal.
    AsWritten,
}

/// One buffer that is bound.
pub(crate) struct Bound {
    /// Its slot.
    pub(crate) index: u32,
    pub(crate) name: &'static str,
    /// The first byte.
    pub(crate) begin: *mut u8,
    pub(crate) len_bytes: usize,
    pub(crate) is_output: bool,
}

#[repr(C)]
struct RangeOf {
    name: *const c_char,
    begin: *mut u8,
    bytes: u64,
    rights: u32,
}

#[repr(C)]
struct LaunchOf {
    slots: *const *mut c_void,
    ranges: *const RangeOf,
    num_ranges: u32,
    threads: u32,
    groups: [u32; 2],
    message: *mut c_char,
    message_bytes: u64,
}

type Run = unsafe extern "C" fn(*const LaunchOf) -> c_int;

/// A text that was compiled and loaded.
pub(crate) struct Compiled {
    run: Run,
    /// One launch at a time: a library has one set of threads.
    one: Mutex<()>,
    _library: Library,
}

impl Compiled {
    /// Runs workgroups of `threads` threads on `buffers`, of which `params` is the first.
    ///
    /// # Errors
    /// What the first forbidden access was.
    pub(crate) fn run(
        &self,
        threads: usize,
        groups: (u32, u32),
        params: &Params,
        buffers: &[Bound],
    ) -> Result<(), String> {
        self.run_bytes(threads, groups, &params.bytes(), buffers)
    }

    /// As [`run`](Compiled::run), with the bytes of the parameters as they were handed over.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn run_bytes(
        &self,
        threads: usize,
        groups: (u32, u32),
        params: &[u8],
        buffers: &[Bound],
    ) -> Result<(), String> {
        // Of 16 bytes, as the vectors in it are.
        let mut words: Vec<u128> =
            params.chunks(16).map(|bytes| u128::from_ne_bytes(bytes.try_into().expect("a multiple of 16"))).collect();
        let of_params = Bound {
            index: 0,
            name: "params",
            begin: words.as_mut_ptr().cast(),
            len_bytes: params.len(),
            is_output: false,
        };
        let mut slots = [std::ptr::null_mut(); 31];
        let all = || std::iter::once(&of_params).chain(buffers);
        let names: Vec<CString> = all().map(|bound| CString::new(bound.name).expect("a name")).collect();
        let ranges: Vec<RangeOf> = all()
            .zip(&names)
            .map(|(bound, name)| {
                slots[bound.index as usize] = bound.begin.cast();
                let rights = if bound.is_output { 2 } else { 1 };
                RangeOf { name: name.as_ptr(), begin: bound.begin, bytes: bound.len_bytes as u64, rights }
            })
            .collect();
        let mut message = [0u8; 512];
        let launch = LaunchOf {
            slots: slots.as_ptr(),
            ranges: ranges.as_ptr(),
            num_ranges: ranges.len() as u32,
            threads: threads as u32,
            groups: [groups.0, groups.1],
            message: message.as_mut_ptr().cast(),
            message_bytes: message.len() as u64,
        };
        let _one = self.one.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: every pointer is to what lives until the call returns; the library accesses the bytes of ranges alone, which it checks, and
        // callers bind what they may read, or write where they say so.
        match unsafe { (self.run)(&launch) } {
            0 => Ok(()),
            _ => Err(String::from_utf8_lossy(&message).trim_end_matches('\0').to_owned()),
        }
    }
}

/// What lets the host run `text`, which is of `variant`: the text and added lines.
fn program(text: &str, variant: &KernelVariant) -> String {
    let (members, kernel) = text.split_once("[[kernel").expect("a kernel");
    let mut program = format!("{members}#undef threadgroup\n#define threadgroup alignas(1 << 16) static\n[[kernel");
    for line in kernel.lines() {
        program.push_str(line);
        program.push('\n');
        if let Some(name) = line.strip_prefix("    threadgroup ").and_then(|of| of.split([' ', '[', ';']).nth(1)) {
            program.push_str(&format!("    rapt_space(\"{name}\", &{name}, sizeof {name});\n"));
        }
    }
    for (name, offset) in Params::offsets() {
        program.push_str(&format!("static_assert(__builtin_offsetof(Params, {name}) == {offset});\n"));
    }
    let slots: String =
        variant.bindings().iter().map(|binding| format!(", Slot{{slots[{}]}}", binding.index)).collect();
    // Of kernels that ask for it, the number of the simdgroup.
    let simdgroup = if text.contains("[[simdgroup_index_in_threadgroup]]") { ", thread / 32" } else { "" };
    let (name, params) = (variant.entry(), "*static_cast<const Params*>(slots[0])");
    let call = format!("{name}({params}{slots}, {GROUP}, {GROUPS}, thread{simdgroup});");
    program.push_str(&format!("static_assert(sizeof(Params) == {});\n{}", Params::BYTES, entry(&call)));
    program
}

/// Where a workgroup is among all, as arguments.
pub(crate) const GROUP: &str = "metal::uint3{group[0], group[1], 0}";
pub(crate) const GROUPS: &str = "metal::uint3{groups[0], groups[1], 1}";

/// What lockstep.cpp calls of a text: these statements, for which `slots` has the buffers.
pub(crate) fn entry(statements: &str) -> String {
    format!(
        "struct Slot {{\n    void* at;\n    template <class T>\n    operator T*() const {{ return static_cast<T*>(at); }}\n}};\n\
         extern \"C\" __attribute__((no_sanitize(\"thread\"))) void rapt_kernel(void* const* slots, const uint* group, const uint* groups, uint thread) {{\n    \
         {statements}\n}}\n"
    )
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned())
}

/// Whether there is a compiler; if not, that is printed, and a failure if `RAPT_REQUIRE` names `c++`.
pub(crate) fn has_compiler() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let has = Command::new(compiler()).arg("--version").output().is_ok_and(|output| output.status.success());
        let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
        assert!(
            has || !required.split(',').any(|name| name == NAME),
            "RAPT_REQUIRE asks for {NAME}: no compiler of C++ is here"
        );
        if !has {
            println!("no compiler of C++: no text in Metal's language is run");
        }
        has
    })
}

fn call(arguments: &[&str], paths: &[&Path], out: &Path) -> Result<(), String> {
    let mut command = Command::new(compiler());
    command.args(arguments).args(paths).arg("-o").arg(out);
    let output = command.output().map_err(|error| format!("{}: {error}", compiler()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// The flags of this machine's processor.
const NATIVE: &str = if cfg!(target_arch = "x86_64") { "-march=native" } else { "-O1" };

/// Headers of others that a program may include.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Headers<'a> {
    /// The folder that they lie in.
    pub(crate) folder: &'a Path,
    /// Those among them that are others here: what each includes behind the host's mlx.h.
    pub(crate) replaced: &'a [(&'a str, &'a [&'a str])],
}

/// Bytes of workgroup memory of which the last access is known: those of the least element of texts, and of what is published.
const CELL_BYTES: [u32; 2] = [4, 2];

/// What runs workgroups, as an object for each of [`CELL_BYTES`]; and the folder of all, which has <metal_stdlib> too.
fn lockstep() -> &'static ([PathBuf; 2], PathBuf) {
    static LOCKSTEP_OBJECTS: LazyLock<([PathBuf; 2], PathBuf)> = LazyLock::new(|| {
        let mut hasher = DefaultHasher::new();
        (STDLIB, SIMDGROUP, MLX, LOCKSTEP, FLAGS, compiler()).hash(&mut hasher);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("msl-{:016x}", hasher.finish()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let object = CELL_BYTES.map(|bytes| folder.join(format!("lockstep{bytes}.o")));
        if !object.iter().all(|object| object.is_file()) {
            let source = folder.join("lockstep.cpp");
            std::fs::write(folder.join("metal_stdlib"), STDLIB).expect("a file");
            std::fs::write(folder.join("simdgroup.h"), SIMDGROUP).expect("a file");
            std::fs::write(folder.join("mlx.h"), MLX).expect("a file");
            std::fs::write(&source, LOCKSTEP).expect("a file");
            for (bytes, object) in CELL_BYTES.iter().zip(&object) {
                let cells = format!("-DRAPT_CELL_BYTES={bytes}");
                call(&[&FLAGS[..], &["-O2", NATIVE, &cells]].concat(), &[&source], object)
                    .unwrap_or_else(|error| panic!("{error}"));
            }
        }
        (object, folder)
    });
    &LOCKSTEP_OBJECTS
}

/// `text`, which is of `variant`, as a library.
///
/// # Errors
/// What the compiler says.
pub(crate) fn compile(text: &str, variant: &KernelVariant, arithmetic: Arithmetic) -> Result<Arc<Compiled>, String> {
    build(&program(text, variant), arithmetic)
}

/// The library of a program; compiled if the folder does not have it.
///
/// # Errors
/// What the compiler says.
pub(crate) fn build(program: &str, arithmetic: Arithmetic) -> Result<Arc<Compiled>, String> {
    build_with(program, arithmetic, None)
}

/// As [`build`], of a program that includes these headers: as they are, and without warnings.
///
/// # Errors
/// As there.
pub(crate) fn build_with(
    program: &str,
    arithmetic: Arithmetic,
    headers: Option<Headers<'_>>,
) -> Result<Arc<Compiled>, String> {
    static LOADED: LazyLock<Mutex<HashMap<u64, Arc<Compiled>>>> = LazyLock::new(Mutex::default);
    let loaded = || LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let arithmetic: &[&str] = match arithmetic {
        Arithmetic::Fast => &["-ffast-math"],
        Arithmetic::AsWritten => &["-ffp-contract=off", "-fsingle-precision-constant"],
    };
    let mut hasher = DefaultHasher::new();
    (program, arithmetic).hash(&mut hasher);
    let name = hasher.finish();
    if let Some(compiled) = loaded().get(&name) {
        return Ok(compiled.clone());
    }
    let (objects, folder) = lockstep();
    let path = folder.join(format!("{name:016x}.so"));
    if !path.is_file() {
        // Named by process and thread: tests run side by side.
        let own = format!("{name:016x}.{}.{:?}", std::process::id(), std::thread::current().id());
        let own = |end: &str| folder.join(format!("{own}.{end}"));
        let (source, of_text, library) = (own("cpp"), own("o"), own("so"));
        std::fs::write(&source, program).map_err(|error| error.to_string())?;
        let include = format!("-I{}", folder.display());
        let mut flags = [&FLAGS[..], arithmetic, &["-fsanitize=thread", NATIVE, &include]].concat();
        let of_headers = headers.map(|headers| format!("-I{}", headers.folder.display()));
        if let (Some(headers), Some(include)) = (headers, &of_headers) {
            flags.extend([include, "-w"]);
            for (header, includes) in headers.replaced {
                let header = folder.join(header);
                header.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(|error| error.to_string())?;
                let includes: String =
                    ["mlx.h"].iter().chain(*includes).map(|name| format!("#include \"{name}\"\n")).collect();
                std::fs::write(header, includes).map_err(|error| error.to_string())?;
            }
        }
        call(&flags, &[&source], &of_text)?;
        call(&["-shared"], &[&of_text, &objects[usize::from(headers.is_some())]], &library)?;
        std::fs::rename(&library, &path).map_err(|error| error.to_string())?;
        let _ = (std::fs::remove_file(source), std::fs::remove_file(of_text));
    }
    // SAFETY: the library is what was compiled here; it does nothing when it is loaded.
    let library = unsafe { Library::new(&path) }.map_err(|error| error.to_string())?;
    // SAFETY: lockstep.cpp has this function with this signature.
    let run = *unsafe { library.get::<Run>(b"rapt_run\0") }.map_err(|error| error.to_string())?;
    // Whoever was here first has it: one file has one set of threads, and so one lock.
    Ok(loaded()
        .entry(name)
        .or_insert_with(|| Arc::new(Compiled { run, one: Mutex::new(()), _library: library }))
        .clone())
}
