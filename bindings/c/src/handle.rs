//! Handles: what Rapt owns for C, behind a pointer from its creation to its destruction.

use crate::abi::rapt_error;
use crate::read::to_write;
use crate::refusal::{Refusal, guard};

/// Makes a handle of what `make` gives, and writes it to `place`.
pub(crate) fn create<T>(
    place: *mut *mut T,
    name: &'static str,
    make: impl FnOnce() -> Result<T, Refusal>,
) -> rapt_error {
    guard(|| {
        let place = to_write(place, name)?;
        let made = Box::into_raw(Box::new(make()?));
        // SAFETY: neither NULL nor unaligned; that it may be written is the caller's word.
        unsafe { place.write(made) };
        Ok(())
    })
}

/// # Safety
/// `handle` came from [`create`] and was not destroyed before, or is NULL.
pub(crate) unsafe fn destroy<T>(handle: *mut T) {
    if !handle.is_null() {
        guard(|| {
            // SAFETY: made by `Box::into_raw` in `create`; the rest is the caller's word.
            drop(unsafe { Box::from_raw(handle) });
            Ok(())
        });
    }
}
