//! Loads, stores and copies of rectangles with strides.

use half::{bf16, f16};
use rapt_core::DType;

use super::{Copy, Move, Rectangle};
use crate::kernels::simd::{Part, Simd, Storage};
use crate::pointwise::nest::LINE_BYTES;

/// A load and a store of a dtype.
pub(super) fn pair<S: Simd<Elem = f32>>(dtype: DType) -> Option<(Move, Move)> {
    Some(match dtype {
        DType::F32 => (load::<S, f32>, store::<S, f32>),
        DType::F64 => (load::<S, f64>, store::<S, f64>),
        DType::F16 => (load::<S, f16>, store::<S, f16>),
        DType::BF16 => (load::<S, bf16>, store::<S, bf16>),
        DType::I64 => (load::<S, i64>, store::<S, i64>),
        DType::I32 => (load::<S, i32>, store::<S, i32>),
        DType::I16 => (load::<S, i16>, store::<S, i16>),
        DType::I8 => (load::<S, i8>, store::<S, i8>),
        DType::U8 => (load::<S, u8>, store::<S, u8>),
        DType::Bool => (load::<S, Flag>, store::<S, Flag>),
        _ => return None,
    })
}

/// An element as it lies in memory, and what a register holds of it.
trait Stored<S: Simd<Elem = f32>>: std::marker::Copy {
    type Lane: std::marker::Copy;
    fn read(self) -> Self::Lane;
    fn write(lane: Self::Lane) -> Self;

    /// `n` elements that follow one another, to a dense array.
    ///
    /// # Safety
    /// Both arrays hold as many.
    #[inline(always)]
    unsafe fn read_run(dst: *mut Self::Lane, from: *const Self, n: usize) {
        for i in 0..n {
            // SAFETY: promised by the caller.
            unsafe { dst.add(i).write(from.add(i).read().read()) };
        }
    }

    /// Rows and columns whose rows lie side by side, and whose columns are `step` apart, to a dense array.
    ///
    /// # Safety
    /// Both hold as many.
    #[inline(always)]
    unsafe fn read_crossed(dst: *mut Self::Lane, from: *const Self, step: isize, size: [usize; 2]) {
        let [rows, columns] = size;
        crosswise(0..rows, 0..columns, |row, column| {
            // SAFETY: promised by the caller.
            unsafe {
                dst.add(row * columns + column).write(from.offset(row as isize + column as isize * step).read().read());
            };
        });
    }

    /// The other way round.
    ///
    /// # Safety
    /// Both arrays hold as many.
    #[inline(always)]
    unsafe fn write_run(to: *mut Self, from: *const Self::Lane, n: usize) {
        for i in 0..n {
            // SAFETY: promised by the caller.
            unsafe { to.add(i).write(Self::write(from.add(i).read())) };
        }
    }
}

/// The columns of a crossed rectangle that are read side by side: more than an L1 of eight ways keeps lines of, where columns
/// lie a power of 2 apart.
const SIDE_BY_SIDE: usize = 8;

/// Reads a rectangle whose rows lie side by side, and writes it row by row: `element(row, column)` does one element.
#[inline(always)]
fn crosswise(rows: std::ops::Range<usize>, columns: std::ops::Range<usize>, mut element: impl FnMut(usize, usize)) {
    let mut first = columns.start;
    while first + SIDE_BY_SIDE <= columns.end {
        for row in rows.clone() {
            for column in 0..SIDE_BY_SIDE {
                element(row, first + column);
            }
        }
        first += SIDE_BY_SIDE;
    }
    for row in rows {
        for column in first..columns.end {
            element(row, column);
        }
    }
}

/// Copies a crossed rectangle of a vector's elements, whose columns are `step` apart, to rows `row_stride` apart: by squares,
/// so that each cache line is read once.
#[inline(always)]
unsafe fn squares<V: Simd>(to: *mut V::Elem, row_stride: isize, from: *const V::Elem, step: isize, size: [usize; 2]) {
    let [rows, columns] = size;
    let whole = [rows / V::LANES * V::LANES, columns / V::LANES * V::LANES];
    // SAFETY: the caller vouches for both rectangles.
    unsafe {
        let to = |row: usize, column: usize| to.offset(row as isize * row_stride + column as isize);
        let from = |row: usize, column: usize| from.offset(row as isize + column as isize * step);
        for column in (0..whole[1]).step_by(V::LANES) {
            for row in (0..whole[0]).step_by(V::LANES) {
                V::transpose(from(row, column), step as usize, to(row, column), row_stride as usize);
            }
        }
        let mut one = |row: usize, column: usize| to(row, column).write(from(row, column).read());
        crosswise(0..whole[0], whole[1]..columns, &mut one);
        crosswise(whole[0]..rows, 0..columns, &mut one);
    }
}

macro_rules! plain {
    ($($ty:ty => $lane:ty),*) => {$(
        impl<S: Simd<Elem = f32>> Stored<S> for $ty {
            type Lane = $lane;
            #[inline(always)]
            fn read(self) -> $lane {
                self as $lane
            }
            #[inline(always)]
            fn write(lane: $lane) -> $ty {
                lane as $ty
            }
        }
    )*};
}

