//! Where a run on a GPU was enqueued.

/// The driver's legacy default stream, which waits for every stream that is not declared apart from it.
pub(crate) const DEFAULT_STREAM: usize = 0;

/// A GPU, and a stream of it as the driver's handle.
#[derive(Clone, Copy)]
pub(crate) struct Enqueued {
    pub(crate) device: u32,
    pub(crate) stream: usize,
}
