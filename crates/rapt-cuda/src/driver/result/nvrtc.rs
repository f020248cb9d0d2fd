//! NVRTC: found at run time, then source text to machine code.
//!
//! Looked for in this order: `RAPT_NVRTC` (a file or a folder), the library that the process has loaded already, the
//! folders that a binding names, `VIRTUAL_ENV`, `CUDA_HOME` and `CUDA_PATH`, the loader's own search path.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::path::{Path, PathBuf};

use crate::driver::sys::nvrtc::{Functions, Program, SUCCESS};
use crate::error::{CudaError, Result};

/// How a system calls the library, and where it lies.
struct Names {
    /// Of the library, newest first.
    libraries: [&'static str; 2],
    /// Where the wheels of NVIDIA put it, below site-packages.
    wheels: [&'static str; 2],
    /// Where CUDA's own installer puts it, below `CUDA_HOME`.
    toolkit: &'static [&'static str],
}

const UNIX: Names = Names {
    libraries: ["libnvrtc.so.13", "libnvrtc.so.12"],
    wheels: ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    toolkit: &["lib64"],
};
const WINDOWS: Names = Names {
    libraries: ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
    wheels: ["nvidia/cu13/bin/x86_64", "nvidia/cuda_nvrtc/bin"],
    toolkit: &["bin/x64", "bin"],
};
const HERE: &Names = if cfg!(windows) { &WINDOWS } else { &UNIX };

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

/// `lib/python3.*/site-packages` of a virtual environment, on Windows `Lib/site-packages`.
fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let lib = environment.join("lib");
    let versions = std::fs::read_dir(&lib).into_iter().flatten().flatten().map(|version| version.path());
    let folders = versions.chain([lib]).map(|folder| folder.join("site-packages"));
    folders.filter(|folder| folder.is_dir()).collect()
}

/// A place to look in: a library's file or its name, and whether only one that the process has loaded counts.
type Candidate = (PathBuf, bool);

impl Names {
    /// Where to look, in this order.
    fn candidates(&self, site: &[PathBuf], variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<Candidate> {
        let below = |folder: &Path| self.libraries.map(|name| (folder.join(name), false));
        if let Some(asked) = variable("RAPT_NVRTC") {
            // What was asked for by name is used or refused, never replaced by another.
            return if asked.is_dir() { below(&asked).to_vec() } else { vec![(asked, false)] };
        }
        let by_name = |loaded| self.libraries.map(|name| (PathBuf::from(name), loaded));
        let mut candidates = by_name(true).to_vec();
        let environment = variable("VIRTUAL_ENV").map(|environment| site_packages(&environment));
        for folder in site.iter().chain(environment.iter().flatten()) {
            candidates.extend(self.wheels.iter().flat_map(|wheel| below(&folder.join(wheel))));
        }
        for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable) {
            candidates.extend(self.toolkit.iter().flat_map(|folder| below(&home.join(folder))));
        }
        candidates.extend(by_name(false));
        candidates
    }
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
        for (file, loaded) in HERE.candidates(site, variable) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn searched(names: &Names, site: &[PathBuf], variables: &[(&str, &Path)]) -> Vec<String> {
        let of = |name: &str| variables.iter().find(|(is, _)| *is == name).map(|(_, value)| value.to_path_buf());
        let told = |(file, loaded): Candidate| {
            let file = file.display().to_string().replace('\\', "/");
            if loaded { format!("{file}, if loaded") } else { file }
        };
        names.candidates(site, of).into_iter().map(told).collect()
    }

    #[test]
    fn each_system_has_its_names_and_places() {
        let (site, home) = ([PathBuf::from("/s")], Path::new("/c"));
        let unix = searched(&UNIX, &site, &[("CUDA_PATH", home)]);
        let expected = [
            "libnvrtc.so.13, if loaded",
            "libnvrtc.so.12, if loaded",
            "/s/nvidia/cu13/lib/libnvrtc.so.13",
            "/s/nvidia/cu13/lib/libnvrtc.so.12",
            "/s/nvidia/cuda_nvrtc/lib/libnvrtc.so.13",
            "/s/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "/c/lib64/libnvrtc.so.13",
            "/c/lib64/libnvrtc.so.12",
            "libnvrtc.so.13",
            "libnvrtc.so.12",
        ];
        assert_eq!(unix, expected);
        let windows = searched(&WINDOWS, &site, &[("CUDA_PATH", home)]);
        assert_eq!(windows.len(), 2 + 4 + 4 + 2, "{windows:?}");
        assert_eq!(windows[0], "nvrtc64_130_0.dll, if loaded");
        assert_eq!(windows[2], "/s/nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll");
        assert_eq!(windows[5], "/s/nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll");
        assert_eq!(windows[6], "/c/bin/x64/nvrtc64_130_0.dll");
        assert_eq!(windows[9], "/c/bin/nvrtc64_120_0.dll");
    }

    #[test]
    fn what_is_asked_for_by_name_is_all_that_is_looked_for() {
        let folder = std::env::temp_dir().join(format!("rapt-nvrtc-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let asked = searched(HERE, &[PathBuf::from("/s")], &[("RAPT_NVRTC", &folder), ("CUDA_HOME", Path::new("/c"))]);
        let expected = HERE.libraries.map(|name| folder.join(name).display().to_string().replace('\\', "/"));
        assert_eq!(asked, expected);
        let file = folder.join("any");
        assert_eq!(searched(HERE, &[], &[("RAPT_NVRTC", &file)]), [file.display().to_string().replace('\\', "/")]);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn packages_of_an_environment_lie_where_each_system_puts_them() {
        let folder = std::env::temp_dir().join(format!("rapt-environment-{}", std::process::id()));
        for made in ["unix/lib/python3.12/site-packages", "windows/lib/site-packages"] {
            std::fs::create_dir_all(folder.join(made)).unwrap();
        }
        let found = |name: &str| site_packages(&folder.join(name));
        assert_eq!(found("unix"), [folder.join("unix/lib/python3.12/site-packages")]);
        assert_eq!(found("windows"), [folder.join("windows/lib/site-packages")]);
        assert!(found("none").is_empty());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
