//! Sums of products of three tensors: `bilinear`, and `_trilinear`, which its decomposition leaves.
//!
//! `y[n, o] = Σ_i Σ_j a[n, i] · w[o, i, j] · b[n, j] + bias[o]`, in f64 and rounded once. Integers wrap. `_trilinear` says which dimensions
//! each of the three lacks and which are summed; what the third lacks is summed before it is multiplied. Results lie row-major.

use super::linear::Arithmetic;
use super::shape::{bounded, count, expand_places, fresh, misfit, need_number, need_same, refuse};
use crate::number::is_float;
use crate::{Args, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A sum of products.
#[derive(Clone, Debug, PartialEq)]
pub enum Trilinear {
    /// `bilinear`.
    Bilinear {
        /// `[.., i]` and `[.., j]`.
        inputs: [ValueId; 2],
        /// `[o, i, j]`.
        weight: ValueId,
        /// `[o]`.
        bias: Option<ValueId>,
    },
    /// `_trilinear`.
    General {
        /// The factors.
        factors: [ValueId; 3],
        /// Where each factor gets a dimension of size 1, among all dimensions.
        lacks: [Vec<i64>; 3],
        /// The dimensions that are summed.
        summed: Vec<i64>,
        /// The dimension along which the kernel proceeds: what it sums there, it sums last.
        unrolled: i64,
    },
}

impl Trilinear {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Trilinear, OpError>> {
        Some(match target {
            "torch.ops.aten.bilinear.default" => bilinear(args),
            "torch.ops.aten._trilinear.default" => general(args),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let operands = self.operands();
        let dtype = shapes.meta(operands[0])?.dtype;
        need_number("a sum of products", dtype)?;
        for &id in &operands {
            need_same(dtype, shapes.meta(id)?.dtype)?;
        }
        match self {
            Trilinear::Bilinear { inputs, weight, bias } => {
                let [a, b] = [shapes.meta(inputs[0])?, shapes.meta(inputs[1])?];
                let weight = &shapes.meta(*weight)?.shape;
                let (&[outs, rows, columns], [lead @ .., i], [other @ .., j]) =
                    (&weight[..], &a.shape[..], &b.shape[..])
                else {
                    return misfit(format!(
                        "operands of shapes {:?} and {:?}, a weight of {weight:?}",
                        a.shape, b.shape
                    ));
                };
                let bias = bias.map(|id| shapes.meta(id)).transpose()?;
                if lead != other || (rows, columns) != (*i, *j) || bias.is_some_and(|bias| bias.shape[..] != [outs]) {
                    return misfit(format!(
                        "operands of shapes {:?} and {:?}, a weight of {weight:?}",
                        a.shape, b.shape
                    ));
                }
                Ok(vec![fresh(dtype, &[lead, &[outs]].concat())?])
            }
            Trilinear::General { factors, unrolled, .. } => {
                let [a, b, c] = [0, 1, 2].map(|n| shapes.meta(factors[n]));
                let (_, full) = self.aligned([a?, b?, c?])?;
                places_of(&[*unrolled], full.len())?;
                bounded(&full)?;
                let goes = self.goes(full.len())?;
                Ok(vec![fresh(dtype, &without(&full, &goes))?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let operands = self.operands();
        let tensors = operands.iter().map(|&id| eval.tensor(id)).collect::<Result<Vec<_>, _>>()?;
        if is_float(outs[0].meta.dtype) {
            let numbers: Vec<Vec<f64>> = tensors.iter().map(|tensor| tensor.floats()).collect();
            outs[0].write_floats(eval.precision(), self.sums(&tensors, &numbers)?);
        } else {
            let numbers: Vec<Vec<i64>> = tensors.iter().map(|tensor| tensor.ints()).collect();
            outs[0].write_ints(self.sums(&tensors, &numbers)?);
        }
        Ok(())
    }

    /// The result in row-major order, of the operands' numbers.
    fn sums<T: Arithmetic>(&self, tensors: &[&Tensor], numbers: &[Vec<T>]) -> Result<Vec<T>, OpError> {
        let (a, b, c) = (&numbers[0], &numbers[1], &numbers[2]);
        if let Trilinear::Bilinear { .. } = self {
            let [own, rows, columns] = [0, 1, 2].map(|d| count(tensors[2].meta.shape[d]));
            let lead: usize = tensors[0].meta.shape.iter().rev().skip(1).map(|&n| count(n)).product();
            let one = |cell: usize| {
                let (n, o) = (cell / own, cell % own);
                let of_b = &b[n * columns..][..columns];
                // The first tensor's sums first, as PyTorch takes them: what infinite numbers come to depends on it.
                let weight = |i: usize, j: usize| c[(o * rows + i) * columns + j];
                let column = |j: usize| (0..rows).fold(T::ZERO, |sum, i| sum.mul_add(a[n * rows + i], weight(i, j)));
                let bias = numbers.get(3).map_or(T::ZERO, |bias| bias[o]);
                let sum = (0..columns).fold(T::ZERO, |sum, j| sum.mul_add(column(j), of_b[j]));
                sum.mul_add(bias, T::ONE)
            };
            return Ok((0..lead * own).map(one).collect());
        }
        let (shapes, full) = self.aligned([&tensors[0].meta, &tensors[1].meta, &tensors[2].meta])?;
        let goes = self.goes(full.len())?;
        // What the third factor lacks is summed before it comes, as in PyTorch: what infinite numbers come to depends on it.
        let Trilinear::General { lacks, unrolled, .. } = self else {
            return misfit("a sum of products of two tensors");
        };
        let (last, lacks) = (places_of(&[*unrolled], full.len())?, places_of(&lacks[2], full.len())?);
        let first: Vec<usize> = goes.iter().copied().filter(|d| lacks.contains(d) && !last.contains(d)).collect();
        let between = ones(&full, &first);
        let to = expand_places(&between, &full)?;
        let (x, y) = (expand_places(&shapes[0], &full)?, expand_places(&shapes[1], &full)?);
        let mut products = vec![T::ZERO; between.iter().map(|&n| count(n)).product()];
        for (n, &to) in to.iter().enumerate() {
            products[to] = products[to].mul_add(a[x[n]], b[y[n]]);
        }
        let (to, z) = (expand_places(&ones(&full, &goes), &between)?, expand_places(&shapes[2], &between)?);
        let mut sums = vec![T::ZERO; without(&full, &goes).iter().map(|&n| count(n)).product()];
        for (n, &to) in to.iter().enumerate() {
            sums[to] = sums[to].mul_add(products[n], c[z[n]]);
        }
        Ok(sums)
    }

    fn operands(&self) -> Vec<ValueId> {
        match self {
            Trilinear::Bilinear { inputs, weight, bias } => {
                inputs.iter().chain([weight]).chain(bias).copied().collect()
            }
            Trilinear::General { factors, .. } => factors.to_vec(),
        }
    }

    /// The factors' shapes in all dimensions, and the shape that they broadcast to.
    fn aligned(&self, metas: [&Meta; 3]) -> Result<([Vec<i64>; 3], Vec<i64>), OpError> {
        let Trilinear::General { lacks, .. } = self else { return misfit("a sum of products of two tensors") };
        let all = metas[0].rank() + lacks[0].len();
        let one = |n: usize| {
            let lacks = places_of(&lacks[n], all)?;
            let mut own = metas[n].shape.iter();
            let next = |d: usize| if lacks.contains(&d) { Some(1) } else { own.next().copied() };
            let shape: Option<Vec<i64>> = (0..all).map(next).collect();
            match shape {
                Some(shape) if metas[n].rank() + lacks.len() == all => Ok(shape),
                _ => misfit(format!("a factor of shape {:?} among {all} dimensions", metas[n].shape)),
            }
        };
        let shapes = [one(0)?, one(1)?, one(2)?];
        let full = strides::broadcast(shapes.iter().map(|shape| &shape[..]))?;
        Ok((shapes, full))
    }

    /// The dimensions that are summed.
    fn goes(&self, all: usize) -> Result<Vec<usize>, OpError> {
        match self {
            Trilinear::General { summed, .. } => places_of(summed, all),
            Trilinear::Bilinear { .. } => Ok(Vec::new()),
        }
    }
}

/// Dimensions by their numbers, each once.
fn places_of(dims: &[i64], all: usize) -> Result<Vec<usize>, OpError> {
    let mut out = Vec::new();
    for &dim in dims {
        let from_start = if dim < 0 { dim.saturating_add(i64::try_from(all).unwrap_or(i64::MAX)) } else { dim };
        match usize::try_from(from_start) {
            Ok(d) if d < all && !out.contains(&d) => out.push(d),
            _ => return misfit(format!("dimensions {dims:?} of {all}")),
        }
    }
    Ok(out)
}

/// The shape without these dimensions.
fn without(shape: &[i64], dims: &[usize]) -> Vec<i64> {
    (0..shape.len()).filter(|d| !dims.contains(d)).map(|d| shape[d]).collect()
}

/// The shape with size 1 in these dimensions.
fn ones(shape: &[i64], dims: &[usize]) -> Vec<i64> {
    shape.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}

fn bilinear(args: &Args<'_>) -> Result<Trilinear, OpError> {
    let inputs = [args.tensor("input1")?, args.tensor("input2")?];
    Ok(Trilinear::Bilinear { inputs, weight: args.tensor("weight")?, bias: args.opt_tensor("bias")? })
}

fn general(args: &Args<'_>) -> Result<Trilinear, OpError> {
    let known = |name: &str| {
        let known = |int| match int {
            Int::Known(n) => Ok(n),
            Int::Value(_) => refuse(name, "symbolic", "a number is needed here"),
        };
        args.ints(name)?.into_iter().map(known).collect::<Result<Vec<i64>, OpError>>()
    };
    Ok(Trilinear::General {
        factors: [args.tensor("i1")?, args.tensor("i2")?, args.tensor("i3")?],
        lacks: [known("expand1")?, known("expand2")?, known("expand3")?],
        summed: known("sumdim")?,
        unrolled: args.known_int_or("unroll_dim", 1)?,
    })
}
