//! A library that is opened at run time, as each system does it. Deliberately absent: where one is looked for.

use std::ffi::OsStr;

#[cfg(unix)]
pub(crate) use libloading::os::unix::Library;
#[cfg(windows)]
pub(crate) use libloading::os::windows::Library;

/// The library at `path`, or of that name; one by its name alone is looked for by the system.
///
/// # Safety
/// Its initialisers run: what it is must be known.
#[cfg(unix)]
pub(crate) unsafe fn open(path: &OsStr) -> Option<Library> {
    use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};
    // SAFETY: as of the caller.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()
}

/// The same, if the process has it already.
#[cfg(unix)]
pub(crate) fn loaded(name: &OsStr) -> Option<Library> {
    use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};
    /// Only what is loaded already.
    const RTLD_NOLOAD: std::ffi::c_int = if cfg!(target_os = "macos") { 0x10 } else { 4 };
    // SAFETY: nothing is loaded, and no initialiser runs.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) }.ok()
}

/// The library at `path`, or of that name; one by its name alone is looked for by the system. What a library at a path needs is looked for
/// beside it first.
///
/// # Safety
/// Its initialisers run: what it is must be known.
#[cfg(windows)]
pub(crate) unsafe fn open(path: &OsStr) -> Option<Library> {
    use libloading::os::windows::LOAD_WITH_ALTERED_SEARCH_PATH;
    // With a name alone or a relative path the system leaves open what the flag means.
    let flags = if std::path::Path::new(path).is_absolute() { LOAD_WITH_ALTERED_SEARCH_PATH } else { 0 };
    // SAFETY: as of the caller.
    unsafe { Library::load_with_flags(path, flags) }.ok()
}

/// The same, if the process has it already.
#[cfg(windows)]
pub(crate) fn loaded(name: &OsStr) -> Option<Library> {
    Library::open_already_loaded(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library that every process of the system has, and one that it ships and no test loads.
    const NAMES: (&str, &str) = if cfg!(windows) {
        ("kernel32.dll", "version.dll")
    } else if cfg!(target_os = "macos") {
        ("libSystem.B.dylib", "libncurses.5.4.dylib")
    } else {
        ("libc.so.6", "libanl.so.1")
    };

    #[cfg(any(windows, target_os = "macos", target_env = "gnu"))]
    #[test]
    fn what_is_loaded_is_told_from_what_is_not() {
        let (there, other) = (OsStr::new(NAMES.0), OsStr::new(NAMES.1));
        assert!(loaded(there).is_some());
        assert!(loaded(other).is_none());
        // SAFETY: the system's own.
        let opened = unsafe { open(other) };
        assert!(opened.is_some());
        assert!(loaded(other).is_some());
        // SAFETY: there is none.
        assert!(unsafe { open(OsStr::new("rapt-no-such-library")) }.is_none());
    }
}
