//! Losses, of models that are exported with theirs.
//!
//! A loss of each element (`mse_loss` and its kin) or of each row of classes (`nll_loss`, `cross_entropy_loss`), then none, the mean
//! or the sum of them: all in f64, rounded once.

use rapt_core::DType;

use super::shape::{Lanes, bounded, count, expand_places, fresh, like, misfit, need_float, need_same, refuse};
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// What the model says.
    input: ValueId,
    /// What it should say.
    target: ValueId,
    /// Of each element or each class, how much it counts.
    weight: Option<ValueId>,
    /// What is computed.
    kind: Kind,
    /// What is made of the losses.
    reduction: Reduction,
}

/// What a loss is of an element x with the target t.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// `(x − t)²`
    Square,
    /// `|x − t|`
    Absolute,
    /// `d² / 2β` where `d = |x − t|` is below β, else `d − β/2`.
    Smooth(f64),
    /// `d² / 2` where `d = |x − t|` is at most δ, else `δ (d − δ/2)`.
    Huber(f64),
    /// `log(1 + e^(−x·t))`
    SoftMargin,
    /// `t (log t − x)`, or `e^t (t − x)` of logarithms.
    Divergence { log_target: bool },
    /// `e^x − t x`, or `x − t log(x + eps)`; in full with Stirling's approximation of `log t!` where t is above 1.
    Poisson { log_input: bool, full: bool, eps: f64 },
    /// `(t − 1) log(1 − x) − t log x`, no logarithm below −100.
    BinaryEntropy,
    /// The same of the sigmoid of x; the positive part counts as much as the weight says.
    BinaryEntropyOfLogits { positive: Option<ValueId> },
    /// `−x` of the target's class.
    Likelihood { ignored: i64 },
    /// The same of the logarithm of the softmax of x. A share of each target is spread over all classes.
    CrossEntropy { ignored: i64, smoothing: f64 },
}

/// What is made of the losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    None,
    Mean,
    Sum,
}

impl Reduction {
    /// The losses, or their mean or sum.
    pub(super) fn of(self, losses: Vec<f64>) -> Vec<f64> {
        let n = losses.len() as f64;
        let sum = || losses.iter().fold(0.0, |sum, x| sum + x);
        match self {
            Reduction::None => losses,
            Reduction::Mean => vec![sum() / n],
            Reduction::Sum => vec![sum()],
        }
    }
}

/// What is made of the losses, by its number.
pub(super) fn reduction(args: &Args<'_>) -> Result<Reduction, OpError> {
    match args.known_int_or("reduction", 1)? {
        0 => Ok(Reduction::None),
        1 => Ok(Reduction::Mean),
        2 => Ok(Reduction::Sum),
        other => refuse("reduction", other.to_string(), "it is 0 (none), 1 (mean) or 2 (sum)"),
    }
}

