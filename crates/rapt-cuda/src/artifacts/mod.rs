//! Where machine code comes from: what the package ships ([`bundled`]), else what the disk keeps ([`cache`]), else the compiler
//! ([`nvrtc`]). Deliberately absent: devices.

pub(crate) mod bundled;
pub(crate) mod cache;
pub(crate) mod nvrtc;

pub use bundled::{ShippedFacts, set_shipped_folder};
pub use nvrtc::{CompiledFacts, prepend_library_folders};

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rapt_core::Arch;

use crate::driver::Compiler;
use crate::error::Result;
use crate::variant::KernelVariant;
use cache::{Cache, Name};

/// Where a kernel's machine code came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// Shipped with the package.
    Bundled,
    /// Kept on disk by an earlier compilation.
    Cached,
    /// Compiled in this process.
    Compiled,
}

impl Provenance {
    /// In words, for `explain`.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Provenance::Bundled => "shipped with the package",
            Provenance::Cached => "cached on disk by an earlier compilation",
            Provenance::Compiled => "compiled by NVRTC in this process",
        }
    }
}

/// The places that are looked into, and the compiler once it was found.
#[derive(Debug)]
pub(crate) struct Artifacts {
    compiler: OnceLock<Result<Box<dyn Compiler>>>,
    cache: Cache,
    /// Where a package ships kernels; `None` asks what [`set_shipped_folder`](crate::set_shipped_folder) was given.
    bundled: Option<PathBuf>,
}

impl Artifacts {
    /// Those of this process.
    pub(crate) fn of_process() -> Self {
        Artifacts { compiler: OnceLock::new(), cache: Cache::from_environment(), bundled: None }
    }

    #[cfg(test)]
    pub(crate) fn with_parts(compiler: Result<Box<dyn Compiler>>, cache: Cache, bundled: Option<PathBuf>) -> Self {
        Artifacts { compiler: OnceLock::from(compiler), cache, bundled }
    }

    fn bundled_folder(&self) -> Option<PathBuf> {
        self.bundled.clone().or_else(bundled::folder)
    }

    /// What the package ships for a device of this architecture.
    pub(crate) fn bundled(&self, arch: Arch) -> Option<ShippedFacts> {
        bundled::facts(&self.bundled_folder()?, arch)
    }

    /// Where machine code is kept, if it is.
    pub(crate) fn cache_folder(&self) -> Option<&Path> {
        self.cache.folder()
    }

    /// The compiler.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`](crate::CudaError::NoCompiler).
    pub(crate) fn compiler(&self) -> Result<&dyn Compiler> {
        self.compiler.get_or_init(nvrtc::find).as_deref().map_err(Clone::clone)
    }

    /// What `load` makes of the machine code of `variant`, and where it came from. What the package or the disk holds
    /// and `load` does not take counts as absent, as damaged code does.
    ///
    /// # Errors
    /// The compiler's; what `load` answers to code that was compiled just now.
    pub(crate) fn load<T>(
        &self,
        variant: &KernelVariant,
        load: impl Fn(&[u8]) -> Result<T>,
    ) -> Result<(T, Provenance)> {
        if let Some(folder) = self.bundled_folder()
            && let Some(cubin) = bundled::get(&folder, variant)
            && let Ok(loaded) = load(&cubin)
        {
            return Ok((loaded, Provenance::Bundled));
        }
        let compiler = self.compiler()?;
        let name = Name::new(variant, compiler.version(), "");
        if let Some(cubin) = self.cache.get(&name)
            && let Ok(loaded) = load(&cubin)
        {
            return Ok((loaded, Provenance::Cached));
        }
        let cubin = nvrtc::compile(variant, compiler)?;
        let loaded = load(&cubin.bytes)?;
        self.cache.put(&name, &cubin.bytes);
        Ok((loaded, Provenance::Compiled))
    }
}
