//! The numbers of a tensor in host memory, line by line along its last dimension: the safe way to read and write a view.
//!
//! A [`View`]'s invariant is that each address reached by its shape and strides holds an element of its dtype; a line is
//! such addresses only. bool is left out: any other byte than 0 and 1 would be no value of Rust's. Deliberately absent:
//! conversion of elements, and devices.

use std::marker::PhantomData;

use crate::dtype::Number;
use crate::{Device, Error, MAX_RANK, Result, Shape, Strides, View, ViewMut};

/// Where the lines of a shape begin.
#[derive(Clone, Copy, Debug)]
struct Starts {
    shape: Shape,
    strides: Strides,
    lines: usize,
    len: usize,
    step: isize,
}

impl Starts {
    fn new(tensor: &'static str, shape: Shape, strides: Strides) -> Result<Self> {
        let overflow = Error::Overflow { tensor, shape, strides };
        let numel = shape.numel().ok_or(overflow)?;
        let len = shape.last().copied().unwrap_or(1);
        let lines = if numel == 0 { 0 } else { numel / len };
        Ok(Starts { shape, strides, lines, len, step: strides.last().copied().unwrap_or(1) })
    }

    /// The offset in elements of the first element of line `at`.
    fn offset(&self, at: usize) -> isize {
        assert!(at < self.lines, "line {at} of {}", self.shape);
        let mut rest = at;
        let mut offset = 0;
        for d in (0..self.shape.len().saturating_sub(1)).rev() {
            offset += (rest % self.shape[d]) as isize * self.strides[d];
            rest /= self.shape[d];
        }
        offset
    }

    /// The index of element `at` of line `line`.
    fn index(&self, line: usize, at: usize) -> Shape {
        let mut index = [0; MAX_RANK];
        let mut rest = line;
        let rank = self.shape.len();
        if rank > 0 {
            index[rank - 1] = at;
        }
        for d in (0..rank.saturating_sub(1)).rev() {
            index[d] = rest % self.shape[d];
            rest /= self.shape[d];
        }
        Shape::new(&index[..rank]).unwrap_or(Shape::from([]))
    }
}

/// The lines of a tensor that is read. A scalar is one line of one element; an empty tensor has no line.
#[derive(Clone, Copy, Debug)]
pub struct Lines<'a, T: Number> {
    ptr: *const T,
    starts: Starts,
    owner: PhantomData<&'a [T]>,
}

// SAFETY: a shared borrow of plain elements, as `&[T]` is; a Number is Send and Sync.
unsafe impl<T: Number> Send for Lines<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Number> Sync for Lines<'_, T> {}

impl<'a> View<'a> {
    /// The lines of this tensor, whose elements are `T`s. `tensor` names it in errors.
    ///
    /// # Errors
    /// [`Error::OtherDtype`]; [`Error::DeviceUnavailable`] outside host memory; [`Error::Overflow`] if the number of elements is no `isize`.
    pub fn lines<T: Number>(&self, tensor: &'static str) -> Result<Lines<'a, T>> {
        if self.dtype() != T::DTYPE {
            return Err(Error::OtherDtype { tensor, expected: T::DTYPE, got: self.dtype() });
        }
        in_host_memory(tensor, self.device())?;
        let starts = Starts::new(tensor, *self.shape(), *self.strides())?;
        Ok(Lines { ptr: self.as_ptr().cast(), starts, owner: PhantomData })
    }
}

fn in_host_memory(tensor: &'static str, device: Device) -> Result<()> {
    match device {
        Device::Cpu => Ok(()),
        device => Err(Error::DeviceUnavailable { device, why: format!("{tensor} is read by the host's processor") }),
    }
}

impl<'a, T: Number> Lines<'a, T> {
    /// How many lines there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.starts.lines
    }

    /// The length of each.
    #[must_use]
    pub fn line_len(&self) -> usize {
        self.starts.len
    }

    /// The index in the tensor of element `at` of line `line`.
    #[must_use]
    pub fn index(&self, line: usize, at: usize) -> Shape {
        self.starts.index(line, at)
    }

    /// The elements of line `at`, counted in row-major order.
    ///
    /// # Panics
    /// If there are not that many lines.
    pub fn line(&self, at: usize) -> impl ExactSizeIterator<Item = T> + use<'a, T> {
        let first = self.ptr.wrapping_offset(self.starts.offset(at));
        let step = self.starts.step;
        // SAFETY: `at` is below the number of lines and `d` below the last size, so this is an address of the view, whose
        // invariant is that an aligned T, borrowed for 'a, lies there; every pattern of bits is a value of T.
        (0..self.starts.len).map(move |d| unsafe { *first.wrapping_offset(d as isize * step) })
    }

    /// Line `at` as a slice, where its elements lie side by side.
    ///
    /// # Panics
    /// If there are not that many lines.
    #[must_use]
    pub fn as_slice(&self, at: usize) -> Option<&'a [T]> {
        let (Starts { len, step, .. }, offset) = (self.starts, self.starts.offset(at));
        // SAFETY: as in `line`, of each of these `len` addresses, which lie side by side; they are borrowed for 'a.
        (step == 1 || len == 1).then(|| unsafe { std::slice::from_raw_parts(self.ptr.wrapping_offset(offset), len) })
    }

    /// All elements in row-major order.
    pub fn elements(&self) -> impl Iterator<Item = T> + use<'a, T> {
        let lines = *self;
        (0..lines.count()).flat_map(move |at| lines.line(at))
    }
}

