//! Quantiles: `quantile` and `nanquantile`, of a dimension or of all numbers.
//!
//! `rank = q · (n − 1)`; the result lies between the numbers of the two ranks beside it, or is one of them. A NaN among the numbers is
//! the result; `nanquantile` passes NaN over. Ranks are rounded to the dtype, as PyTorch's are: they say which number is nearest.

use rapt_core::DType;

use super::reduce::{kept_and_reduced, reduced};
use super::shape::{fresh, misfit, refuse};
use crate::number::round;
use crate::{Args, Eval, Meta, OpError, Out, Precision, Shapes, Tensor, ValueId};

/// Quantiles.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantile {
    /// The numbers, in float32 or float64.
    input: ValueId,
    /// Which quantiles, between 0 and 1.
    q: Which,
    /// The dimension, or all.
    dim: Option<i64>,
    /// Whether it stays with size 1.
    keepdim: bool,
    /// What lies between two ranks.
    between: Between,
    /// Whether NaN is passed over.
    skips_nan: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Which {
    Number(f64),
    /// A tensor of at most one dimension, which is then the result's first.
    Tensor(ValueId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    Linear,
    Lower,
    Higher,
    Midpoint,
    Nearest,
}

impl Quantile {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Quantile, OpError>> {
        let skips_nan = match target.strip_prefix("torch.ops.aten.")? {
            "quantile.default" | "quantile.scalar" => false,
            "nanquantile.default" | "nanquantile.scalar" => true,
            _ => return None,
        };
        let read = || {
            let between = match args.opt_str("interpolation")?.unwrap_or("linear") {
                "linear" => Between::Linear,
                "lower" => Between::Lower,
                "higher" => Between::Higher,
                "midpoint" => Between::Midpoint,
                "nearest" => Between::Nearest,
                other => return refuse("interpolation", other, "it is linear, lower, higher, midpoint or nearest"),
            };
            let q = match args.raw("q") {
                Some(rapt_pt2::Argument::Tensor(_)) => Which::Tensor(args.tensor("q")?),
                _ => Which::Number(args.opt_float("q")?.ok_or_else(|| OpError::MissingArgument("q".into()))?),
            };
            let dim = args.opt_int("dim")?.map(|_| args.known_int("dim")).transpose()?;
            let keepdim = args.bool_or("keepdim", false)?;
            Ok(Quantile { input: args.tensor("self")?, q, dim, keepdim, between, skips_nan })
        };
        Some(read())
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        if !matches!(meta.dtype, DType::F32 | DType::F64) {
            return Err(OpError::Dtype { what: "a quantile", dtype: meta.dtype });
        }
        let mut shape = reduced(&meta.shape, &self.dims(meta)?, self.keepdim);
        if meta.numel() == 0 {
            return misfit("a quantile of no numbers");
        }
        if let Which::Tensor(id) = self.q {
            let q = shapes.meta(id)?;
            super::shape::need_same(meta.dtype, q.dtype)?;
            if q.rank() > 1 {
                return misfit(format!("quantiles of shape {:?}", q.shape));
            }
            shape.splice(0..0, q.shape.iter().copied());
        }
        Ok(vec![fresh(meta.dtype, &shape)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let dtype = if eval.precision() == Precision::Wide { DType::F64 } else { input.meta.dtype };
        let quantiles = match self.q {
            Which::Number(q) => vec![round(dtype, q)],
            Which::Tensor(id) => eval.tensor(id)?.floats(),
        };
        if quantiles.iter().any(|q| !(0.0..=1.0).contains(q)) {
            return Err(OpError::Refused("a quantile that is not between 0 and 1"));
        }
        let (starts, steps) = kept_and_reduced(&input.meta.shape, &self.dims(&input.meta)?);
        let x = input.floats();
        let mut rows = Vec::with_capacity(starts.len());
        for start in &starts {
            let mut row: Vec<f64> = steps.iter().map(|step| x[start + step]).collect();
            let has_nan = row.iter().any(|x| x.is_nan());
            if self.skips_nan {
                row.retain(|x| !x.is_nan());
            }
            row.sort_by(f64::total_cmp);
            rows.push((row, has_nan && !self.skips_nan));
        }
        let one = |q: f64, (row, is_nan): &(Vec<f64>, bool)| {
            if *is_nan || row.is_empty() { f64::NAN } else { self.of_sorted(row, q, dtype) }
        };
        let all: Vec<f64> = quantiles.iter().flat_map(|&q| rows.iter().map(move |row| one(q, row))).collect();
        outs[0].write_floats(eval.precision(), all);
        Ok(())
    }

    fn of_sorted(&self, row: &[f64], q: f64, dtype: DType) -> f64 {
        let rank = round(dtype, q * (row.len() - 1) as f64);
        let at = |rank: f64| row[(rank as usize).min(row.len() - 1)];
        match self.between {
            Between::Lower => at(rank.floor()),
            Between::Higher => at(rank.ceil()),
            Between::Nearest => at(rank.round_ties_even()),
            Between::Midpoint | Between::Linear => {
                let (low, high) = (at(rank.floor()), at(rank.ceil()));
                let weight = if self.between == Between::Midpoint { 0.5 } else { rank - rank.floor() };
                // As `lerp` computes it, from the nearer end.
                if weight < 0.5 { low + weight * (high - low) } else { high - (high - low) * (1.0 - weight) }
            }
        }
    }

    fn dims(&self, meta: &Meta) -> Result<Vec<usize>, OpError> {
        match self.dim {
            None => Ok((0..meta.rank()).collect()),
            Some(dim) => super::shape::dims_of(meta, &[dim]),
        }
    }
}
