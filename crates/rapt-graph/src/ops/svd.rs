//! Singular values: `linalg_svdvals`, and of `linalg_svd` and `_linalg_svd` the values alone.
//!
//! `A = U · diag(s) · Vᵀ`, `s` in descending order. The columns of A (its rows, where there are fewer of them) are turned in pairs until
//! each is orthogonal to every other; their lengths are the singular values (one-sided Jacobi: Hestenes 1958). In f64, rounded once. A
//! matrix with an infinite number has NaN for singular values, and one with NaN has none: PyTorch raises, and so do runs here.
//!
//! Deliberately absent: the vectors. Their signs, and those of equal values altogether, are the algorithm's choice, so that none but
//! PyTorch's own gives PyTorch's; a program that reads them is refused when it is loaded.

use rapt_core::DType;

use super::linear::dot;
use super::shape::{count, fresh, ignore, misfit};
use crate::{Args, Eval, OpError, Out, Shapes, Tensor, ValueId};

/// A decomposition into singular values.
#[derive(Clone, Debug, PartialEq)]
pub struct Svd {
    /// The matrices, in the last two dimensions.
    input: ValueId,
    /// What the vectors would be, where they are results too.
    vectors: Option<Vectors>,
}

/// The form of vectors that nobody reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vectors {
    /// Whether they are computed at all; else they are tensors without elements.
    computed: bool,
    /// Whether those of 0 are there too.
    full: bool,
}

/// How often every pair is turned at most. Matrices of any size need about ten rounds.
const MOST_ROUNDS: usize = 60;

