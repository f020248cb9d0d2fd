//! NVRTC: found at run time, then source text to machine code.
//!
//! Looked for in this order: `RAPT_NVRTC` (a file or a folder), the library that the process has loaded already, the
//! folders that a binding names, `VIRTUAL_ENV`, `CUDA_HOME` and `CUDA_PATH`, the loader's own search path.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::path::{Path, PathBuf};

use crate::driver::sys::nvrtc::{Functions, Program, SUCCESS};
use crate::error::{CudaError, Result};

/// Names of the library, newest first.
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];
/// Where the wheels of NVIDIA put it, below site-packages.
const WHEELS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

/// Machine code and what the compiler said of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cubin {
    pub(crate) bytes: Vec<u8>,
    pub(crate) log: String,
}

/// What turns source into machine code.
pub(crate) trait Compiler: Send + Sync + std::fmt::Debug {
    /// Major and minor.
    fn version(&self) -> (i32, i32);

    /// Compiles `source` with `options`. `Ok(Err(log))` if the source is refused.
    ///
    /// # Errors
    /// [`CudaError::Compiler`] for any other failure.
    fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<std::result::Result<Cubin, String>>;
}

/// NVRTC itself.
#[derive(Debug)]
pub(crate) struct Nvrtc {
    functions: Functions,
    version: (i32, i32),
}

fn below(folder: &Path) -> impl Iterator<Item = PathBuf> + '_ {
    NAMES.iter().map(|name| folder.join(name))
}

/// `lib/python3.*/site-packages` of a virtual environment.
fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let versions = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    versions.map(|version| version.path().join("site-packages")).filter(|folder| folder.is_dir()).collect()
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

impl Nvrtc {
    /// The first NVRTC that is found; `site` are folders of Python packages.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`] with the places.
    pub(crate) fn find(site: &[PathBuf]) -> Result<Self> {
        let mut searched = Vec::new();
        let mut candidates: Vec<(PathBuf, bool)> = Vec::new();
        if let Some(asked) = variable("RAPT_NVRTC") {
            // What was asked for by name is used or refused, never replaced by another.
            let files = if asked.is_dir() { below(&asked).collect() } else { vec![asked] };
            candidates.extend(files.into_iter().map(|file| (file, false)));
        } else {
            candidates.extend(NAMES.iter().map(|name| (PathBuf::from(name), true)));
            let environment = variable("VIRTUAL_ENV").map(|environment| site_packages(&environment));
            for folder in site.iter().chain(environment.iter().flatten()) {
                candidates.extend(
                    WHEELS
                        .iter()
                        .flat_map(|wheel| below(&folder.join(wheel)).collect::<Vec<_>>())
                        .map(|file| (file, false)),
                );
            }
            for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable) {
                candidates.extend(below(&home.join("lib64")).map(|file| (file, false)));
            }
            candidates.extend(NAMES.iter().map(|name| (PathBuf::from(name), false)));
        }
        for (file, loaded) in candidates {
            let opened = (loaded || file.components().count() == 1 || file.is_file())
                .then(|| Functions::open(OsStr::new(&file), loaded))
                .flatten();
            if let Some(functions) = opened {
                return Nvrtc::new(functions);
            }
            if !loaded {
                searched.push(file.display().to_string());
            }
        }
        Err(CudaError::NoCompiler { searched })
    }

    fn new(functions: Functions) -> Result<Self> {
        let (mut major, mut minor) = (0, 0);
        let mut nvrtc = Nvrtc { functions, version: (0, 0) };
        // SAFETY: two integers are written.
        let code = unsafe { (nvrtc.functions.nvrtcVersion)(&raw mut major, &raw mut minor) };
        nvrtc.check("nvrtcVersion", code)?;
        nvrtc.version = (major, minor);
        Ok(nvrtc)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: a static string for every code.
        let text = unsafe { CStr::from_ptr((self.functions.nvrtcGetErrorString)(code)) };
        Err(CudaError::Compiler { call, code, text: text.to_string_lossy().into_owned() })
    }

    /// A text or code of the program: its size by `size`, then its bytes by `get`.
    fn bytes(
        &self,
        program: Program,
        call: &'static str,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the caller holds the program; one integer is written.
        self.check(call, unsafe { size(program, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer is as long as `size` said.
        self.check(call, unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

/// Ends a program.
struct Held<'a>(&'a Nvrtc, Program);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram, ended once.
        let _ = unsafe { (self.0.functions.nvrtcDestroyProgram)(&raw mut self.1) };
    }
}

impl Compiler for Nvrtc {
    fn version(&self) -> (i32, i32) {
        self.version
    }

    fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<std::result::Result<Cubin, String>> {
        let text = |text: &str| {
            CString::new(text).map_err(|_| CudaError::Compiler {
                call: "compile",
                code: -1,
                text: "a NUL in text".into(),
            })
        };
        let (source, name) = (text(source)?, text(name)?);
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: both are a `CString`, which ends in NUL and outlives the call; of headers there are 0.
        let code = unsafe {
            let create = self.functions.nvrtcCreateProgram;
            create(&raw mut program, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        self.check("nvrtcCreateProgram", code)?;
        let held = Held(self, program);
        let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
        // SAFETY: `check` passed the program as made, and `held` ends it; the options, each a `CString`, outlive the call, and `count` is their
        // number.
        let compiled = unsafe { (self.functions.nvrtcCompileProgram)(held.1, count, pointers.as_ptr()) };
        let f = &self.functions;
        let log = self.bytes(held.1, "nvrtcGetProgramLog", f.nvrtcGetProgramLogSize, f.nvrtcGetProgramLog)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if let Err(error) = self.check("nvrtcCompileProgram", compiled) {
            return Ok(Err(if log.is_empty() { error.to_string() } else { log }));
        }
        let bytes = self.bytes(held.1, "nvrtcGetCUBIN", f.nvrtcGetCUBINSize, f.nvrtcGetCUBIN)?;
        Ok(Ok(Cubin { bytes, log }))
    }
}
