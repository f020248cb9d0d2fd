//! A view: where a tensor lies. Building one from raw parts is the one unsafe constructor; everything after it is safe.
//!
//! Invariant of every [`View`] and [`ViewMut`]: the data pointer is a multiple of the element size, and each address
//! reached by its shape and strides lies inside its extent. The extent is *proven* where the producer tells its storage
//! (a slice, a torch tensor) and *declared* where it does not (C, DLPack, numpy): then the span of shape and strides is
//! taken at its word. Deliberately absent: ownership, and conversion of elements.

use std::marker::PhantomData;
use std::ops::Range;

use crate::overlap::{Decision, Footprint, are_disjoint, is_injective};
use crate::{DType, Device, Dims, Element, Error, Result, Shape, Strides};

/// What is known of the memory behind a data pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The producer told where its storage begins and how long it is.
    Proven {
        /// The address of the first byte of the storage.
        address: usize,
        /// The length of the storage.
        len_bytes: usize,
    },
    /// The producer told nothing: the span of shape and strides is taken as declared.
    Declared,
}

/// Shape, strides and origin of a tensor: what [`View`] and [`ViewMut`] share.
#[derive(Clone, Copy, Debug)]
struct Parts {
    address: usize,
    dtype: DType,
    shape: Shape,
    strides: Strides,
    device: Device,
    extent: Extent,
    /// The bytes reached by shape and strides, relative to `address`.
    reach: (isize, isize),
}

/// The bytes reached by `shape` and `strides`, relative to the address of element 0: `lo..hi`. Empty tensors reach `0..0`.
fn reach_bytes(tensor: &'static str, dtype: DType, shape: &Shape, strides: &Strides) -> Result<(isize, isize)> {
    let overflow = || Error::Overflow { tensor, shape: *shape, strides: *strides };
    if shape.numel().is_none() && !strides_may_repeat(shape, strides) {
        return Err(overflow());
    }
    if shape.contains(&0) {
        return Ok((0, 0));
    }
    let size = isize::try_from(dtype.size_bytes()).map_err(|_| overflow())?;
    let (mut lo, mut hi) = (0isize, 0isize);
    for (&n, &stride) in shape.iter().zip(strides.iter()) {
        let last = isize::try_from(n - 1).map_err(|_| overflow())?;
        let span = last.checked_mul(stride).ok_or_else(overflow)?;
        if span < 0 {
            lo = lo.checked_add(span).ok_or_else(overflow)?;
        } else {
            hi = hi.checked_add(span).ok_or_else(overflow)?;
        }
    }
    let lo = lo.checked_mul(size).ok_or_else(overflow)?;
    let hi = hi.checked_add(1).and_then(|n| n.checked_mul(size)).ok_or_else(overflow)?;
    Ok((lo, hi))
}

/// A shape whose element count overflows is still addressable if enough of its strides are zero.
fn strides_may_repeat(shape: &Shape, strides: &Strides) -> bool {
    shape.iter().zip(strides.iter()).any(|(&n, &stride)| n > 1 && stride == 0)
}

/// The bytes that a tensor reaches, checked against its address and its storage.
fn checked_reach(
    tensor: &'static str,
    address: usize,
    dtype: DType,
    shape: &Shape,
    strides: &Strides,
    extent: Extent,
) -> Result<(isize, isize)> {
    if shape.len() != strides.len() {
        return Err(Error::Rank {
            tensor,
            got: strides.len(),
            shape: *shape,
            allowed: "its strides must have as many dimensions as its shape",
        });
    }
    let (lo, hi) = reach_bytes(tensor, dtype, shape, strides)?;
    if lo != hi {
        if address == 0 {
            return Err(Error::NullData { tensor, shape: *shape });
        }
        let align_bytes = dtype.size_bytes().max(1);
        if !address.is_multiple_of(align_bytes) {
            return Err(Error::Unaligned { tensor, dtype, align_bytes });
        }
        // Addresses are positive isize values on every platform served.
        let overflow = || Error::Overflow { tensor, shape: *shape, strides: *strides };
        address.checked_add_signed(lo).ok_or_else(overflow)?;
        address.checked_add_signed(hi).ok_or_else(overflow)?;
        if let Extent::Proven { address: start, len_bytes } = extent {
            let storage_lo = start as i128 - address as i128;
            let storage_hi = storage_lo + len_bytes as i128;
            if (lo as i128) < storage_lo || (hi as i128) > storage_hi {
                return Err(Error::OutOfExtent {
                    tensor,
                    shape: *shape,
                    strides: *strides,
                    lo,
                    hi,
                    storage_lo: isize::try_from(storage_lo).unwrap_or(isize::MIN),
                    storage_hi: isize::try_from(storage_hi).unwrap_or(isize::MAX),
                });
            }
        }
    }
    Ok((lo, hi))
}