impl Svd {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Svd, OpError>> {
        let full = |default: bool| args.bool_or("full_matrices", default);
        let vectors = match target.strip_prefix("torch.ops.aten.")? {
            "linalg_svdvals.default" => Ok(None),
            "linalg_svd.default" => full(true).map(|full| Some(Vectors { computed: true, full })),
            "_linalg_svd.default" => {
                full(false).and_then(|full| Ok(Some(Vectors { computed: args.bool_or("compute_uv", true)?, full })))
            }
            _ => return None,
        };
        // Which of LAPACK's or cuSOLVER's drivers is asked for.
        ignore(args, &["driver"]);
        Some(vectors.and_then(|vectors| Ok(Svd { input: args.tensor("A")?, vectors })))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        need_values(meta.dtype)?;
        let [lead @ .., rows, columns] = &meta.shape[..] else {
            return misfit(format!("singular values of a tensor of shape {:?}", meta.shape));
        };
        let size = *rows.min(columns);
        let values = fresh(meta.dtype, &[lead, &[size]].concat())?;
        let Some(Vectors { computed, full }) = self.vectors else { return Ok(vec![values]) };
        if !computed {
            let nothing = || fresh(meta.dtype, &[0]);
            return Ok(vec![nothing()?, values, nothing()?]);
        }
        let by_columns = |rows: i64, columns: i64| {
            let Out::Fresh(mut form) = fresh(meta.dtype, &[lead, &[columns, rows]].concat())? else {
                return misfit("vectors without a form");
            };
            let last = form.rank() - 1;
            form.shape.swap(last - 1, last);
            form.strides.swap(last - 1, last);
            Ok(Out::Fresh(form))
        };
        let (left, right) = if full { (*rows, *columns) } else { (size, size) };
        Ok(vec![by_columns(*rows, left)?, values, by_columns(right, *columns)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let x = input.floats();
        let [.., rows, columns] = input.meta.shape[..] else { return misfit("singular values of no matrix") };
        let (rows, columns) = (count(rows), count(columns));
        let mut all = Vec::new();
        for matrix in x.chunks((rows * columns).max(1)) {
            all.extend(singular_values(matrix, rows, columns)?);
        }
        outs[usize::from(self.vectors.is_some())].write_floats(eval.precision(), all);
        Ok(())
    }

    /// The places of the results that are not computed.
    pub(crate) fn absent(&self) -> &'static [usize] {
        if self.vectors.is_some_and(|vectors| vectors.computed) { &[0, 2] } else { &[] }
    }
}

/// That a dtype is one of which PyTorch has singular values.
pub(super) fn need_values(dtype: DType) -> Result<(), OpError> {
    match dtype {
        DType::F32 | DType::F64 => Ok(()),
        dtype => Err(OpError::Dtype { what: "a singular value", dtype }),
    }
}

/// The singular values of a row-major matrix, in descending order.
pub(super) fn singular_values(x: &[f64], rows: usize, columns: usize) -> Result<Vec<f64>, OpError> {
    let size = rows.min(columns);
    if x.iter().any(|x| x.is_nan()) {
        return Err(OpError::Refused("a matrix with NaN has no singular values"));
    }
    let largest = x.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    if largest.is_infinite() {
        return Ok(vec![f64::NAN; size]);
    }
    if size == 0 || largest == 0.0 {
        return Ok(vec![0.0; size]);
    }
    // The shorter side's vectors, so scaled that no product leaves the range of f64.
    let part = |v: usize, k: usize| if columns <= rows { x[k * columns + v] } else { x[v * columns + k] } / largest;
    let mut vectors: Vec<Vec<f64>> = (0..size).map(|v| (0..rows.max(columns)).map(|k| part(v, k)).collect()).collect();
    for _ in 0..MOST_ROUNDS {
        if !turn_all(&mut vectors) {
            break;
        }
    }
    let length = |vector: &Vec<f64>| dot(vector, vector).sqrt() * largest;
    let mut values: Vec<f64> = vectors.iter().map(length).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    Ok(values)
}

/// Turns each pair of vectors in its plane, so that they are orthogonal. Whether one was not.
///
/// `ζ = (b·b − a·a) / 2a·b`, `t = sign(ζ) / (|ζ| + √(1 + ζ²))`, `a ← c·a − s·b`, `b ← s·a + c·b` with `c = 1/√(1 + t²)`, `s = c·t`.
fn turn_all(vectors: &mut [Vec<f64>]) -> bool {
    let mut turned = false;
    for q in 1..vectors.len() {
        let (before, from) = vectors.split_at_mut(q);
        let b = &mut from[0];
        for a in before {
            let (aa, bb, ab) = (dot(a, a), dot(b, b), dot(a, b));
            if ab.abs() <= f64::EPSILON * aa.sqrt() * bb.sqrt() || ab == 0.0 {
                continue;
            }
            turned = true;
            let zeta = (bb - aa) / (2.0 * ab);
            let t = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
            let cos = 1.0 / t.hypot(1.0);
            let sin = cos * t;
            for (x, y) in a.iter_mut().zip(b.iter_mut()) {
                (*x, *y) = (cos * *x - sin * *y, sin * *x + cos * *y);
            }
        }
    }
    turned
}

#[cfg(test)]
mod tests {
    use super::singular_values;

    #[test]
    fn values_of_matrices_that_are_known() {
        let near = |x: &[f64], rows, columns, expected: &[f64]| {
            let got = singular_values(x, rows, columns).unwrap();
            let off = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(got.len() == expected.len() && off <= 1e-15 * expected[0], "{got:?}, expected {expected:?}");
        };
        near(&[3.0, 0.0, 4.0, 5.0], 2, 2, &[45f64.sqrt(), 5f64.sqrt()]);
        near(&[1.0, 2.0, 2.0], 1, 3, &[3.0]);
        near(&[1.0, 2.0, 2.0], 3, 1, &[3.0]);
        // Two columns of three depend on the first.
        near(&[1.0, 2.0, 3.0, 2.0, 4.0, 6.0], 2, 3, &[70f64.sqrt(), 0.0]);
        near(&[0.0; 6], 2, 3, &[0.0, 0.0]);
        near(&[1e200, 0.0, 0.0, 1e-200], 2, 2, &[1e200, 1e-200]);
    }
}
