//! A tensor's form: what it says of itself but for its address.
//!
//! A request is planned by the forms of its tensors, and calls that were served before are found by them. Of an address a form
//! keeps what a kernel may depend on: its [`Alignment`].

use crate::{DType, Device, Shape, Strides, View, ViewMut};

/// What kernels may rely on of a tensor's address: a power of two of bytes that divides it.
///
/// At most 16 bytes, the widest load that a kernel chooses by an address. On the host one byte: no kernel there depends on more
/// than the size of an element, which every [`View`] has, so that plans do not multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alignment(u8);

impl Alignment {
    /// One byte: nothing is relied on.
    pub const NONE: Alignment = Alignment(0);
    /// 16 bytes.
    pub const MOST: Alignment = Alignment(4);

    /// That of `address` on `device`.
    #[inline]
    #[must_use]
    pub fn of(device: Device, address: usize) -> Self {
        match device {
            Device::Cpu => Alignment::NONE,
            // Below 5, which fits; 0 is a multiple of everything.
            _ => Alignment((address.trailing_zeros() as u8).min(Alignment::MOST.0)),
        }
    }

    /// What is assumed of memory of `device` that is not there yet: allocators of devices give whole units of 16 bytes and more.
    #[inline]
    #[must_use]
    pub fn assumed(device: Device) -> Self {
        Alignment::of(device, 0)
    }

    /// In bytes: 1, 2, 4, 8 or 16.
    #[must_use]
    pub const fn bytes(self) -> usize {
        1 << self.0
    }
}

/// What a tensor says of itself but for its address, in the order of dimensions in which it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorForm {
    /// The dtype of the elements.
    pub dtype: DType,
    /// Sizes.
    pub shape: Shape,
    /// Strides in elements.
    pub strides: Strides,
    /// Where it lies.
    pub device: Device,
    /// What its address is a multiple of, as far as a kernel may depend on it.
    pub alignment: Alignment,
}

impl TensorForm {
    /// The form of a tensor that has no address yet.
    #[inline]
    #[must_use]
    pub fn new(dtype: DType, shape: Shape, strides: Strides, device: Device) -> Self {
        TensorForm { dtype, shape, strides, device, alignment: Alignment::assumed(device) }
    }

    /// This form at `address`.
    #[inline]
    #[must_use]
    pub fn at(self, address: usize) -> Self {
        TensorForm { alignment: Alignment::of(self.device, address), ..self }
    }
}

impl From<&View<'_>> for TensorForm {
    #[inline]
    fn from(view: &View<'_>) -> Self {
        TensorForm::new(view.dtype(), *view.shape(), *view.strides(), view.device()).at(view.address())
    }
}

impl From<&ViewMut<'_>> for TensorForm {
    #[inline]
    fn from(view: &ViewMut<'_>) -> Self {
        TensorForm::new(view.dtype(), *view.shape(), *view.strides(), view.device()).at(view.address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alignment_divides_its_address_and_is_16_bytes_at_most() {
        let gpu = Device::Cuda(0);
        for (address, bytes) in [(0, 16), (1, 1), (2, 2), (12, 4), (24, 8), (48, 16), (1 << 20, 16), (usize::MAX, 1)] {
            assert_eq!(Alignment::of(gpu, address).bytes(), bytes, "{address}");
            assert_eq!(Alignment::of(Device::Cpu, address), Alignment::NONE, "{address}");
        }
        assert_eq!((Alignment::assumed(gpu), Alignment::assumed(Device::Cpu)), (Alignment::MOST, Alignment::NONE));
    }
}
