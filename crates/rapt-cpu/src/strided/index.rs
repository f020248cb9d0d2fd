//! Reading and writing by index along a dimension: `gather`, `scatter`, `scatter_add`.
//!
//! ```text
//! gather    part[.., i, ..] = whole[.., index[.., i, ..], ..]
//! scatter   whole[.., index[.., i, ..], ..] = part[.., i, ..]      in row-major order: of several the last stays
//! add       whole[.., index[.., i, ..], ..] += part[.., i, ..]     in row-major order
//! ```
//! Every index is looked at before anything is written.

use half::{bf16, f16};
use rapt_core::DType;

use super::element::{Bool, Element};
use super::{Dim, Dims, Fault, Form, Kernel};

/// What is done at each index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// The part is read from the whole.
    None,
    /// The part is written to the whole.
    Set,
    /// The part is added to the whole.
    Add,
}

/// Elements by index along a dimension. Operands: whole, index (int64 or int32), part.
#[derive(Clone, Debug)]
pub struct Along {
    write: Write,
    dim: usize,
    size: usize,
    step: isize,
    index: DType,
    /// The dimensions of the index, those of one unit apart: whole, index, part.
    outer: Dims<3>,
    middle: Dims<3>,
    inner: Dim<3>,
    run: unsafe fn(&Along, std::ops::Range<usize>, &[*mut u8]),
}

impl Along {
    /// Elements of `whole` along `dim` by an `index` of the form of `part`. What is added is of whole's dtype, or a float that
    /// is added to float64. `None` for dtypes that are not served, and forms that do not fit each other.
    #[must_use]
    pub fn new(write: Write, dim: usize, whole: &Form, index: &Form, part: &Form) -> Option<Along> {
        let rank = index.shape.len();
        let fits = whole.shape.len() == rank && part.shape == index.shape && dim < rank;
        if !fits || !matches!(index.dtype, DType::I64 | DType::I32) {
            return None;
        }
        let each = |d: usize| {
            let own = if d == dim { 0 } else { whole.strides[d] };
            Dim { size: index.shape[d], strides: [own, index.strides[d], part.strides[d]] }
        };
        // Writes to one place follow one another: what differs in a dimension before `dim` alone goes to other places.
        let of_unit = if write == Write::None { rank - 1 } else { dim };
        let outer = Dims::new((0..of_unit).map(each));
        let (middle, inner) = Dims::new((of_unit..rank).map(each)).split_last();
        let run = run_of(write, whole.dtype, part.dtype)?;
        let (size, step) = (whole.shape[dim], whole.strides[dim]);
        Some(Along { write, dim, size, step, index: index.dtype, outer, middle, inner, run })
    }

    /// An index.
    #[inline(always)]
    unsafe fn index(&self, indices: *const u8, at: isize) -> i64 {
        // SAFETY: promised by the caller.
        unsafe {
            if self.index == DType::I64 {
                indices.cast::<i64>().offset(at).read()
            } else {
                i64::from(indices.cast::<i32>().offset(at).read())
            }
        }
    }
}

impl Kernel for Along {
    fn name(&self) -> &'static str {
        match self.write {
            Write::None => "gather",
            Write::Set => "scatter",
            Write::Add => "scatter, added",
        }
    }

    fn units(&self) -> usize {
        self.outer.count()
    }

    fn unit_work(&self) -> usize {
        self.middle.count() * self.inner.size * 4
    }

    unsafe fn check(&self, pointers: &[*mut u8]) -> Result<(), Fault> {
        for (unit, row) in (0..self.outer.count()).flat_map(|unit| (0..self.middle.count()).map(move |row| (unit, row)))
        {
            let at = self.outer.at(unit)[1] + self.middle.at(row)[1];
            for i in 0..self.inner.size.cast_signed() {
                // SAFETY: promised by the caller.
                let index = unsafe { self.index(pointers[1], at + i * self.inner.strides[1]) };
                if !usize::try_from(index).is_ok_and(|index| index < self.size) {
                    return Err(Fault::Index { index, dim: self.dim, size: self.size });
                }
            }
        }
        Ok(())
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], _: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe { (self.run)(self, units, pointers) };
    }
}

