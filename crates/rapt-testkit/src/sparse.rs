//! Address space without memory behind it: tensors whose strides reach past 2³¹ and 2³² elements cost the pages they touch.
//!
//! Unix only: a private anonymous mapping without reservation, which reads as zeros. Deliberately absent: guards; see
//! [`Memory`](crate::Memory).

use rapt_core::{DType, Device, Dims, Extent, View, ViewMut};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::buffer::element_offsets;
use crate::scalar::{decode, encode};

/// A tensor of four dimensions in a mapping of its own, as long as its strides reach.
#[derive(Debug)]
pub struct Sparse {
    dtype: DType,
    shape: [usize; 4],
    strides: [isize; 4],
    base: *mut u8,
    /// Where element 0 lies, in bytes.
    origin: usize,
    len: usize,
}

impl Sparse {
    /// Zeros in every element.
    ///
    /// # Panics
    /// If the system grants no such range, or the reach overflows.
    #[must_use]
    pub fn new(dtype: DType, shape: [usize; 4], strides: [isize; 4]) -> Self {
        let (mut before, mut after) = (0usize, 1usize);
        for (&n, stride) in shape.iter().zip(strides) {
            let span = n.saturating_sub(1).checked_mul(stride.unsigned_abs()).expect("a reach of 64 bits");
            if stride < 0 { before += span } else { after += span }
        }
        let size = dtype.size_bytes();
        let len = ((before + after) * size).next_multiple_of(rustix::param::page_size());
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping aliases nothing.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::PRIVATE | MapFlags::NORESERVE) };
        let base: *mut u8 = base.expect("a range of addresses").cast();
        // One element would cost a huge page. A system without them refuses, and that is as well.
        #[cfg(target_os = "linux")]
        // SAFETY: the mapping above.
        let _ = unsafe { rustix::mm::madvise(base.cast(), len, rustix::mm::Advice::LinuxNoHugepage) };
        Sparse { dtype, shape, strides, base, origin: before * size, len }
    }

    /// With `values` in every element, row-major, rounded to the dtype.
    ///
    /// # Panics
    /// As [`new`](Self::new), or if there are not as many values as elements.
    #[must_use]
    pub fn filled(dtype: DType, shape: [usize; 4], strides: [isize; 4], values: &[f64]) -> Self {
        let mut tensor = Sparse::new(dtype, shape, strides);
        assert_eq!(values.len(), shape.iter().product::<usize>(), "as many values as elements");
        let places = element_offsets(shape, strides);
        places.into_iter().zip(values).for_each(|(element, &value)| tensor.put_at(element, value));
        tensor
    }

    /// The byte at which an element lies, that many elements from element 0.
    fn byte(&self, element: isize) -> usize {
        (self.origin as isize + element * self.dtype.size_bytes() as isize) as usize
    }

    /// Sets one element.
    ///
    /// # Panics
    /// If the index is out of range.
    pub fn put(&mut self, index: [usize; 4], value: f64) {
        assert!(index.iter().zip(self.shape).all(|(i, n)| *i < n), "{index:?} of {:?}", self.shape);
        self.put_at(index.iter().zip(self.strides).map(|(&i, stride)| i as isize * stride).sum(), value);
    }

    fn put_at(&mut self, element: isize, value: f64) {
        let (at, mut bytes) = (self.byte(element), [0; 8]);
        let size = self.dtype.size_bytes();
        encode(self.dtype, value, &mut bytes[..size]);
        assert!(at + size <= self.len, "element {element} lies outside the mapping");
        // SAFETY: inside the mapping, as was just asserted; it is borrowed mutably.
        unsafe { self.base.add(at).copy_from_nonoverlapping(bytes.as_ptr(), size) };
    }

    /// Every element, row-major.
    #[must_use]
    pub fn values(&self) -> Vec<f64> {
        let size = self.dtype.size_bytes();
        let element = |element| {
            // SAFETY: an element of the shape, as in `put_at`; anonymous memory is initialised.
            let bytes = unsafe { std::slice::from_raw_parts(self.base.add(self.byte(element)), size) };
            decode(self.dtype, bytes)
        };
        element_offsets(self.shape, self.strides).into_iter().map(element).collect()
    }

    fn parts(&self) -> (*mut u8, Dims<usize>, Dims<isize>, Extent) {
        let extent = Extent::Proven { address: self.base as usize, len_bytes: self.len };
        (self.base.wrapping_add(self.origin), self.shape.into(), self.strides.into(), extent)
    }

    /// To be read.
    ///
    /// # Panics
    /// Never: a mapping holds what its strides reach.
    #[must_use]
    pub fn view(&self, tensor: &'static str) -> View<'_> {
        let (ptr, shape, strides, extent) = self.parts();
        // SAFETY: the mapping is borrowed, initialised, and as long as shape and strides reach.
        unsafe { View::from_raw_parts(tensor, ptr, self.dtype, shape, strides, Device::Cpu, extent) }
            .expect("a mapping holds what its strides reach")
    }

    /// To be written; with `skip` leading dimensions of 1 left out.
    ///
    /// # Panics
    /// If a dimension that is left out is not 1.
    #[must_use]
    pub fn view_mut(&mut self, tensor: &'static str, skip: usize) -> ViewMut<'_> {
        assert!(self.shape[..skip].iter().all(|&n| n == 1), "{:?} has no {skip} dimensions to leave out", self.shape);
        let (ptr, shape, strides, extent) = self.parts();
        let (shape, strides) = (Dims::new(&shape[skip..]), Dims::new(&strides[skip..]));
        let (shape, strides) = (shape.expect("fewer dimensions"), strides.expect("fewer dimensions"));
        // SAFETY: as in `view`, and borrowed mutably.
        unsafe { ViewMut::from_raw_parts(tensor, ptr, self.dtype, shape, strides, Device::Cpu, extent) }
            .expect("a mapping holds what its strides reach")
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}