impl Parts {
    /// Inlined, so that a caller writes the parts where they are to lie and copies them nowhere; the checks are a call.
    #[inline]
    fn new(
        tensor: &'static str,
        address: usize,
        dtype: DType,
        shape: Shape,
        strides: Strides,
        device: Device,
        extent: Extent,
    ) -> Result<Self> {
        let reach = checked_reach(tensor, address, dtype, &shape, &strides, extent)?;
        Ok(Parts { address, dtype, shape, strides, device, extent, reach })
    }

    fn footprint(&self) -> Footprint<'_> {
        Footprint {
            address: self.address,
            size_bytes: self.dtype.size_bytes(),
            shape: &self.shape,
            strides: &self.strides,
        }
    }

    /// The addresses reached: `lo..hi`. They were added up without overflow when the parts were made.
    fn span(&self) -> (usize, usize) {
        (self.address.wrapping_add_signed(self.reach.0), self.address.wrapping_add_signed(self.reach.1))
    }

    fn index(&self, dim: usize, at: usize) -> Self {
        assert!(at < self.shape[dim], "index {at} of dimension {dim} of {}", self.shape);
        let keep = |d: &usize| *d != dim;
        let shape: Vec<usize> = (0..self.shape.len()).filter(keep).map(|d| self.shape[d]).collect();
        let strides: Vec<isize> = (0..self.strides.len()).filter(keep).map(|d| self.strides[d]).collect();
        // An empty rest reaches nothing, and its pointer is never moved.
        let step = if shape.contains(&0) { 0 } else { self.strides[dim] * self.dtype.size_bytes() as isize };
        let offset = step * at as isize;
        let shape = Dims::new(&shape).expect("fewer dimensions than before");
        let strides = Dims::new(&strides).expect("fewer dimensions than before");
        let reach = reach_bytes("view", self.dtype, &shape, &strides).expect("a part of what was checked");
        Parts { address: self.address.wrapping_add_signed(offset), shape, strides, reach, ..*self }
    }
}

impl Parts {
    /// Elements `range` of dimension `dim`. A part without elements reaches nothing, and its pointer is not moved.
    fn narrow(&self, dim: usize, range: &Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.shape[dim],
            "{range:?} of dimension {dim} of {}",
            self.shape
        );
        let mut shape = self.shape.to_vec();
        shape[dim] = range.end - range.start;
        let step = if shape.contains(&0) { 0 } else { self.strides[dim] * self.dtype.size_bytes() as isize };
        let shape = Dims::new(&shape).expect("as many dimensions as before");
        let reach = reach_bytes("view", self.dtype, &shape, &self.strides).expect("a part of what was checked");
        Parts { address: self.address.wrapping_add_signed(step * range.start as isize), shape, reach, ..*self }
    }
}

macro_rules! accessors {
    () => {
        /// The dtype of the elements.
        #[must_use]
        pub fn dtype(&self) -> DType {
            self.parts.dtype
        }
        /// The sizes, outermost first.
        #[must_use]
        pub fn shape(&self) -> &Shape {
            &self.parts.shape
        }
        /// The strides in elements, outermost first.
        #[must_use]
        pub fn strides(&self) -> &Strides {
            &self.parts.strides
        }
        /// Where the elements lie.
        #[must_use]
        pub fn device(&self) -> Device {
            self.parts.device
        }
        /// What is known of the memory behind the pointer.
        #[must_use]
        pub fn extent(&self) -> Extent {
            self.parts.extent
        }
        /// The address of the element with index 0.
        #[must_use]
        pub fn address(&self) -> usize {
            self.parts.address
        }
        /// The bytes reached by shape and strides, relative to [`address`](Self::address): `lo..hi`.
        #[must_use]
        pub fn reach_bytes(&self) -> (isize, isize) {
            self.parts.reach
        }
    };
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    ptr: *const u8,
    parts: Parts,
    owner: PhantomData<&'a [u8]>,
}