impl ViewMut<'_> {
    /// Writes the elements of line `at`, counted in row-major order; what `values` has beyond the line is not taken.
    /// `tensor` names it in errors.
    ///
    /// # Errors
    /// As [`View::lines`].
    ///
    /// # Panics
    /// If there are not that many lines.
    pub fn write_line<T: Number>(
        &mut self,
        tensor: &'static str,
        at: usize,
        values: impl IntoIterator<Item = T>,
    ) -> Result<()> {
        if self.dtype() != T::DTYPE {
            return Err(Error::OtherDtype { tensor, expected: T::DTYPE, got: self.dtype() });
        }
        in_host_memory(tensor, self.device())?;
        let starts = Starts::new(tensor, *self.shape(), *self.strides())?;
        let first = self.as_mut_ptr().cast::<T>().wrapping_offset(starts.offset(at));
        if starts.step == 1 {
            // SAFETY: as below, of addresses that lie side by side.
            let line = unsafe { std::slice::from_raw_parts_mut(first, starts.len) };
            line.iter_mut().zip(values).for_each(|(to, value)| *to = value);
            return Ok(());
        }
        for (d, value) in (0..starts.len).zip(values) {
            // SAFETY: as in `line`, and a ViewMut is an exclusive borrow of memory that may be written.
            unsafe { *first.wrapping_offset(d as isize * starts.step) = value };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Dims};

    #[test]
    fn lines_follow_the_strides() {
        let data: Vec<f32> = (0..24u8).map(f32::from).collect();
        let view = View::strided("x", &data, 23, [2, 3, 4].into(), [-12, -1, -3].into()).unwrap();
        let lines = view.lines::<f32>("x").unwrap();
        assert_eq!((lines.count(), lines.line_len()), (6, 4));
        assert_eq!(lines.line(0).collect::<Vec<_>>(), [23.0, 20.0, 17.0, 14.0]);
        assert_eq!(lines.line(1).collect::<Vec<_>>(), [22.0, 19.0, 16.0, 13.0]);
        assert_eq!(lines.line(5).collect::<Vec<_>>(), [9.0, 6.0, 3.0, 0.0]);
        assert_eq!(&*lines.index(5, 3), &[1, 2, 3]);
        assert_eq!(lines.elements().count(), 24);
        assert_eq!(lines.as_slice(0), None);
        let columns = View::strided("x", &data, 1, [3, 2].into(), [4, 1].into()).unwrap();
        let lines = columns.lines::<f32>("x").unwrap();
        assert_eq!(lines.as_slice(2), Some(&[9.0, 10.0][..]));
        assert!(matches!(view.lines::<f64>("x"), Err(Error::OtherDtype { expected: DType::F64, .. })));
    }

    #[test]
    fn scalars_and_empty_tensors() {
        let data = [7f64];
        let scalar = View::strided("x", &data, 0, Dims::from([]), Dims::from([])).unwrap();
        let lines = scalar.lines::<f64>("x").unwrap();
        assert_eq!((lines.elements().collect::<Vec<_>>(), lines.index(0, 0).len()), (vec![7.0], 0));
        for shape in [[0, 3], [3, 0]] {
            let empty = View::contiguous("x", &data, shape.into()).unwrap();
            assert_eq!(empty.lines::<f64>("x").unwrap().elements().count(), 0);
        }
    }

    #[test]
    fn a_line_is_written_where_it_lies_and_nothing_else() {
        let mut data = [0i8; 12];
        let mut view = ViewMut::strided("x", &mut data, 11, [2, 2].into(), [-6, -2].into()).unwrap();
        view.write_line("x", 1, [1i8, 2, 3]).unwrap();
        assert!(view.write_line("x", 0, [1u8]).is_err());
        assert_eq!(data, [0, 0, 0, 2, 0, 1, 0, 0, 0, 0, 0, 0]);
        let mut view = ViewMut::strided("x", &mut data, 1, [2, 2].into(), [6, 1].into()).unwrap();
        view.write_line("x", 1, [5i8, 6, 7]).unwrap();
        assert_eq!(data, [0, 0, 0, 2, 0, 1, 0, 5, 6, 0, 0, 0]);
    }
}
