//! The functions of NVRTC that are used, looked up in a library opened at run time.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::path::Path;

use super::library::{self, Library};

pub(crate) type Program = *mut c_void;
/// `NVRTC_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// How the name of its second library begins.
const BUILTINS: &str = if cfg!(windows) { "nvrtc-builtins64_" } else { "libnvrtc-builtins.so" };

macro_rules! functions {
    ($( $name:ident: fn($($argument:ty),*) -> $answer:ty; )*) => {
        /// The functions, and the library that keeps them valid.
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "NVIDIA's names")]
        pub(crate) struct Functions {
            $( pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $answer, )*
            _library: Library,
        }

        impl Functions {
            #[allow(non_snake_case, reason = "NVIDIA's names")]
            fn find(library: Library) -> Option<Self> {
                // SAFETY: the types are those of nvrtc.h, the same in CUDA 12 and 13.
                unsafe {
                    $( let $name = *library.get::<unsafe extern "C" fn($($argument),*) -> $answer>(stringify!($name)).ok()?; )*
                    Some(Functions { $($name,)* _library: library })
                }
            }
        }
    };
}

functions! {
    nvrtcVersion: fn(*mut c_int, *mut c_int) -> c_int;
    nvrtcGetErrorString: fn(c_int) -> *const c_char;
    nvrtcCreateProgram: fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
    nvrtcDestroyProgram: fn(*mut Program) -> c_int;
    nvrtcCompileProgram: fn(Program, c_int, *const *const c_char) -> c_int;
    nvrtcGetProgramLogSize: fn(Program, *mut usize) -> c_int;
    nvrtcGetProgramLog: fn(Program, *mut c_char) -> c_int;
    nvrtcGetCUBINSize: fn(Program, *mut usize) -> c_int;
    nvrtcGetCUBIN: fn(Program, *mut c_char) -> c_int;
}

impl Functions {
    /// The functions of the library at `path`, or of that name; with `loaded`, only if the process has it already.
    pub(crate) fn open(path: &OsStr, loaded: bool) -> Option<Self> {
        if loaded {
            return library::loaded(path).and_then(Functions::find);
        }
        load_builtins(Path::new(path));
        // SAFETY: opens NVIDIA's compiler, whose initialisers are its own.
        unsafe { library::open(path) }.and_then(Functions::find)
    }
}

/// NVRTC opens its second library by name alone, and not every release looks beside itself (13.0 does not): what is loaded
/// already is found by that name.
fn load_builtins(compiler: &Path) {
    let beside = compiler.parent().into_iter().flat_map(std::fs::read_dir).flatten().flatten();
    for file in beside.map(|entry| entry.path()) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(BUILTINS) {
            // SAFETY: opens NVIDIA's table of built-in functions, whose initialisers are its own.
            if let Some(library) = unsafe { library::open(file.as_os_str()) } {
                // It stays for as long as the compiler, which is the life of the process.
                std::mem::forget(library);
            }
        }
    }
}