/// A tensor that is written.
#[derive(Debug)]
pub struct ViewMut<'a> {
    ptr: *mut u8,
    parts: Parts,
    owner: PhantomData<&'a mut [u8]>,
}

// SAFETY: a View is a shared borrow of plain elements, as `&[T]` is; every `Element` is Send and Sync.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}
// SAFETY: a ViewMut is an exclusive borrow of plain elements, as `&mut [T]` is.
unsafe impl Send for ViewMut<'_> {}
// SAFETY: a shared ViewMut gives no access to elements.
unsafe impl Sync for ViewMut<'_> {}

/// Whether elements of `from` are elements of `to`, bit for bit: any but bool of the same size.
fn reinterpreted(tensor: &'static str, from: DType, to: DType) -> Result<DType> {
    let fits = from.size_bytes() == to.size_bytes() && to != DType::Bool && to != DType::Unknown;
    if fits { Ok(to) } else { Err(Error::OtherDtype { tensor, expected: to, got: from }) }
}

impl<'a> View<'a> {
    accessors!();

    /// The same bytes as elements of another dtype of the same size: how codes of a float are read as bytes.
    /// `tensor` names it in errors.
    ///
    /// # Errors
    /// [`Error::OtherDtype`] if the sizes differ, or `dtype` is bool, of which not every byte is a value.
    pub fn reinterpreted(&self, tensor: &'static str, dtype: DType) -> Result<Self> {
        let dtype = reinterpreted(tensor, self.parts.dtype, dtype)?;
        Ok(View { parts: Parts { dtype, ..self.parts }, ..*self })
    }

    /// A view into `slice`, whose element 0 lies at `offset`. The extent is proven. `tensor` names it in errors.
    ///
    /// # Errors
    /// [`Error::OutOfExtent`] and [`Error::Overflow`] if shape and strides leave the slice; [`Error::Rank`].
    pub fn strided<T: Element>(
        tensor: &'static str,
        slice: &'a [T],
        offset: usize,
        shape: Shape,
        strides: Strides,
    ) -> Result<Self> {
        if offset > slice.len() {
            return Err(Error::Overflow { tensor, shape, strides });
        }
        let extent = Extent::Proven { address: slice.as_ptr() as usize, len_bytes: size_of_val(slice) };
        let ptr = slice.as_ptr().wrapping_add(offset).cast();
        // SAFETY: the extent is that of a live slice, borrowed for 'a, of elements with this dtype.
        unsafe { View::from_raw_parts(tensor, ptr, T::DTYPE, shape, strides, Device::Cpu, extent) }
    }

    /// A row-major view of the whole of `slice`.
    ///
    /// # Errors
    /// [`Error::OutOfExtent`] if `shape` has more elements than the slice; [`Error::Overflow`].
    pub fn contiguous<T: Element>(tensor: &'static str, slice: &'a [T], shape: Shape) -> Result<Self> {
        let strides = shape.contiguous().ok_or(Error::Overflow { tensor, shape, strides: Strides::from([]) })?;
        View::strided(tensor, slice, 0, shape, strides)
    }

    /// A view of foreign memory. Strides are in elements.
    ///
    /// # Errors
    /// [`Error::Overflow`], [`Error::OutOfExtent`], [`Error::NullData`], [`Error::Unaligned`], [`Error::Rank`].
    ///
    /// # Safety
    /// For 'a, every element reached by shape and strides, and the whole of a proven extent, must be readable
    /// memory of `device` that nobody writes, holding elements of `dtype`.
    #[inline]
    pub unsafe fn from_raw_parts(
        tensor: &'static str,
        ptr: *const u8,
        dtype: DType,
        shape: Shape,
        strides: Strides,
        device: Device,
        extent: Extent,
    ) -> Result<Self> {
        let parts = Parts::new(tensor, ptr as usize, dtype, shape, strides, device, extent)?;
        Ok(View { ptr, parts, owner: PhantomData })
    }

    /// The element with index 0.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The sub-view at index `at` of dimension `dim`, with that dimension gone.
    ///
    /// # Panics
    /// If `at` is out of range.
    #[must_use]
    pub fn index(&self, dim: usize, at: usize) -> View<'a> {
        let parts = self.parts.index(dim, at);
        View { ptr: self.ptr.with_addr(parts.address), parts, owner: PhantomData }
    }
}

