//! An owned, row-major tensor: what [`attention`](crate::attention) answers.

use crate::{DType, Element, Error, Result, Shape, View, ViewMut, Workspace};
use rapt_core::{Device, Extent};

/// An owned, row-major tensor in host memory.
#[derive(Debug)]
pub struct Tensor {
    dtype: DType,
    shape: Shape,
    data: Workspace,
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Error::Overflow`], [`Error::OutOfMemory`].
    pub fn zeros(dtype: DType, shape: Shape) -> Result<Self> {
        let overflow = Error::Overflow { tensor: "tensor", shape, strides: [].into() };
        let bytes = shape.numel().and_then(|n| n.checked_mul(dtype.size_bytes())).ok_or(overflow)?;
        let mut data = Workspace::new();
        data.ensure(bytes)?;
        // SAFETY: `ensure` made at least `bytes` bytes writable; 0 bytes need none.
        unsafe { data.as_mut_ptr().write_bytes(0, bytes) };
        Ok(Tensor { dtype, shape, data })
    }

    /// The dtype of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The sizes, outermost first.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// This tensor to be read.
    ///
    /// # Errors
    /// None in practice: the shape was checked when the tensor was made.
    pub fn view(&self) -> Result<View<'_>> {
        let strides = self.shape.contiguous().expect("checked by zeros");
        let extent = Extent::Proven { address: self.data.as_ptr() as usize, len_bytes: self.data.len_bytes() };
        // SAFETY: the workspace holds numel elements of this dtype, written by `zeros`, borrowed with self.
        unsafe {
            View::from_raw_parts("tensor", self.data.as_ptr(), self.dtype, self.shape, strides, Device::Cpu, extent)
        }
    }

    /// This tensor to be written.
    ///
    /// # Errors
    /// None in practice: the shape was checked when the tensor was made.
    pub fn view_mut(&mut self) -> Result<ViewMut<'_>> {
        let strides = self.shape.contiguous().expect("checked by zeros");
        let ptr = self.data.as_mut_ptr();
        let extent = Extent::Proven { address: ptr as usize, len_bytes: self.data.len_bytes() };
        // SAFETY: as in `view`, borrowed mutably.
        unsafe { ViewMut::from_raw_parts("tensor", ptr, self.dtype, self.shape, strides, Device::Cpu, extent) }
    }

    /// The elements in row-major order.
    ///
    /// # Errors
    /// [`Error::OtherDtype`] if `T` is not the dtype of the tensor.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::OtherDtype { tensor: "tensor", expected: T::DTYPE, got: self.dtype });
        }
        let numel = self.shape.numel().expect("checked by zeros");
        if numel == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: numel elements of T lie at the start of the workspace, aligned to 64 bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.data.as_ptr().cast::<T>(), numel) }.to_vec())
    }
}
