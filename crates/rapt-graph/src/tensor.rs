//! The interpreter's tensors: numbers in f64 or i64, shared between views.

use std::cell::RefCell;
use std::rc::Rc;

use half::{bf16, f16};
use rapt_core::DType;

use crate::{Meta, OpError, Shapes, ValueId};

/// Where results are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Each result of a node is rounded to its dtype: what the program says.
    Rounded,
    /// Float results stay f64 throughout: what the program would say without rounding.
    Wide,
}

/// The numbers of a storage. Floats of every dtype are f64, integers and booleans i64.
#[derive(Clone, Debug, PartialEq)]
pub enum Cells {
    /// Floats.
    Float(Vec<f64>),
    /// Integers; booleans are 0 and 1.
    Int(Vec<i64>),
}

/// A tensor: a form over numbers that views share.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The form.
    pub meta: Meta,
    cells: Rc<RefCell<Cells>>,
}

/// Whether a dtype's numbers are floats.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// `x` rounded once to a float dtype.
pub(crate) fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        _ => x,
    }
}

/// `x` in an integer dtype: wrapped around, or for booleans whether it is other than 0.
pub(crate) fn wrap(dtype: DType, x: i64) -> i64 {
    match dtype {
        DType::Bool => i64::from(x != 0),
        DType::U8 => i64::from(x as u8),
        DType::I8 => i64::from(x as i8),
        DType::I16 => i64::from(x as i16),
        DType::I32 => i64::from(x as i32),
        _ => x,
    }
}

impl Tensor {
    /// A tensor of zeros, large enough for its form.
    #[must_use]
    pub fn zeros(meta: Meta) -> Tensor {
        let reach: i64 = meta.shape.iter().zip(&meta.strides).map(|(n, s)| (n - 1).max(0) * s).sum();
        let len = usize::try_from(meta.offset + reach + 1).unwrap_or(0);
        let cells = if is_float(meta.dtype) { Cells::Float(vec![0.0; len]) } else { Cells::Int(vec![0; len]) };
        Tensor { meta, cells: Rc::new(RefCell::new(cells)) }
    }

    /// A tensor over these numbers. The caller has checked that the form stays inside them.
    #[must_use]
    pub fn new(meta: Meta, cells: Cells) -> Tensor {
        Tensor { meta, cells: Rc::new(RefCell::new(cells)) }
    }

    /// The same storage in another form.
    #[must_use]
    pub fn view(&self, meta: Meta) -> Tensor {
        Tensor { meta, cells: Rc::clone(&self.cells) }
    }

    /// The places of the elements in the storage, in row-major order of the shape.
    #[must_use]
    pub fn places(&self) -> Vec<usize> {
        let Meta { shape, strides, offset, .. } = &self.meta;
        if shape.contains(&0) {
            return Vec::new();
        }
        let mut places = vec![*offset];
        for (&n, &stride) in shape.iter().zip(strides) {
            places = places.iter().flat_map(|&p| (0..n).map(move |i| p + i * stride)).collect();
        }
        places.iter().map(|&p| usize::try_from(p).unwrap_or(usize::MAX)).collect()
    }

    /// The elements in row-major order as f64: integers are converted, exactly up to 2⁵³.
    #[must_use]
    pub fn floats(&self) -> Vec<f64> {
        let places = self.places();
        match &*self.cells.borrow() {
            Cells::Float(x) => places.iter().map(|&p| x[p]).collect(),
            Cells::Int(x) => places.iter().map(|&p| x[p] as f64).collect(),
        }
    }

    /// The elements in row-major order as i64. Of floats the integer part, which is 0 for NaN and saturates.
    #[must_use]
    pub fn ints(&self) -> Vec<i64> {
        let places = self.places();
        match &*self.cells.borrow() {
            Cells::Float(x) => places.iter().map(|&p| x[p] as i64).collect(),
            Cells::Int(x) => places.iter().map(|&p| x[p]).collect(),
        }
    }

    /// Writes floats in row-major order, each rounded once to the dtype unless the precision is wide.
    pub fn write_floats(&self, precision: Precision, values: impl IntoIterator<Item = f64>) {
        let places = self.places();
        if let Cells::Float(x) = &mut *self.cells.borrow_mut() {
            for (p, value) in places.into_iter().zip(values) {
                x[p] = if precision == Precision::Wide { value } else { round(self.meta.dtype, value) };
            }
        }
    }

    /// Writes integers in row-major order, each wrapped to the dtype.
    pub fn write_ints(&self, values: impl IntoIterator<Item = i64>) {
        let places = self.places();
        if let Cells::Int(x) = &mut *self.cells.borrow_mut() {
            for (p, value) in places.into_iter().zip(values) {
                x[p] = wrap(self.meta.dtype, value);
            }
        }
    }
}

/// What an operation reads while it runs.
pub trait Eval: Shapes {
    /// A tensor.
    ///
    /// # Errors
    /// [`OpError::NotATensor`].
    fn tensor(&self, id: ValueId) -> Result<&Tensor, OpError>;

    /// Where results are rounded.
    fn precision(&self) -> Precision;
}