impl Loss {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Loss, OpError>> {
        let number = |name: &str| args.opt_float(name).map(|x| x.unwrap_or(1.0));
        let ignored = || args.known_int_or("ignore_index", -100);
        let kind = match target.strip_prefix("torch.ops.aten.")?.strip_suffix(".default")? {
            "mse_loss" => Ok(Kind::Square),
            "l1_loss" => Ok(Kind::Absolute),
            "smooth_l1_loss" => number("beta").map(Kind::Smooth),
            "huber_loss" => number("delta").map(Kind::Huber),
            "soft_margin_loss" => Ok(Kind::SoftMargin),
            "kl_div" => args.bool_or("log_target", false).map(|log_target| Kind::Divergence { log_target }),
            "poisson_nll_loss" => args.bool_or("log_input", true).and_then(|log_input| {
                let eps = args.opt_float("eps")?.unwrap_or(1e-8);
                Ok(Kind::Poisson { log_input, full: args.bool_or("full", false)?, eps })
            }),
            "binary_cross_entropy" => Ok(Kind::BinaryEntropy),
            "binary_cross_entropy_with_logits" => {
                args.opt_tensor("pos_weight").map(|positive| Kind::BinaryEntropyOfLogits { positive })
            }
            "nll_loss" | "nll_loss_nd" | "nll_loss2d" => ignored().map(|ignored| Kind::Likelihood { ignored }),
            "cross_entropy_loss" => ignored().and_then(|ignored| {
                let smoothing = args.opt_float("label_smoothing")?.unwrap_or(0.0);
                Ok(Kind::CrossEntropy { ignored, smoothing })
            }),
            _ => return None,
        };
        Some(kind.and_then(|kind| {
            let weighs = !matches!(
                kind,
                Kind::Square
                    | Kind::Absolute
                    | Kind::Smooth(_)
                    | Kind::Huber(_)
                    | Kind::SoftMargin
                    | Kind::Divergence { .. }
                    | Kind::Poisson { .. }
            );
            let weight = if weighs { args.opt_tensor("weight")? } else { None };
            let name = if matches!(kind, Kind::Poisson { .. }) { "input" } else { "self" };
            let (input, target) = (args.tensor(name)?, args.tensor("target")?);
            Ok(Loss { input, target, weight, kind, reduction: reduction(args)? })
        }))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (input, target) = (shapes.meta(self.input)?, shapes.meta(self.target)?);
        need_float("a loss", input.dtype)?;
        for id in [self.weight, self.positive()].into_iter().flatten() {
            need_same(input.dtype, shapes.meta(id)?.dtype)?;
        }
        if self.is_of_classes() {
            let shape = self.classes(shapes)?;
            return match self.reduction {
                // Of images, they lie as the classes do.
                Reduction::None if shape.len() == 3 && target.dtype == DType::I64 => {
                    bounded(&shape)?;
                    Ok(vec![Out::Fresh(like(target, input.dtype))])
                }
                Reduction::None => Ok(vec![fresh(input.dtype, &shape)?]),
                _ => Ok(vec![fresh(input.dtype, &[])?]),
            };
        }
        need_same(input.dtype, target.dtype)?;
        let shape = self.whole(shapes)?;
        if self.reduction != Reduction::None {
            return Ok(vec![fresh(input.dtype, &[])?]);
        }
        bounded(&shape)?;
        let lie = strides::of_pointwise(&shape, &[input, target]);
        Ok(vec![Out::Fresh(Meta { dtype: input.dtype, shape, strides: lie, offset: 0 })])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (losses, weight) = match self.kind {
            Kind::Likelihood { .. } | Kind::CrossEntropy { .. } => self.of_classes(eval)?,
            _ => {
                let losses = self.of_elements(eval)?;
                let n = losses.len() as f64;
                (losses, n)
            }
        };
        let sum = || losses.iter().fold(0.0, |sum, x| sum + x);
        let reduced = match self.reduction {
            Reduction::None => losses,
            Reduction::Mean => vec![sum() / weight],
            Reduction::Sum => vec![sum()],
        };
        outs[0].write_floats(eval.precision(), reduced);
        Ok(())
    }

    fn positive(&self) -> Option<ValueId> {
        if let Kind::BinaryEntropyOfLogits { positive } = self.kind { positive } else { None }
    }

    fn is_of_classes(&self) -> bool {
        matches!(self.kind, Kind::Likelihood { .. } | Kind::CrossEntropy { .. })
    }

    /// The shape that all operands of a loss of elements broadcast to.
    fn whole(&self, shapes: &dyn Shapes) -> Result<Vec<i64>, OpError> {
        let mut whole = shapes.meta(self.input)?.shape.clone();
        for id in [Some(self.target), self.weight, self.positive()].into_iter().flatten() {
            whole = strides::broadcast([&whole[..], &shapes.meta(id)?.shape])?;
        }
        Ok(whole)
    }

    fn of_elements(&self, eval: &dyn Eval) -> Result<Vec<f64>, OpError> {
        let whole = self.whole(eval)?;
        let numbers = |id: ValueId| -> Result<Vec<f64>, OpError> {
            let tensor = eval.tensor(id)?;
            let x = tensor.floats();
            Ok(expand_places(&tensor.meta.shape, &whole)?.into_iter().map(|p| x[p]).collect())
        };
        let (x, t) = (numbers(self.input)?, numbers(self.target)?);
        if self.kind == Kind::BinaryEntropy && x.iter().any(|x| !(0.0..=1.0).contains(x)) {
            return Err(OpError::Refused("binary_cross_entropy of a number that is not between 0 and 1"));
        }
        let positive = self.positive().map(numbers).transpose()?;
        let one = |n: usize| of_element(self.kind, x[n], t[n], positive.as_ref().map(|p| p[n]));
        let mut losses: Vec<f64> = (0..x.len()).map(one).collect();
        if let Some(weight) = self.weight.map(numbers).transpose()? {
            losses.iter_mut().zip(weight).for_each(|(loss, weight)| *loss *= weight);
        }
        Ok(losses)
    }

    /// The shape of the losses of rows of classes, which lie along dimension 1, or in a vector.
    fn classes(&self, shapes: &dyn Shapes) -> Result<Vec<i64>, OpError> {
        let (input, target) = (shapes.meta(self.input)?, shapes.meta(self.target)?);
        let mut shape = input.shape.clone();
        if shape.is_empty() {
            return misfit("a loss of classes of a tensor without dimensions");
        }
        let classes = shape.remove(usize::from(shape.len() > 1));
        if let Some(weight) = self.weight {
            let weight = &shapes.meta(weight)?.shape;
            if weight[..] != [classes] {
                return misfit(format!("weights of shape {weight:?} for {classes} classes"));
            }
        }
        if matches!(self.kind, Kind::CrossEntropy { .. }) && target.dtype == input.dtype {
            if target.shape != input.shape {
                return misfit(format!("targets of shape {:?} for {:?}", target.shape, input.shape));
            }
        } else if target.dtype != DType::I64 {
            return Err(OpError::Dtype { what: "classes", dtype: target.dtype });
        } else if target.shape != shape {
            return misfit(format!("classes of shape {:?} for {:?}", target.shape, input.shape));
        }
        Ok(shape)
    }

