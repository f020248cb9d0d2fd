//! The interpreter's way to run code: whole tensors, element by element, in f64 and i64.

use rapt_core::DType;

use super::emit::{Emitter, Look};
use super::{Binary, Unary, math};
use crate::number::{float_to_int, int_to_float, is_float, round, wrap};
use crate::{Cells, Eval, OpError, Precision, ValueId};

/// Columns of numbers over one shape. A value of the code is a column's number.
pub(super) struct Columns<'a> {
    eval: &'a dyn Eval,
    shape: &'a [i64],
    columns: Vec<Cells>,
    /// Why a tensor could not be read.
    failed: Option<OpError>,
}

impl<'a> Columns<'a> {
    pub(super) fn new(eval: &'a dyn Eval, shape: &'a [i64]) -> Columns<'a> {
        Columns { eval, shape, columns: Vec::new(), failed: None }
    }

    /// What the code gives.
    pub(super) fn column(mut self, value: usize) -> Result<Cells, OpError> {
        self.failed.map_or_else(|| Ok(self.columns.swap_remove(value)), Err)
    }

    fn push(&mut self, cells: Cells) -> usize {
        self.columns.push(cells);
        self.columns.len() - 1
    }

    fn read(&self, id: ValueId, look: Option<Look>) -> Result<Cells, OpError> {
        let tensor = self.eval.tensor(id)?;
        let seen = match look {
            Some(look) => tensor.view(look.of(&tensor.meta)?),
            None => tensor.clone(),
        };
        Ok(seen.broadcast(self.shape).cast(tensor.meta.dtype, self.eval.precision()))
    }

    fn enter(&mut self, cells: Result<Cells, OpError>) -> usize {
        let cells = cells.unwrap_or_else(|error| {
            self.failed = Some(error);
            Cells::Int(Vec::new())
        });
        self.push(cells)
    }

    fn len(&self) -> usize {
        self.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).product()
    }

    fn wide(&self) -> bool {
        self.eval.precision() == Precision::Wide
    }
}

impl Emitter for Columns<'_> {
    type Value = usize;

    fn tensor(&mut self, id: ValueId) -> usize {
        let cells = self.read(id, None);
        self.enter(cells)
    }

    fn seen(&mut self, id: ValueId, look: Look) -> usize {
        let cells = self.read(id, Some(look));
        self.enter(cells)
    }

    fn lane(&self, dtype: DType) -> DType {
        if is_float(dtype) { DType::F64 } else { dtype }
    }

    fn rounds(&self) -> bool {
        !self.wide()
    }

    fn float(&mut self, _: DType, x: f64) -> usize {
        self.push(Cells::Float(vec![x; self.len()]))
    }

    fn int(&mut self, _: DType, n: i64) -> usize {
        self.push(Cells::Int(vec![n; self.len()]))
    }

    fn convert(&mut self, x: usize, _: DType, to: DType) -> usize {
        let wide = self.wide();
        let cells = match (&self.columns[x], is_float(to)) {
            (Cells::Float(x), true) if wide => Cells::Float(x.clone()),
            (Cells::Float(x), true) => Cells::Float(x.iter().map(|&x| round(to, x)).collect()),
            (Cells::Float(x), false) => Cells::Int(x.iter().map(|&x| float_to_int(to, x)).collect()),
            (Cells::Int(x), true) if wide => Cells::Float(x.iter().map(|&x| x as f64).collect()),
            (Cells::Int(x), true) => Cells::Float(x.iter().map(|&x| int_to_float(to, x)).collect()),
            (Cells::Int(x), false) => Cells::Int(x.iter().map(|&x| wrap(to, x)).collect()),
        };
        self.push(cells)
    }

    fn unary(&mut self, op: Unary, x: usize, (compute, result): (DType, DType)) -> usize {
        let cells = match &self.columns[x] {
            Cells::Float(x) if is_float(result) => Cells::Float(x.iter().map(|&x| math::unary_float(op, x)).collect()),
            Cells::Float(x) => Cells::Int(x.iter().map(|&x| math::unary_float(op, x) as i64).collect()),
            Cells::Int(x) => {
                let is_bool = compute == DType::Bool;
                Cells::Int(x.iter().map(|&x| wrap(result, math::unary_int(op, x, is_bool))).collect())
            }
        };
        self.push(cells)
    }

    fn binary(&mut self, op: Binary, [a, b]: [usize; 2], (_, result): (DType, DType)) -> usize {
        let cells = match (&self.columns[a], &self.columns[b]) {
            (Cells::Float(a), Cells::Float(b)) => {
                let values = a.iter().zip(b).map(|(&a, &b)| math::binary_float(op, a, b, |x| x));
                if is_float(result) {
                    Ok(Cells::Float(values.collect()))
                } else {
                    Ok(Cells::Int(values.map(|x| x as i64).collect()))
                }
            }
            (Cells::Int(a), Cells::Int(b)) => {
                let values = a.iter().zip(b).map(|(&a, &b)| Ok(wrap(result, math::binary_int(op, a, b)?)));
                values.collect::<Result<_, OpError>>().map(Cells::Int)
            }
            _ => Err(OpError::Refused("operands of two kinds")),
        };
        self.enter(cells)
    }

    fn mul_add(&mut self, [a, b, c]: [usize; 3], dtype: DType) -> usize {
        let product = self.binary(Binary::Mul, [a, b], (dtype, dtype));
        self.binary(Binary::Add, [product, c], (dtype, dtype))
    }

    fn select(&mut self, condition: usize, [a, b]: [usize; 2], _: DType) -> usize {
        fn pick<T: Copy>(condition: &Cells, a: &[T], b: &[T]) -> Vec<T> {
            let Cells::Int(condition) = condition else { return Vec::new() };
            condition.iter().zip(a.iter().zip(b)).map(|(&c, (&a, &b))| if c == 0 { b } else { a }).collect()
        }
        let condition = &self.columns[condition];
        let cells = match (&self.columns[a], &self.columns[b]) {
            (Cells::Float(a), Cells::Float(b)) => Ok(Cells::Float(pick(condition, a, b))),
            (Cells::Int(a), Cells::Int(b)) => Ok(Cells::Int(pick(condition, a, b))),
            _ => Err(OpError::Refused("operands of two kinds")),
        };
        self.enter(cells)
    }
}
