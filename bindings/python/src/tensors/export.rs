//! What another library lent through DLPack.

use std::ffi::c_void;
use std::ptr::NonNull;

/// A consumed export: ends it when dropped. Held and dropped with the GIL.
pub(crate) struct Export {
    managed: NonNull<c_void>,
    /// Calls the deleter.
    end: unsafe fn(NonNull<c_void>),
}

impl Export {
    /// # Safety
    /// `managed` came out of a capsule that was renamed, so that nobody else ends it, and `end` is the function of its type.
    pub(super) unsafe fn new(managed: NonNull<c_void>, end: unsafe fn(NonNull<c_void>)) -> Self {
        Export { managed, end }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // SAFETY: `new` promises that this is the one owner, and so the one call, of the function of its type.
        unsafe { (self.end)(self.managed) };
    }
}
