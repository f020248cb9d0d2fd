//! Pages of the system between two that may not be touched. Deliberately absent: systems without pages; there guards are on the heap.

/// The bytes of a page.
#[cfg(unix)]
pub(crate) fn size() -> usize {
    rustix::param::page_size()
}

/// `len` bytes, a multiple of a page, that may be read and written, with a page on both sides that may not; zeros.
#[cfg(unix)]
pub(crate) fn between_guards(len: usize) -> *mut u8 {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
    let mapped = len + 2 * size();
    // SAFETY: a fresh anonymous mapping aliases nothing.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::empty(), MapFlags::PRIVATE) };
    let base = start.expect("pages").cast::<u8>().wrapping_add(size());
    // SAFETY: base..base+len are the middle pages of the mapping above.
    unsafe { mprotect(base.cast(), len, MprotectFlags::READ | MprotectFlags::WRITE) }.expect("page rights");
    base
}

/// Gives them back.
///
/// # Safety
/// `base` is of [`between_guards`] with this `len`, and is not used afterwards.
#[cfg(unix)]
pub(crate) unsafe fn give_back(base: *mut u8, len: usize) {
    // SAFETY: the whole mapping, as the caller says.
    let _ = unsafe { rustix::mm::munmap(base.wrapping_sub(size()).cast(), len + 2 * size()) };
}

/// The bytes of a page.
#[cfg(windows)]
pub(crate) fn size() -> usize {
    use windows_sys::Win32::System::SystemInformation::{GetSystemInfo, SYSTEM_INFO};
    static SIZE: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *SIZE.get_or_init(|| {
        let mut info = std::mem::MaybeUninit::<SYSTEM_INFO>::zeroed();
        // SAFETY: the system writes all of it, which zeros are a value of too.
        let info = unsafe {
            GetSystemInfo(info.as_mut_ptr());
            info.assume_init()
        };
        info.dwPageSize as usize
    })
}

/// `len` bytes, a multiple of a page, that may be read and written, with a page on both sides that may not; zeros.
#[cfg(windows)]
pub(crate) fn between_guards(len: usize) -> *mut u8 {
    use windows_sys::Win32::System::Memory::{MEM_COMMIT, MEM_RESERVE, PAGE_NOACCESS, PAGE_READWRITE, VirtualAlloc};
    // SAFETY: fresh addresses alias nothing.
    let start = unsafe { VirtualAlloc(std::ptr::null(), len + 2 * size(), MEM_RESERVE, PAGE_NOACCESS) };
    assert!(!start.is_null(), "pages: {}", std::io::Error::last_os_error());
    let base = start.cast::<u8>().wrapping_add(size());
    // SAFETY: base..base+len are the middle pages of what was reserved above.
    let given = unsafe { VirtualAlloc(base.cast(), len, MEM_COMMIT, PAGE_READWRITE) };
    assert!(!given.is_null(), "page rights: {}", std::io::Error::last_os_error());
    base
}

/// Gives them back.
///
/// # Safety
/// `base` is of [`between_guards`], and is not used afterwards.
#[cfg(windows)]
pub(crate) unsafe fn give_back(base: *mut u8, _len: usize) {
    use windows_sys::Win32::System::Memory::{MEM_RELEASE, VirtualFree};
    // SAFETY: what was reserved, from its first byte, as the caller says.
    let _ = unsafe { VirtualFree(base.wrapping_sub(size()).cast(), 0, MEM_RELEASE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_fresh_writable_and_whole() {
        let len = 3 * size();
        let base = between_guards(len);
        assert!(size().is_power_of_two() && (base as usize).is_multiple_of(size()));
        // SAFETY: `len` bytes of our own.
        let bytes = unsafe { std::slice::from_raw_parts_mut(base, len) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(1);
        // SAFETY: of `between_guards`, and last used above.
        unsafe { give_back(base, len) };
    }

    /// The process of the next test, which must not survive.
    #[test]
    fn the_byte_beside_is_refused() {
        const WHICH: &str = "STRAY_BYTE";
        if let Ok(side) = std::env::var(WHICH) {
            let base = between_guards(size());
            let stray = if side == "front" { base.wrapping_sub(1) } else { base.wrapping_add(size()) };
            // SAFETY: none: the system ends the process.
            println!("survived with {}", unsafe { stray.read_volatile() });
            return;
        }
        for side in ["front", "back"] {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "pages::tests::the_byte_beside_is_refused", "--nocapture"]).env(WHICH, side);
            let output = child.output().unwrap();
            assert!(!output.status.success(), "{side}: {output:?}");
            assert!(!String::from_utf8_lossy(&output.stdout).contains("survived"), "{side}: {output:?}");
        }
    }
}