impl<'a> View<'a> {
    /// Elements `range` of dimension `dim`, where they lie.
    ///
    /// # Panics
    /// If the range leaves the dimension.
    #[must_use]
    pub fn narrow(&self, dim: usize, range: &Range<usize>) -> View<'a> {
        let parts = self.parts.narrow(dim, range);
        View { ptr: self.ptr.with_addr(parts.address), parts, owner: PhantomData }
    }
}

impl<'a> ViewMut<'a> {
    accessors!();

    /// Elements `range` of dimension `dim`, as long as the whole lives.
    ///
    /// # Safety
    /// No element of the part is reached by way of the whole, or of another part, while this one lives.
    pub(crate) unsafe fn part(&mut self, dim: usize, range: &Range<usize>) -> ViewMut<'a> {
        let parts = self.parts.narrow(dim, range);
        ViewMut { ptr: self.ptr.with_addr(parts.address), parts, owner: PhantomData }
    }

    /// The same bytes as elements of another dtype of the same size. `tensor` names it in errors.
    ///
    /// # Errors
    /// As [`View::reinterpreted`]; also where this one holds bool.
    pub fn reinterpreted(&mut self, tensor: &'static str, dtype: DType) -> Result<ViewMut<'_>> {
        // What is written through the other dtype is read through this one later.
        reinterpreted(tensor, dtype, self.parts.dtype)?;
        let dtype = reinterpreted(tensor, self.parts.dtype, dtype)?;
        Ok(ViewMut { ptr: self.ptr, parts: Parts { dtype, ..self.parts }, owner: PhantomData })
    }

    /// A writable view into `slice`, whose element 0 lies at `offset`. The extent is proven.
    ///
    /// # Errors
    /// As [`View::strided`].
    pub fn strided<T: Element>(
        tensor: &'static str,
        slice: &'a mut [T],
        offset: usize,
        shape: Shape,
        strides: Strides,
    ) -> Result<Self> {
        if offset > slice.len() {
            return Err(Error::Overflow { tensor, shape, strides });
        }
        let extent = Extent::Proven { address: slice.as_ptr() as usize, len_bytes: size_of_val(slice) };
        let ptr = slice.as_mut_ptr().wrapping_add(offset).cast();
        // SAFETY: the extent is that of a live slice, borrowed mutably for 'a, of elements with this dtype.
        unsafe { ViewMut::from_raw_parts(tensor, ptr, T::DTYPE, shape, strides, Device::Cpu, extent) }
    }

    /// A row-major writable view of the whole of `slice`.
    ///
    /// # Errors
    /// As [`View::contiguous`].
    pub fn contiguous<T: Element>(tensor: &'static str, slice: &'a mut [T], shape: Shape) -> Result<Self> {
        let strides = shape.contiguous().ok_or(Error::Overflow { tensor, shape, strides: Strides::from([]) })?;
        ViewMut::strided(tensor, slice, 0, shape, strides)
    }

    /// A writable view of foreign memory. Strides are in elements.
    ///
    /// # Errors
    /// As [`View::from_raw_parts`].
    ///
    /// # Safety
    /// For 'a, every element reached by shape and strides must be writable memory of `device` that nobody else reads
    /// or writes and that holds elements of `dtype`. (Overlap with the *inputs of the same run* is checked by
    /// [`Operands`](crate::Operands) and refused, so it needs no promise.)
    #[inline]
    pub unsafe fn from_raw_parts(
        tensor: &'static str,
        ptr: *mut u8,
        dtype: DType,
        shape: Shape,
        strides: Strides,
        device: Device,
        extent: Extent,
    ) -> Result<Self> {
        let parts = Parts::new(tensor, ptr as usize, dtype, shape, strides, device, extent)?;
        Ok(ViewMut { ptr, parts, owner: PhantomData })
    }

    /// The element with index 0.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// The sub-view at index `at` of dimension `dim`, with that dimension gone.
    ///
    /// # Panics
    /// If `at` is out of range.
    #[must_use]
    pub fn index(&mut self, dim: usize, at: usize) -> ViewMut<'_> {
        let parts = self.parts.index(dim, at);
        ViewMut { ptr: self.ptr.with_addr(parts.address), parts, owner: PhantomData }
    }

    /// Elements `range` of dimension `dim`, where they lie.
    ///
    /// # Panics
    /// If the range leaves the dimension.
    #[must_use]
    pub fn narrow(&mut self, dim: usize, range: &Range<usize>) -> ViewMut<'_> {
        let parts = self.parts.narrow(dim, range);
        ViewMut { ptr: self.ptr.with_addr(parts.address), parts, owner: PhantomData }
    }

    /// Whether every element has an address of its own.
    pub(crate) fn is_injective(&self) -> Decision {
        is_injective(&self.parts.shape, &self.parts.strides)
    }

    /// Whether no byte is shared with `other`.
    pub(crate) fn is_disjoint_from(&self, other: &View<'_>) -> Decision {
        let ((lo, hi), (other_lo, other_hi)) = (self.parts.span(), other.parts.span());
        // The ordinary case: memory of its own. An empty tensor reaches nothing.
        if self.parts.device != other.parts.device || hi <= other_lo || other_hi <= lo {
            return Decision { holds: Some(true), steps: 0 };
        }
        are_disjoint(&self.parts.footprint(), &other.parts.footprint())
    }

    /// This output seen as something to compare with, for the overlap of two outputs.
    #[must_use]
    pub fn as_view(&self) -> View<'_> {
        View { ptr: self.ptr, parts: self.parts, owner: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_never_leaves_its_slice() {
        let data = [0f32; 12];
        let ok = |offset, shape: [usize; 2], strides: [isize; 2]| {
            View::strided("q", &data, offset, shape.into(), strides.into()).is_ok()
        };
        assert!(ok(0, [3, 4], [4, 1]));
        assert!(ok(11, [3, 4], [-4, -1]));
        assert!(ok(0, [1000, 4], [0, 1]));
        assert!(ok(12, [0, 4], [4, 1]));
        assert!(!ok(1, [3, 4], [4, 1]));
        assert!(!ok(10, [3, 4], [-4, -1]));
        assert!(!ok(0, [3, 5], [4, 1]));
    }

    #[test]
    fn bytes_are_reinterpreted_at_the_same_size_and_never_as_bool() {
        let mut data = [0x38u8; 4];
        let view = View::contiguous("codes", &data, [4].into()).unwrap();
        assert_eq!(view.reinterpreted("codes", DType::F8E4M3FN).unwrap().dtype(), DType::F8E4M3FN);
        assert!(view.reinterpreted("codes", DType::F16).is_err());
        assert!(view.reinterpreted("codes", DType::Bool).is_err());
        let mut bools = [true; 4];
        let mut written = ViewMut::contiguous("codes", &mut bools, [4].into()).unwrap();
        assert!(written.reinterpreted("codes", DType::U8).is_err());
        let mut written = ViewMut::contiguous("codes", &mut data, [4].into()).unwrap();
        assert_eq!(written.reinterpreted("codes", DType::I8).unwrap().dtype(), DType::I8);
    }

    #[test]
    fn null_and_unaligned_pointers_are_refused() {
        let view = |address: usize, n: usize| {
            // SAFETY: never read.
            unsafe {
                View::from_raw_parts(
                    "k",
                    std::ptr::without_provenance(address),
                    DType::F32,
                    [n].into(),
                    [1].into(),
                    Device::Cpu,
                    Extent::Declared,
                )
            }
        };
        assert!(matches!(view(0, 1), Err(Error::NullData { tensor: "k", .. })));
        assert!(matches!(view(6, 1), Err(Error::Unaligned { tensor: "k", .. })));
        assert!(view(0, 0).is_ok());
        assert!(matches!(view(usize::MAX - 3, 4), Err(Error::Overflow { .. })));
    }

    #[test]
    fn reach_covers_negative_zero_and_huge_strides() {
        let reach = |shape: &[usize], strides: &[isize]| {
            reach_bytes("q", DType::F32, &Dims::new(shape).unwrap(), &Dims::new(strides).unwrap())
        };
        assert_eq!(reach(&[2, 3], &[3, 1]).unwrap(), (0, 24));
        assert_eq!(reach(&[2, 3], &[-3, 1]).unwrap(), (-12, 12));
        assert_eq!(reach(&[1 << 40, 3], &[0, 1]).unwrap(), (0, 12));
        assert_eq!(reach(&[0, 3], &[isize::MAX, 1]).unwrap(), (0, 0));
        assert!(reach(&[3, 3], &[isize::MAX, 1]).is_err());
        assert!(reach(&[3, 3], &[isize::MIN, 1]).is_err());
        assert!(reach(&[2, 1], &[isize::MAX / 4, 1]).is_err());
    }
}