type Run = unsafe fn(&Along, std::ops::Range<usize>, &[*mut u8]);

fn run_of(write: Write, whole: DType, part: DType) -> Option<Run> {
    if write == Write::Add {
        return Some(match (whole, part) {
            (DType::F64, DType::F64) => each::<f64, f64, AddFloat>,
            (DType::F64, DType::F32) => each::<f64, f32, AddFloat>,
            (DType::F64, DType::F16) => each::<f64, f16, AddFloat>,
            (DType::F64, DType::BF16) => each::<f64, bf16, AddFloat>,
            (DType::I64, DType::I64) => each::<i64, i64, Add>,
            (DType::I32, DType::I32) => each::<i32, i32, Add>,
            (DType::I16, DType::I16) => each::<i16, i16, Add>,
            (DType::I8, DType::I8) => each::<i8, i8, Add>,
            (DType::U8, DType::U8) => each::<u8, u8, Add>,
            (DType::Bool, DType::Bool) => each::<Bool, Bool, Add>,
            _ => return None,
        });
    }
    if whole != part {
        return None;
    }
    let is_read = write == Write::None;
    Some(match whole.bits() {
        8 if is_read => each::<u8, u8, Get>,
        16 if is_read => each::<u16, u16, Get>,
        32 if is_read => each::<u32, u32, Get>,
        64 if is_read => each::<u64, u64, Get>,
        8 => each::<u8, u8, Set>,
        16 => each::<u16, u16, Set>,
        32 => each::<u32, u32, Set>,
        64 => each::<u64, u64, Set>,
        _ => return None,
    })
}

/// What is done with one element of the whole and one of the part.
trait Step<W, P> {
    unsafe fn run(whole: *mut W, part: *mut P);
}

struct Get;
struct Set;
struct Add;
struct AddFloat;

impl<T: Copy> Step<T, T> for Get {
    #[inline(always)]
    unsafe fn run(whole: *mut T, part: *mut T) {
        // SAFETY: promised by the caller.
        unsafe { part.write(whole.read()) };
    }
}

impl<T: Copy> Step<T, T> for Set {
    #[inline(always)]
    unsafe fn run(whole: *mut T, part: *mut T) {
        // SAFETY: promised by the caller.
        unsafe { whole.write(part.read()) };
    }
}

impl<T: Element> Step<T, T> for Add {
    #[inline(always)]
    unsafe fn run(whole: *mut T, part: *mut T) {
        // SAFETY: promised by the caller.
        unsafe { whole.write(whole.read().plus(part.read())) };
    }
}

impl<P: Element> Step<f64, P> for AddFloat {
    #[inline(always)]
    unsafe fn run(whole: *mut f64, part: *mut P) {
        // SAFETY: promised by the caller.
        unsafe { *whole += part.read().float() };
    }
}

unsafe fn each<W, P, S: Step<W, P>>(kernel: &Along, units: std::ops::Range<usize>, pointers: &[*mut u8]) {
    let (whole, indices, part) = (pointers[0].cast::<W>(), pointers[1], pointers[2].cast::<P>());
    let Dim { size, strides: [whole_step, index_step, part_step] } = kernel.inner;
    for unit in units {
        let [to, at, from] = kernel.outer.at(unit);
        for row in 0..kernel.middle.count() {
            let [row_to, row_at, row_from] = kernel.middle.at(row);
            for i in 0..size.cast_signed() {
                // SAFETY: the caller vouches for every element, and has looked at the indices.
                unsafe {
                    let index = kernel.index(indices, at + row_at + i * index_step) as isize;
                    let whole = whole.offset(to + row_to + i * whole_step + index * kernel.step);
                    S::run(whole, part.offset(from + row_from + i * part_step));
                }
            }
        }
    }
}
