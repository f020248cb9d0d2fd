//! The interpreter's tensors: numbers in f64 or i64, shared between views.

use std::cell::RefCell;
use std::rc::Rc;

use rapt_core::DType;

pub(crate) use crate::number::{is_float, round, wrap};

use crate::number::{float_to_int, int_to_float};
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
    /// What an offset of 0 means: other than 0 where a caller's tensor starts elsewhere than the program states.
    base: i64,
}

impl Tensor {
    /// A tensor of zeros, large enough for its form.
    #[must_use]
    pub fn zeros(meta: Meta) -> Tensor {
        let len = meta.extent().and_then(|extent| usize::try_from(extent).ok()).unwrap_or(0);
        let cells = if is_float(meta.dtype) { Cells::Float(vec![0.0; len]) } else { Cells::Int(vec![0; len]) };
        Tensor { meta, cells: Rc::new(RefCell::new(cells)), base: 0 }
    }

    /// A tensor over these numbers. The caller has checked that the form stays inside them.
    #[must_use]
    pub fn new(meta: Meta, cells: Cells) -> Tensor {
        Tensor { meta, cells: Rc::new(RefCell::new(cells)), base: 0 }
    }

    /// The same storage in another form.
    #[must_use]
    pub fn view(&self, meta: Meta) -> Tensor {
        Tensor { meta, cells: Rc::clone(&self.cells), base: self.base }
    }

    /// The same elements, said to start at another offset of the storage: the caller's tensor as the program states it.
    #[must_use]
    pub(crate) fn at_offset(&self, offset: i64) -> Tensor {
        let meta = Meta { offset, ..self.meta.clone() };
        Tensor { base: self.base + self.meta.offset - offset, meta, cells: Rc::clone(&self.cells) }
    }

    /// The tensor in a larger shape: a dimension of size 1, or none, stands for every index. The caller has checked that the
    /// shape is one that it broadcasts to.
    #[must_use]
    pub fn broadcast(&self, shape: &[i64]) -> Tensor {
        self.view(self.meta.broadcast(shape))
    }

    /// Whether both have one storage.
    #[must_use]
    pub fn shares(&self, other: &Tensor) -> bool {
        Rc::ptr_eq(&self.cells, &other.cells)
    }

    /// All numbers of the storage.
    #[must_use]
    pub fn storage(&self) -> Cells {
        self.cells.borrow().clone()
    }

    /// Puts back what [`Tensor::storage`] gave.
    pub(crate) fn restore(&self, cells: Cells) {
        *self.cells.borrow_mut() = cells;
    }

    /// The elements in row-major order, converted to a dtype as PyTorch converts them. Wide floats are not rounded.
    #[must_use]
    pub fn cast(&self, to: DType, precision: Precision) -> Cells {
        let places = self.places();
        let wide = precision == Precision::Wide;
        match (&*self.cells.borrow(), is_float(to)) {
            (Cells::Float(x), true) if wide => Cells::Float(places.iter().map(|&p| x[p]).collect()),
            (Cells::Float(x), true) => Cells::Float(places.iter().map(|&p| round(to, x[p])).collect()),
            (Cells::Float(x), false) => Cells::Int(places.iter().map(|&p| float_to_int(to, x[p])).collect()),
            (Cells::Int(x), true) if wide => Cells::Float(places.iter().map(|&p| x[p] as f64).collect()),
            (Cells::Int(x), true) => Cells::Float(places.iter().map(|&p| int_to_float(to, x[p])).collect()),
            (Cells::Int(x), false) => Cells::Int(places.iter().map(|&p| wrap(to, x[p])).collect()),
        }
    }

    /// Writes numbers in row-major order, rounded or wrapped to the tensor's dtype; those of another kind are converted.
    pub fn write(&self, precision: Precision, cells: Cells) {
        match (cells, is_float(self.meta.dtype)) {
            (Cells::Float(x), true) => self.write_floats(precision, x),
            (Cells::Int(x), false) => self.write_ints(x),
            (Cells::Float(x), false) => self.write_ints(x.into_iter().map(|x| float_to_int(self.meta.dtype, x))),
            (Cells::Int(x), true) => {
                self.write_floats(precision, x.into_iter().map(|n| int_to_float(self.meta.dtype, n)));
            }
        }
    }

    /// The places of the elements in the storage, in row-major order of the shape.
    #[must_use]
    pub fn places(&self) -> Vec<usize> {
        let Meta { shape, strides, offset, .. } = &self.meta;
        if shape.contains(&0) {
            return Vec::new();
        }
        let mut places = vec![self.base + *offset];
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
