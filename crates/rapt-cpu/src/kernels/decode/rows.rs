//! Rows of K and V as the products of decode load them: consecutive keys, each a row of head_dim elements.

use crate::kernels::simd::{Simd, Storage};
use crate::problem::{Input, Source};

/// Consecutive keys, of which each row is loaded a vector or an element at a time.
pub(super) trait Rows<S: Simd>: Copy {
    /// Where a row lies.
    type Row: Copy;
    /// Row `j`.
    fn row(&self, j: usize) -> Self::Row;
    /// The [`Simd::LANES`] elements from `d` on.
    ///
    /// # Safety
    /// The row has them; the instruction set is present.
    unsafe fn load(row: Self::Row, d: usize) -> S::V;
    /// Element `d`.
    ///
    /// # Safety
    /// The row has it.
    unsafe fn number(row: Self::Row, d: usize) -> S::Elem;
}

/// Keys in their storage dtype: row `j` begins at `first + j · stride`, with an inner stride of 1.
#[derive(Clone, Copy)]
pub(super) struct Keys<T> {
    pub(super) first: *const T,
    pub(super) stride: isize,
}

impl<S: Simd, T: Storage<S>> Rows<S> for Keys<T> {
    type Row = *const T;
    #[inline(always)]
    fn row(&self, j: usize) -> *const T {
        self.first.wrapping_offset(j as isize * self.stride)
    }
    #[inline(always)]
    unsafe fn load(row: *const T, d: usize) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { T::load(row.add(d)) }
    }
    #[inline(always)]
    unsafe fn number(row: *const T, d: usize) -> S::Elem {
        // SAFETY: promised by the caller.
        unsafe { (*row.add(d)).widen() }
    }
}

impl<T: Copy> Keys<T> {
    /// Keys `j0..j0 + n` where they lie; `None` if their elements are apart, or they are in several pages.
    #[inline(always)]
    pub(super) fn in_place(
        input: &Input<4>,
        (batch, head, j0): (usize, usize, usize),
        n: usize,
        dim: usize,
    ) -> Option<Self> {
        let [_, _, stride, inner] = input.strides;
        let is_whole = (inner == 1 || dim == 1) && input.run(j0, n) == n;
        is_whole.then(|| Keys { first: input.at_key([batch, head, j0, 0]).cast::<T>(), stride })
    }

    /// Keys `j0..j0 + n` where they lie, else gathered into `panel`.
    #[inline(always)]
    pub(super) unsafe fn near(
        input: &Input<4>,
        first: (usize, usize, usize),
        n: usize,
        dim: usize,
        panel: *mut T,
    ) -> Self {
        match Keys::in_place(input, first, n, dim) {
            Some(keys) => keys,
            // SAFETY: promised by the caller.
            None => unsafe { Keys::gathered(input, first, n, dim, panel) },
        }
    }

    /// Keys `j0..j0 + n` gathered into `panel`. Without a vector method, and out of the loops that most calls run: inlined,
    /// it takes the registers of their addresses.
    #[inline(never)]
    unsafe fn gathered(
        input: &Input<4>,
        (batch, head, j0): (usize, usize, usize),
        n: usize,
        dim: usize,
        panel: *mut T,
    ) -> Self {
        let inner = input.strides[3];
        for j in 0..n {
            let row = input.at_key([batch, head, j0 + j, 0]).cast::<T>();
            // SAFETY: the elements of key j0 + j; the panel has n rows of dim.
            unsafe {
                let to = panel.add(j * dim);
                if inner == 1 {
                    std::ptr::copy_nonoverlapping(row, to, dim);
                } else {
                    (0..dim).for_each(|d| *to.add(d) = *row.wrapping_offset(d as isize * inner));
                }
            }
        }
        Keys { first: panel, stride: dim as isize }
    }

    /// Keys `j0..j0 + n` as numbers of f32, which are what a kernel loads that has sources.
    #[inline(always)]
    pub(super) unsafe fn read(
        source: &Source,
        (batch, head, j0): (usize, usize, usize),
        n: usize,
        dim: usize,
        panel: *mut T,
    ) -> Self {
        debug_assert_eq!(size_of::<T>(), size_of::<f32>());
        // SAFETY: keys j0..j0 + n are inside the tensor; the panel has n rows of dim.
        unsafe { source.read_keys([batch, head, j0], n, dim, panel.cast()) };
        Keys { first: panel, stride: dim as isize }
    }

    /// The keys from key `j` on.
    #[inline(always)]
    pub(super) fn from(self, j: usize) -> Self {
        Keys { first: self.first.wrapping_offset(j as isize * self.stride), ..self }
    }
}