    /// The losses, and what their sum is divided by for the mean.
    fn of_classes(&self, eval: &dyn Eval) -> Result<(Vec<f64>, f64), OpError> {
        let (input, target) = (eval.tensor(self.input)?, eval.tensor(self.target)?);
        let lanes = Lanes::of(&input.meta.shape, usize::from(input.meta.rank() > 1));
        let (ignored, smoothing, is_log) = match self.kind {
            Kind::CrossEntropy { ignored, smoothing } => (ignored, smoothing, false),
            Kind::Likelihood { ignored } => (ignored, 0.0, true),
            _ => return misfit("a loss of elements"),
        };
        let weight = self.weight.map(|id| eval.tensor(id).map(Tensor::floats)).transpose()?;
        let weight = |class: usize| weight.as_ref().map_or(1.0, |weight| weight[class]);
        let (x, share) = (input.floats(), smoothing / lanes.size as f64);
        let row = |start: usize| -> Vec<f64> {
            let row: Vec<f64> = (0..lanes.size).map(|k| x[start + k * lanes.inner]).collect();
            if is_log { row } else { log_softmax(&row) }
        };
        // The part of a target that is spread over all classes.
        let spread = |row: &[f64]| row.iter().enumerate().fold(0.0, |sum, (class, x)| sum - x * weight(class)) * share;
        if target.meta.dtype != DType::I64 {
            let t = target.floats();
            let one = |start: usize| {
                let row = row(start);
                let part = |class: usize| row[class] * weight(class) * t[start + class * lanes.inner];
                (0..lanes.size).fold(0.0, |sum, class| sum - part(class)) * (1.0 - smoothing) + spread(&row)
            };
            let losses: Vec<f64> = lanes.starts().map(one).collect();
            let rows = losses.len() as f64;
            return Ok((losses, rows));
        }
        let (mut losses, mut whole) = (Vec::new(), 0.0);
        for (start, class) in lanes.starts().zip(target.ints()) {
            if class == ignored {
                losses.push(0.0);
                continue;
            }
            let size = i64::try_from(lanes.size).unwrap_or(i64::MAX);
            if class < 0 || class >= size {
                return Err(OpError::IndexOutOfRange { index: class, dim: 1, size });
            }
            let (row, class) = (row(start), count(class));
            losses
                .push(-row[class] * weight(class) * (1.0 - smoothing) + if share == 0.0 { 0.0 } else { spread(&row) });
            whole += weight(class);
        }
        Ok((losses, whole))
    }
}

fn of_element(kind: Kind, x: f64, t: f64, positive: Option<f64>) -> f64 {
    let distance = (x - t).abs();
    match kind {
        Kind::Square => distance * distance,
        Kind::Smooth(beta) if distance < beta => 0.5 * distance * distance / beta,
        Kind::Smooth(beta) => distance - 0.5 * beta,
        Kind::Huber(delta) if distance <= delta => 0.5 * distance * distance,
        Kind::Huber(delta) => delta * (distance - 0.5 * delta),
        Kind::SoftMargin => soft(-x * t),
        Kind::Divergence { log_target: true } => t.exp() * (t - x),
        Kind::Divergence { log_target: false } => (if t == 0.0 { 0.0 } else { t * t.ln() }) - t * x,
        Kind::Poisson { log_input, full, eps } => {
            let own = if log_input { x.exp() - t * x } else { x - t * (x + eps).ln() };
            let stirling = t * t.ln() - t + 0.5 * (std::f64::consts::TAU * t).ln();
            if full && t > 1.0 { own + stirling } else { own }
        }
        Kind::BinaryEntropy => (t - 1.0) * (-x).ln_1p().max(-100.0) - t * x.ln().max(-100.0),
        // log(sigmoid(x)) = −log(1 + e^−x)
        Kind::BinaryEntropyOfLogits { .. } => {
            (1.0 - t) * x + positive.map_or(1.0, |positive| (positive - 1.0) * t + 1.0) * soft(-x)
        }
        Kind::Absolute | Kind::Likelihood { .. } | Kind::CrossEntropy { .. } => distance,
    }
}

/// `log(1 + e^x)`
fn soft(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn log_softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
    x.iter().map(|x| x - max - sum.ln()).collect()
}
