//! Loads, stores and copies of rectangles with strides.

use half::{bf16, f16};
use rapt_core::DType;

use super::{Copy, Move, Rectangle};
use crate::kernels::simd::{Part, Simd, Storage};

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

plain!(f32 => f32, f64 => f64, i64 => i64, i32 => i64, i16 => i64, i8 => i64, u8 => i64);

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

/// What copies elements of 1, 2, 4 or 8 bytes.
pub(super) fn copy<S: Simd<Elem = f32>, D: Simd<Elem = f64>>(bytes: usize) -> Copy {
    match bytes {
        1 => copy_of::<S, u8>,
        2 => copy_of::<S, u16>,
        4 => copy_of::<S, u32>,
        _ => copy_of::<S, u64>,
    }
}

struct CopyOf<'r, T> {
    to: *mut T,
    from: *const T,
    at: &'r Rectangle,
    source: &'r Rectangle,
}

impl<S: Simd<Elem = f32>, T: std::marker::Copy> Part<S> for CopyOf<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Rectangle { rows, columns, row_stride, column_stride } = *self.at;
        for row in 0..rows {
            // SAFETY: the caller vouches for both rectangles.
            unsafe {
                let to = self.to.offset(row as isize * row_stride);
                let from = self.from.offset(row as isize * self.source.row_stride);
                if column_stride == 1 && self.source.column_stride == 1 {
                    // They may be the same elements.
                    std::ptr::copy(from, to, columns);
                } else {
                    for i in 0..columns as isize {
                        to.offset(i * column_stride).write(from.offset(i * self.source.column_stride).read());
                    }
                }
            }
        }
    }
}

unsafe fn copy_of<S: Simd<Elem = f32>, T: std::marker::Copy>(
    to: *mut u8,
    from: *const u8,
    at: &Rectangle,
    source: &Rectangle,
) {
    // SAFETY: promised by the caller.
    unsafe { S::apart(CopyOf::<T> { to: to.cast(), from: from.cast(), at, source }) };
}
