//! Whose tensors a call is on.

/// Whose tensor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `torch.Tensor`.
    Torch,
    /// `numpy.ndarray`.
    Numpy,
    /// Anything with `__dlpack__`.
    DlPack,
}