plain!(f64 => f64, i64 => i64, i32 => i64, i16 => i64, i8 => i64, u8 => i64);

impl<S: Simd<Elem = f32>> Stored<S> for f32 {
    type Lane = f32;
    #[inline(always)]
    fn read(self) -> f32 {
        self
    }
    #[inline(always)]
    fn write(lane: f32) -> f32 {
        lane
    }
    #[inline(always)]
    unsafe fn read_crossed(dst: *mut f32, from: *const f32, step: isize, size: [usize; 2]) {
        // SAFETY: promised by the caller.
        unsafe { squares::<S>(dst, size[1] as isize, from, step, size) };
    }
}

/// The byte of a boolean.
#[derive(Clone, std::marker::Copy)]
#[repr(transparent)]
struct Flag(u8);

impl<S: Simd<Elem = f32>> Stored<S> for Flag {
    type Lane = u8;
    #[inline(always)]
    fn read(self) -> u8 {
        u8::from(self.0 != 0)
    }
    #[inline(always)]
    fn write(lane: u8) -> Flag {
        Flag(lane)
    }
}

/// The most lanes of f32 that a vector has.
const MOST_LANES: usize = 16;

/// The 16-bit floats go through the vectors' own conversions, the last ones of a run by way of a whole vector.
macro_rules! half {
    ($ty:ty) => {
        impl<S: Simd<Elem = f32>> Stored<S> for $ty {
            type Lane = f32;
            #[inline(always)]
            fn read(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn write(lane: f32) -> $ty {
                <$ty>::from_f32(lane)
            }
            #[inline(always)]
            unsafe fn read_run(dst: *mut f32, from: *const $ty, n: usize) {
                let whole = n / S::LANES * S::LANES;
                let mut at = 0;
                // SAFETY: the caller vouches for n elements; the arrays hold the longest vector.
                unsafe {
                    while at < whole {
                        S::store(dst.add(at), <$ty as Storage<S>>::load(from.add(at)));
                        at += S::LANES;
                    }
                    if at < n {
                        let (mut narrow, mut wide) = ([<$ty>::ZERO; MOST_LANES], [0f32; MOST_LANES]);
                        std::ptr::copy_nonoverlapping(from.add(at), narrow.as_mut_ptr(), n - at);
                        S::store(wide.as_mut_ptr(), <$ty as Storage<S>>::load(narrow.as_ptr()));
                        std::ptr::copy_nonoverlapping(wide.as_ptr(), dst.add(at), n - at);
                    }
                }
            }
            #[inline(always)]
            unsafe fn write_run(to: *mut $ty, from: *const f32, n: usize) {
                let whole = n / S::LANES * S::LANES;
                let mut at = 0;
                // SAFETY: the caller vouches for n elements; the arrays hold the longest vector.
                unsafe {
                    while at < whole {
                        <$ty as Storage<S>>::store(to.add(at), S::load(from.add(at)));
                        at += S::LANES;
                    }
                    if at < n {
                        let (mut narrow, mut wide) = ([<$ty>::ZERO; MOST_LANES], [0f32; MOST_LANES]);
                        std::ptr::copy_nonoverlapping(from.add(at), wide.as_mut_ptr(), n - at);
                        <$ty as Storage<S>>::store(narrow.as_mut_ptr(), S::load(wide.as_ptr()));
                        std::ptr::copy_nonoverlapping(narrow.as_ptr(), to.add(at), n - at);
                    }
                }
            }
        }
    };
}

half!(f16);
half!(bf16);

struct Load<'r, T> {
    dst: *mut u8,
    from: *const T,
    rectangle: &'r Rectangle,
}

struct Store<'r, T> {
    to: *mut T,
    from: *const u8,
    rectangle: &'r Rectangle,
}

impl<S: Simd<Elem = f32>, T: Stored<S>> Part<S> for Load<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Rectangle { rows, columns, row_stride, column_stride } = *self.rectangle;
        let dst = self.dst.cast::<T::Lane>();
        if row_stride == 1 && column_stride > 1 && rows > 1 {
            // SAFETY: the caller vouches for the rectangle and for the dense array.
            return unsafe { T::read_crossed(dst, self.from, column_stride, [rows, columns]) };
        }
        for row in 0..rows {
            // SAFETY: the caller vouches for the rectangle and for the dense array.
            unsafe {
                let (dst, from) = (dst.add(row * columns), self.from.offset(row as isize * row_stride));
                if column_stride == 1 {
                    T::read_run(dst, from, columns);
                } else if column_stride == 0 {
                    let one = from.read().read();
                    for i in 0..columns {
                        dst.add(i).write(one);
                    }
                } else {
                    for i in 0..columns {
                        dst.add(i).write(from.offset(i as isize * column_stride).read().read());
                    }
                }
            }
        }
    }
}

