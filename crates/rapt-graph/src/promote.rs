//! PyTorch's rules of promotion: the dtype in which an operator computes.
//!
//! Categories come first: boolean, integer, float. Tensors with dimensions decide, then tensors without, then Python's numbers:
//! a lower rank changes the dtype only where it is of a higher category (`result_type` in ATen/native/TypeProperties.cpp).

use rapt_core::DType;

use crate::number::is_float;
use crate::{Meta, Number};

/// The dtype of a float that names none.
pub(crate) const DEFAULT_FLOAT: DType = DType::F32;

/// The dtype of Python's number as an operand.
pub(crate) fn of_number(number: Number) -> DType {
    match number {
        Number::Int(_) => DType::I64,
        Number::Float(_) => DEFAULT_FLOAT,
        Number::Bool(_) => DType::Bool,
    }
}

/// The dtype that holds both: `torch.promote_types`.
#[must_use]
pub(crate) fn promote(a: DType, b: DType) -> DType {
    use DType::{Bool, F32, F64, I8, I16, I32, I64, U8};
    // Of integers the wider wins; uint8 with int8 needs int16.
    const INTS: [DType; 5] = [U8, I8, I16, I32, I64];
    let width = |dtype: DType| INTS.iter().position(|&int| int == dtype).unwrap_or(0);
    match (a, b) {
        _ if a == b => a,
        (Bool, other) | (other, Bool) => other,
        _ if is_float(a) && is_float(b) => {
            // float16 and bfloat16 hold none of each other's range and precision.
            if a == F64 || b == F64 { F64 } else { F32 }
        }
        _ if is_float(a) => a,
        _ if is_float(b) => b,
        (U8, I8) | (I8, U8) => I16,
        _ if width(a) > width(b) => a,
        _ => b,
    }
}

/// Promotion over operands of the three ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Promotion {
    dims: Option<DType>,
    zero_dims: Option<DType>,
    numbers: Option<DType>,
}

impl Promotion {
    pub(crate) fn tensor(self, meta: &Meta) -> Promotion {
        let join = |old: Option<DType>| Some(old.map_or(meta.dtype, |old| promote(old, meta.dtype)));
        if meta.rank() == 0 {
            Promotion { zero_dims: join(self.zero_dims), ..self }
        } else {
            Promotion { dims: join(self.dims), ..self }
        }
    }

    pub(crate) fn number(self, number: Number) -> Promotion {
        let dtype = of_number(number);
        Promotion { numbers: Some(self.numbers.map_or(dtype, |old| promote(old, dtype))), ..self }
    }

    /// The dtype of the result; boolean where there is no operand.
    pub(crate) fn result(self) -> DType {
        let low = combine(self.zero_dims, self.numbers);
        combine(self.dims, low).unwrap_or(DType::Bool)
    }
}

fn combine(higher: Option<DType>, lower: Option<DType>) -> Option<DType> {
    match (higher, lower) {
        (Some(higher), _) if is_float(higher) => Some(higher),
        (Some(higher), Some(lower)) if higher == DType::Bool || is_float(lower) => Some(promote(higher, lower)),
        (Some(higher), _) => Some(higher),
        (None, lower) => lower,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `promotion.tsv` is written by `tests/promotion.py` from torch: every pair of dtypes in each pair of ranks.
    #[test]
    fn every_pair_promotes_as_in_torch() {
        let table = include_str!("../tests/promotion.tsv");
        let operand = |promotion: Promotion, rank: &str, dtype: &str| {
            let dtype = DType::from_name(dtype).expect("a dtype's name");
            match rank {
                "number" if dtype == DType::Bool => promotion.number(Number::Bool(true)),
                "number" if dtype == DType::I64 => promotion.number(Number::Int(1)),
                "number" => promotion.number(Number::Float(1.0)),
                _ => promotion.tensor(&Meta::contiguous(dtype, if rank == "dims" { &[2] } else { &[] })),
            }
        };
        let mut rows = 0;
        for line in table.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<&str> = line.split('\t').collect();
            let &[rank_a, a, rank_b, b, result] = fields.as_slice() else { panic!("{line}") };
            let both = operand(operand(Promotion::default(), rank_a, a), rank_b, b);
            assert_eq!(both.result().name(), result, "{line}");
            rows += 1;
        }
        assert_eq!(rows, 23 * 23, "10 dtypes in two ranks, and 3 kinds of numbers");
    }
}
