//! What is lent for a call: by another library through DLPack, or a storage of torch's on an Apple GPU.

use std::ffi::c_void;
use std::ptr::NonNull;

use rapt::metal::Placed;

/// A loan, such as a consumed export: ends when dropped. Held and dropped with the GIL.
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

    /// A storage that has an address for as long.
    pub(super) fn of_storage(placed: Placed) -> Self {
        /// # Safety
        /// `managed` is the box below, and this its one owner.
        unsafe fn end(managed: NonNull<c_void>) {
            // SAFETY: as the caller promises.
            drop(unsafe { Box::from_raw(managed.cast::<Placed>().as_ptr()) });
        }
        Export { managed: NonNull::from(Box::leak(Box::new(placed))).cast(), end }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // SAFETY: `new` and `of_storage` promise that this is the one owner, and so the one call, of the function of its type.
        unsafe { (self.end)(self.managed) };
    }
}
