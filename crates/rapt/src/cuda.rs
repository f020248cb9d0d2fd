//! What this machine has of NVIDIA GPUs, for reports; [`Engine`](crate::Engine) is what runs on them.

pub use rapt_cuda::{
    Backend, Caps, CudaError, DeviceFacts, Mark, Memory, ShippedFacts, prepend_library_folders, select,
    set_shipped_folder,
};

/// Whether attention can be asked of an NVIDIA GPU here: a driver, and a device of an architecture that is served.
#[must_use]
pub fn is_available() -> bool {
    Backend::get().is_ok_and(|backend| {
        let count = backend.count().unwrap_or(0);
        (0..count).any(|index| backend.device(index).is_ok())
    })
}

/// What there is, in rows of a name and a text: devices, driver, compiler, cache; or why there is none.
#[must_use]
pub fn report() -> Vec<(String, String)> {
    let row = |name: &str, text: String| (name.to_owned(), text);
    let backend = match Backend::get() {
        Ok(backend) => backend,
        Err(error) => return vec![row("cuda", format!("not available: {error}"))],
    };
    let mut rows = match backend.count() {
        Ok(count) => vec![row("cuda", format!("{count} devices"))],
        Err(error) => return vec![row("cuda", format!("not available: {error}"))],
    };
    for index in 0..backend.count().unwrap_or(0) {
        let text = match backend.device(index) {
            Ok(device) => {
                let DeviceFacts { name, caps, .. } = device.as_ref();
                let shipped = backend.shipped(caps.arch).map_or_else(
                    || "no kernels shipped".to_owned(),
                    |ShippedFacts { arch, kernels, compiler: (major, minor) }| {
                        format!("{kernels} kernels shipped ({}, by NVRTC {major}.{minor})", arch.name())
                    },
                );
                format!("{name}, {}, {} multiprocessors, {shipped}", caps.arch.name(), caps.multiprocessors)
            }
            Err(error) => error.to_string(),
        };
        rows.push((format!("cuda:{index}"), text));
    }
    let compiler = backend.compiler_version();
    let compiler = compiler.map_or_else(|error| error.to_string(), |(major, minor)| format!("NVRTC {major}.{minor}"));
    let cache = backend.cache_folder().map_or("off".to_owned(), |folder| folder.display().to_string());
    rows.extend([row("cuda compiler", compiler), row("cuda cache", cache)]);
    rows
}
