//! Kernels over strided tensors that are neither chains of pointwise functions nor products: reductions over any dimensions,
//! running sums, order, reading and writing by index, windows over images and their resizing.
//!
//! ```text
//! let kernel = Fold::new(arch, …)?          forms of the operands: dtype, sizes, strides         once per shape
//! kernel.check(pointers)?                   what only the values show, before anything is written
//! kernel.run_item(item, items, pointers)    units of work, dealt to threads
//! ```
//! Operands lie in any way: permuted, expanded, backwards. Sums of floats are float64 and rounded once, those of integers wrap
//! around; a result has the same bits however the work is divided. Deliberately absent: allocation while running, threads,
//! conversion of operands between dtypes.

mod depthwise;
mod element;
mod fold;
mod index;
mod order;
mod pool;
mod resize;
mod scan;
mod spread;
mod windows;

use std::fmt;

use rapt_core::DType;

pub use depthwise::Depthwise;
pub use fold::{Fold, FoldFunction};
pub use index::{Along, Write};
pub use order::Order;
pub use pool::{Pool, PoolFunction};
pub use resize::{Resize, Weights};
pub use scan::{Histogram, RunningSum};
pub use spread::Spread;
pub use windows::Steps;

use crate::pointwise::share;

/// An operand: its dtype, and of each dimension the size and the stride in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// The dtype.
    pub dtype: DType,
    /// The sizes.
    pub shape: Vec<usize>,
    /// The strides in elements: 0 where a dimension repeats, negative where it runs backwards.
    pub strides: Vec<isize>,
}

/// What a kernel meets in the values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// An index that names no element.
    Index {
        /// The index.
        index: i64,
        /// The dimension it counts in.
        dim: usize,
        /// The dimension's size.
        size: usize,
    },
    /// A range without parts: of a histogram.
    Range {
        /// Its beginning.
        min: f64,
        /// Its end.
        max: f64,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Index { index, dim, size } => write!(f, "index {index} of dimension {dim} of size {size}"),
            Fault::Range { min, max } => write!(f, "a histogram of the range [{min}, {max}]"),
        }
    }
}

impl std::error::Error for Fault {}

/// A kernel for operands of given forms.
pub trait Kernel: fmt::Debug + Send + Sync {
    /// What it computes, in a few words.
    fn name(&self) -> &'static str;

    /// How many units of work there are; units write apart.
    fn units(&self) -> usize;

    /// How many elements are read for one unit, about.
    fn unit_work(&self) -> usize;

    /// The bytes of scratch memory that [`run_item`](Kernel::run_item) needs, one of their own for each thread; a multiple of 64.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Looks at the values before anything is written.
    ///
    /// # Errors
    /// [`Fault`] for the first value that the kernel cannot take.
    ///
    /// # Safety
    /// As [`run_item`](Kernel::run_item).
    unsafe fn check(&self, _: &[*mut u8]) -> Result<(), Fault> {
        Ok(())
    }

    /// Runs these units.
    ///
    /// # Safety
    /// As [`run_item`](Kernel::run_item).
    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8);

    /// Into how many items of equal work it is best divided among `threads`; 0 where there is nothing to do.
    fn items(&self, threads: usize) -> usize {
        let work = self.units().saturating_mul(self.unit_work().max(1));
        work.div_ceil(ITEM_WORK).min(threads).min(self.units())
    }

    /// Runs `item`, of `items` that share the work: each of `0..items` once, in any order, on any threads.
    ///
    /// # Safety
    /// `pointers` are the operands' elements with all indices 0, aligned to their dtypes; every element that shapes and strides
    /// reach is there, to be written where the kernel says so. What is written shares no memory with what is read, unless the
    /// kernel says so. [`check`](Kernel::check) was fine with the values. `scratch` is aligned to 16, has
    /// [`scratch_bytes`](Kernel::scratch_bytes) and is nobody else's meanwhile.
    unsafe fn run_item(&self, item: usize, items: usize, pointers: &[*mut u8], scratch: *mut u8) {
        let units = if items == 1 { 0..self.units() } else { share(self.units(), item, items) };
        // SAFETY: promised by the caller.
        unsafe { self.run_units(units, pointers, scratch) };
    }
}

/// Elements that are worth a thread's while.
const ITEM_WORK: usize = 16 * 1024;

/// Results that are computed beside one another.
const TILE: usize = 32;

/// A dimension: its size, and the stride of each operand in elements.
#[derive(Clone, Copy, Debug)]
struct Dim<const N: usize> {
    size: usize,
    strides: [isize; N],
}

/// Dimensions, outermost first; those that lie as one are one.
#[derive(Clone, Debug)]
struct Dims<const N: usize>(Vec<Dim<N>>);

impl<const N: usize> Dims<N> {
    /// These dimensions of operands; what has size 1 goes.
    fn new(dims: impl IntoIterator<Item = Dim<N>>) -> Dims<N> {
        let mut merged: Vec<Dim<N>> = Vec::new();
        for dim in dims.into_iter().filter(|dim| dim.size != 1) {
            match merged.last_mut() {
                Some(outer) if (0..N).all(|n| outer.strides[n] == dim.strides[n] * dim.size.cast_signed()) => {
                    *outer = Dim { size: outer.size * dim.size, strides: dim.strides };
                }
                _ => merged.push(dim),
            }
        }
        Dims(merged)
    }

    /// The number of indices.
    fn count(&self) -> usize {
        self.0.iter().map(|dim| dim.size).product()
    }

    /// The operands' offsets at index number `n`, in elements.
    #[inline(always)]
    fn at(&self, mut n: usize) -> [isize; N] {
        let mut offsets = [0; N];
        for dim in self.0.iter().rev() {
            let index = (n % dim.size).cast_signed();
            n /= dim.size;
            for (offset, stride) in offsets.iter_mut().zip(&dim.strides) {
                *offset += index * stride;
            }
        }
        offsets
    }

    /// The innermost dimension apart from the others.
    fn split_last(mut self) -> (Dims<N>, Dim<N>) {
        let last = self.0.pop().unwrap_or(Dim { size: 1, strides: [0; N] });
        (self, last)
    }
}

/// The dimensions of operands of one shape.
fn dims_of<const N: usize>(shape: &[usize], strides: [&[isize]; N]) -> Vec<Dim<N>> {
    let dim = |(d, &size): (usize, &usize)| Dim { size, strides: strides.map(|strides| strides[d]) };
    shape.iter().enumerate().map(dim).collect()
}