impl<S: Simd<Elem = f32>, T: Stored<S>> Part<S> for Store<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Rectangle { rows, columns, row_stride, column_stride } = *self.rectangle;
        let from = self.from.cast::<T::Lane>();
        for row in 0..rows {
            // SAFETY: the caller vouches for the rectangle and for the dense array.
            unsafe {
                let (from, to) = (from.add(row * columns), self.to.offset(row as isize * row_stride));
                if column_stride == 1 {
                    T::write_run(to, from, columns);
                } else {
                    for i in 0..columns {
                        to.offset(i as isize * column_stride).write(T::write(from.add(i).read()));
                    }
                }
            }
        }
    }
}

unsafe fn load<S: Simd<Elem = f32>, T: Stored<S>>(dst: *mut u8, operand: *mut u8, rectangle: &Rectangle) {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Load::<T> { dst, from: operand.cast(), rectangle }) };
}

unsafe fn store<S: Simd<Elem = f32>, T: Stored<S>>(from: *mut u8, operand: *mut u8, rectangle: &Rectangle) {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Store::<T> { to: operand.cast(), from, rectangle }) };
}

/// Asks for cache lines.
pub(super) unsafe fn ask<S: Simd>(from: *const u8, bytes: usize) {
    // SAFETY: nothing is read; the caller vouches for the instruction set.
    unsafe { S::apart(AskFor { from, bytes }) };
}

struct AskFor {
    from: *const u8,
    bytes: usize,
}

impl<S: Simd> Part<S> for AskFor {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        for at in (0..self.bytes).step_by(LINE_BYTES) {
            // SAFETY: nothing is read.
            unsafe { S::prefetch(self.from.wrapping_add(at)) };
        }
    }
}

/// What copies elements of 1, 2, 4 or 8 bytes.
pub(super) fn copy<S: Simd<Elem = f32>, D: Simd<Elem = f64>>(bytes: usize) -> Copy {
    match bytes {
        1 => copy_of::<S, u8>,
        2 => copy_of::<S, u16>,
        4 => copy_of::<S, f32>,
        _ => copy_of::<D, f64>,
    }
}

/// Elements that are moved as they are, a float's bits too.
trait Moved<S: Simd>: std::marker::Copy {
    /// Copies rows that lie side by side, with columns `step` apart, to rows `row_stride` apart.
    ///
    /// # Safety
    /// Both rectangles are there.
    #[inline(always)]
    unsafe fn copy_crossed(to: *mut Self, row_stride: isize, from: *const Self, step: isize, size: [usize; 2]) {
        crosswise(0..size[0], 0..size[1], |row, column| {
            let (row, column) = (row as isize, column as isize);
            // SAFETY: promised by the caller.
            unsafe { to.offset(row * row_stride + column).write(from.offset(row + column * step).read()) };
        });
    }
}

impl<S: Simd> Moved<S> for u8 {}
impl<S: Simd> Moved<S> for u16 {}

macro_rules! moved_by_squares {
    ($($float:ty),*) => {$(
        impl<S: Simd<Elem = $float>> Moved<S> for $float {
            #[inline(always)]
            unsafe fn copy_crossed(to: *mut $float, row_stride: isize, from: *const $float, step: isize, size: [usize; 2]) {
                // SAFETY: promised by the caller.
                unsafe { squares::<S>(to, row_stride, from, step, size) };
            }
        }
    )*};
}

moved_by_squares!(f32, f64);

struct CopyOf<'r, T> {
    to: *mut T,
    from: *const T,
    at: &'r Rectangle,
    source: &'r Rectangle,
}

impl<S: Simd, T: Moved<S>> Part<S> for CopyOf<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Rectangle { rows, columns, row_stride, column_stride } = *self.at;
        let source = self.source;
        if column_stride == 1 && row_stride > 0 && source.row_stride == 1 && source.column_stride > 1 && rows > 1 {
            // SAFETY: the caller vouches for both rectangles.
            return unsafe { T::copy_crossed(self.to, row_stride, self.from, source.column_stride, [rows, columns]) };
        }
        for row in 0..rows {
            // SAFETY: the caller vouches for both rectangles.
            unsafe {
                let to = self.to.offset(row as isize * row_stride);
                let from = self.from.offset(row as isize * source.row_stride);
                if column_stride == 1 && source.column_stride == 1 {
                    // They may be the same elements.
                    std::ptr::copy(from, to, columns);
                } else if column_stride == 1 && source.column_stride == 0 {
                    let one = from.read();
                    for i in 0..columns {
                        to.add(i).write(one);
                    }
                } else {
                    for i in 0..columns as isize {
                        to.offset(i * column_stride).write(from.offset(i * source.column_stride).read());
                    }
                }
            }
        }
    }
}

unsafe fn copy_of<S: Simd, T: Moved<S>>(to: *mut u8, from: *const u8, at: &Rectangle, source: &Rectangle) {
    // SAFETY: promised by the caller.
    unsafe { S::apart(CopyOf::<T> { to: to.cast(), from: from.cast(), at, source }) };
}
