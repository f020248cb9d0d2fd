//! Machine code that NVRTC compiles, and what it reports of it.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::driver::{Compiler, Cubin, Nvrtc};
use crate::error::{CudaError, Result};
use crate::variant::KernelVariant;

static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Folders of Python packages in which NVRTC may lie, before those that this crate looks in by itself. No effect once it was found.
pub fn prepend_library_folders(folders: Vec<PathBuf>) {
    *FOLDERS.lock().unwrap_or_else(PoisonError::into_inner) = folders;
}

/// The NVRTC of this process.
///
/// # Errors
/// [`CudaError::NoCompiler`].
pub(super) fn find() -> Result<Box<dyn Compiler>> {
    let folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok(Box::new(Nvrtc::find(&folders)?))
}

/// Compiles `variant`.
///
/// # Errors
/// [`CudaError::Compile`] where the source is refused, else the compiler's.
pub(crate) fn compile(variant: &KernelVariant, compiler: &dyn Compiler) -> Result<Cubin> {
    compile_with(variant, compiler, &variant.options())
}

/// The same with what the assembler reports in any case: NVRTC has none of what it finds in its cache, which it keeps beside a driver.
///
/// # Errors
/// As [`compile`].
pub(crate) fn compile_with_log(variant: &KernelVariant, compiler: &dyn Compiler) -> Result<Cubin> {
    let cubin = compile(variant, compiler)?;
    if CompiledFacts::read(*variant, &cubin).is_some() {
        return Ok(cubin);
    }
    compile_with(variant, compiler, &[variant.options(), vec!["--no-cache".to_owned()]].concat())
}

fn compile_with(variant: &KernelVariant, compiler: &dyn Compiler, options: &[String]) -> Result<Cubin> {
    let refused = |log| CudaError::Compile { kernel: variant.to_string(), arch: variant.arch.name(), log };
    compiler.compile(variant.file_name(), &variant.source(), options)?.map_err(refused)
}

/// What the compiler reported of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct CompiledFacts {
    /// The kernel.
    pub variant: KernelVariant,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of spill stores in the kernel itself.
    pub spilled_bytes: u32,
    /// Whether its wgmma products are done one by one, for want of registers or because something else is done with them meanwhile.
    pub has_serial_products: bool,
    /// The size of the machine code.
    pub cubin_bytes: usize,
}

impl CompiledFacts {
    /// Reads the compiler's log: the entry's own lines, before those of functions that it calls.
    pub(crate) fn read(variant: KernelVariant, cubin: &Cubin) -> Option<Self> {
        let entry = cubin.log.split_once("Compiling entry function")?.1;
        let number_before = |word: &str| {
            let head = entry.split_once(word)?.0;
            head.split_whitespace().next_back()?.parse::<u32>().ok()
        };
        let spilled_bytes = number_before("bytes spill stores")?;
        let registers = entry.split_once("Used ")?.1.split_whitespace().next()?.parse().ok()?;
        let has_serial_products = cubin.log.contains("wgmma.mma_async instructions are serialized");
        Some(CompiledFacts { variant, registers, spilled_bytes, has_serial_products, cubin_bytes: cubin.bytes.len() })
    }
}
