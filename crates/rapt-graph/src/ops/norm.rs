//! Normalisation: layer, RMS, group and batch norm.
//!
//! `y = (x − mean) / √(var + eps) · weight + bias`, with mean and biased variance over the normalised part; RMS norm has
//! `y = x / √(mean(x²) + eps) · weight`. Everything is computed in f64 and rounded once. Weights may be f32 where the input
//! is f16 or bf16, as PyTorch's kernels take them.
//!
//! Deliberately absent: training.

use rapt_core::DType;

use super::shape::{
    bounded, count, fresh, fresh_in_format, ignore, is_channels_last, misfit, need_float, opt_floats_of, refuse,
};
use crate::{Args, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// As many groups as there are channels.
pub const EACH_CHANNEL: i64 = 0;

/// A normalisation.
#[derive(Clone, Debug, PartialEq)]
pub enum Norm {
    /// `layer_norm` and `native_layer_norm`, `rms_norm` and `_fused_rms_norm`: over the last dimensions.
    Last {
        /// The input.
        input: ValueId,
        /// The sizes of the dimensions that are normalised.
        shape: Vec<Int>,
        /// The factor, of that shape.
        weight: Option<ValueId>,
        /// What is added, of that shape.
        bias: Option<ValueId>,
        /// What is added to the variance; `None` is the smallest step of the dtype at 1.
        eps: Option<f64>,
        /// Whether the mean is left alone: RMS norm.
        rms: bool,
        /// Whether the statistics are results too.
        stats: bool,
    },
    /// `group_norm` and `native_group_norm`: over the channels of each group, of `[batch, channels, ...]`.
    Group {
        /// The input.
        input: ValueId,
        /// The factor of each channel.
        weight: Option<ValueId>,
        /// What is added to each channel.
        bias: Option<ValueId>,
        /// The number of groups; [`EACH_CHANNEL`] is one for each channel.
        groups: i64,
        /// What is added to the variance.
        eps: f64,
        /// Batch, channels and elements per channel, where the operator says them; the statistics are then results too.
        sizes: Option<[Int; 3]>,
    },
    /// `batch_norm` and `_native_batch_norm_legit_no_training`: each channel by statistics of its own.
    Batch {
        /// The input.
        input: ValueId,
        /// The factor of each channel.
        weight: Option<ValueId>,
        /// What is added to each channel.
        bias: Option<ValueId>,
        /// Each channel's mean.
        mean: ValueId,
        /// Each channel's variance.
        var: ValueId,
        /// What is added to the variance.
        eps: f64,
        /// Whether the statistics, which are empty, are results too.
        stats: bool,
    },
    /// `_native_batch_norm_legit.no_stats`: each channel by the statistics of the batch, which are results too. Instance norms come to
    /// this in core ATen, in one batch of all channels.
    OwnBatch {
        /// The input.
        input: ValueId,
        /// The factor of each channel.
        weight: Option<ValueId>,
        /// What is added to each channel.
        bias: Option<ValueId>,
        /// What is added to the variance.
        eps: f64,
    },
}

impl Norm {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Norm, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "layer_norm.default" => last(args, false, false),
            "native_layer_norm.default" => last(args, false, true),
            "rms_norm.default" => last(args, true, false),
            "_fused_rms_norm.default" => last(args, true, true),
            "group_norm.default" => group(args, false),
            "native_group_norm.default" => group(args, true),
            "instance_norm.default" => instance(args),
            "batch_norm.default" => batch(args, false),
            "_native_batch_norm_legit_no_training.default" => batch(args, true),
            "_native_batch_norm_legit.no_stats" => own_batch(args),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Norm::Last { input, shape, weight, bias, rms, stats, .. } => {
                let meta = shapes.meta(*input)?;
                need_float("a norm", meta.dtype)?;
                let normalised = shapes.ints(shape)?;
                let lead = lead_of(meta, &normalised)?;
                need_params(shapes, meta, &[*weight, *bias], &normalised)?;
                let mut outs = vec![fresh_in_format(meta.dtype, &meta.shape, *rms && is_channels_last(meta))?];
                if *stats {
                    let mut shape = meta.shape.clone();
                    shape[lead..].fill(1);
                    outs.push(fresh(meta.dtype, &shape)?);
                    if !rms {
                        outs.push(fresh(meta.dtype, &shape)?);
                    }
                }
                Ok(outs)
            }
            Norm::Group { input, weight, bias, groups, sizes, .. } => {
                let meta = shapes.meta(*input)?;
                need_float("a norm", meta.dtype)?;
                let (batch, channels) = batch_and_channels(meta)?;
                // Of volumes each channel's own norm is row-major.
                let keeps_format = (*groups != EACH_CHANNEL || meta.rank() == 4) && is_channels_last(meta);
                let groups = &groups_of(*groups, channels);
                if *groups <= 0 || channels % groups != 0 {
                    return misfit(format!("{channels} channels in {groups} groups"));
                }
                need_params(shapes, meta, &[*weight, *bias], &[channels])?;
                let mut outs = vec![fresh_in_format(meta.dtype, &meta.shape, keeps_format)?];
                if let Some(sizes) = sizes {
                    let stated = shapes.ints(sizes)?;
                    let per_channel: i64 = meta.shape[2..].iter().product();
                    if stated != [batch, channels, per_channel] {
                        return misfit(format!("a tensor of shape {:?}, and N, C, HxW are {stated:?}", meta.shape));
                    }
                    outs.push(fresh(meta.dtype, &[batch, *groups])?);
                    outs.push(fresh(meta.dtype, &[batch, *groups])?);
                }
                Ok(outs)
            }
            Norm::OwnBatch { input, weight, bias, .. } => {
                let meta = shapes.meta(*input)?;
                need_float("a norm", meta.dtype)?;
                let (_, channels) = batch_and_channels(meta)?;
                need_params(shapes, meta, &[*weight, *bias], &[channels])?;
                let of_stats = weight.map(|id| shapes.meta(id)).transpose()?.map_or(meta.dtype, |weight| weight.dtype);
                let out = fresh_in_format(meta.dtype, &meta.shape, is_channels_last(meta))?;
                Ok(vec![out, fresh(of_stats, &[channels])?, fresh(of_stats, &[channels])?])
            }
            Norm::Batch { input, weight, bias, mean, var, stats, .. } => {
                let meta = shapes.meta(*input)?;
                need_float("a norm", meta.dtype)?;
                let (_, channels) = batch_and_channels(meta)?;
                need_params(shapes, meta, &[*weight, *bias, Some(*mean), Some(*var)], &[channels])?;
                bounded(&meta.shape)?;
                // The statistics take part in the layout as tensors of one channel's stride.
                let mut shape = vec![1; meta.rank()];
                shape[1] = channels;
                let per_channel = Meta::contiguous(meta.dtype, &shape);
                let strides = strides::of_pointwise(&meta.shape, &[meta, &per_channel]);
                let mut outs = vec![Out::Fresh(Meta { strides, offset: 0, ..meta.clone() })];
                if *stats {
                    outs.push(fresh(meta.dtype, &[0])?);
                    outs.push(fresh(meta.dtype, &[0])?);
                }
                Ok(outs)
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        match self {
            Norm::Last { input, shape, weight, bias, eps, rms, .. } => {
                let input = eval.tensor(*input)?;
                let row = eval.ints(shape)?.iter().map(|&n| count(n)).product::<usize>();
                let eps = eps.unwrap_or_else(|| epsilon(input.meta.dtype));
                let (weight, bias) = (opt_floats_of(eval, *weight)?, opt_floats_of(eval, *bias)?);
                let mut x = input.floats();
                let stats: Vec<Stats> = rows_of(&mut x, row).map(|row| normalise(row, eps, *rms)).collect();
                for (i, x) in x.iter_mut().enumerate() {
                    *x = affine(*x, &weight, &bias, i % row);
                }
                outs[0].write_floats(eval.precision(), x);
                write_stats(eval, &outs[1..], &stats, *rms);
            }
            Norm::Group { input, weight, bias, groups, eps, .. } => {
                let input = eval.tensor(*input)?;
                let (batch, channels) = batch_and_channels(&input.meta)?;
                let groups = groups_of(*groups, channels);
                let plane = input.meta.shape[2..].iter().map(|&n| count(n)).product::<usize>();
                let row = count(channels / groups) * plane;
                let (weight, bias) = (opt_floats_of(eval, *weight)?, opt_floats_of(eval, *bias)?);
                let mut x = input.floats();
                let mut stats: Vec<Stats> = rows_of(&mut x, row).map(|row| normalise(row, *eps, false)).collect();
                stats.resize(count(batch * groups), Stats { mean: 0.0, rstd: f64::NAN });
                for (i, x) in x.iter_mut().enumerate() {
                    *x = affine(*x, &weight, &bias, i / plane % count(channels));
                }
                outs[0].write_floats(eval.precision(), x);
                write_stats(eval, &outs[1..], &stats, false);
            }
            Norm::OwnBatch { input, weight, bias, eps } => {
                let input = eval.tensor(*input)?;
                let channels = count(batch_and_channels(&input.meta)?.1);
                let plane = input.meta.shape[2..].iter().map(|&n| count(n)).product::<usize>();
                let (weight, bias) = (opt_floats_of(eval, *weight)?, opt_floats_of(eval, *bias)?);
                let mut x = input.floats();
                let mut stats = Vec::with_capacity(channels);
                for c in 0..channels {
                    let own: Vec<usize> = (0..x.len()).filter(|i| i / plane.max(1) % channels == c).collect();
                    let mut row: Vec<f64> = own.iter().map(|&i| x[i]).collect();
                    stats.push(normalise(&mut row, *eps, false));
                    own.into_iter().zip(row).for_each(|(i, y)| x[i] = affine(y, &weight, &bias, c));
                }
                outs[0].write_floats(eval.precision(), x);
                write_stats(eval, &outs[1..], &stats, false);
            }
            Norm::Batch { input, weight, bias, mean, var, eps, .. } => {
                let input = eval.tensor(*input)?;
                let (_, channels) = batch_and_channels(&input.meta)?;
                let plane = input.meta.shape[2..].iter().map(|&n| count(n)).product::<usize>();
                let (weight, bias) = (opt_floats_of(eval, *weight)?, opt_floats_of(eval, *bias)?);
                let (mean, var) = (eval.tensor(*mean)?.floats(), eval.tensor(*var)?.floats());
                let one = |(i, x): (usize, f64)| {
                    let c = i / plane % count(channels);
                    affine((x - mean[c]) / (var[c] + eps).sqrt(), &weight, &bias, c)
                };
                outs[0].write_floats(eval.precision(), input.floats().into_iter().enumerate().map(one));
            }
        }
        Ok(())
    }
}

/// How many groups there are.
#[must_use]
pub fn groups_of(groups: i64, channels: i64) -> i64 {
    if groups == EACH_CHANNEL { channels } else { groups }
}

#[derive(Clone, Copy)]
struct Stats {
    mean: f64,
    rstd: f64,
}

/// The rows of equal length; of length 0 there are none.
fn rows_of(x: &mut [f64], row: usize) -> impl Iterator<Item = &mut [f64]> {
    x.chunks_mut(row.max(1))
}

fn normalise(row: &mut [f64], eps: f64, rms: bool) -> Stats {
    let n = row.len() as f64;
    let mean = if rms { 0.0 } else { row.iter().sum::<f64>() / n };
    let var = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    let rstd = 1.0 / (var + eps).sqrt();
    for x in row {
        *x = (*x - mean) * rstd;
    }
    // PyTorch moves the mean by distances from it, of which one from an infinite number is NaN.
    Stats { mean: if mean.is_finite() { mean } else { f64::NAN }, rstd }
}

fn affine(x: f64, weight: &Option<Vec<f64>>, bias: &Option<Vec<f64>>, at: usize) -> f64 {
    x * weight.as_ref().map_or(1.0, |w| w[at]) + bias.as_ref().map_or(0.0, |b| b[at])
}

fn write_stats(eval: &dyn Eval, outs: &[Tensor], stats: &[Stats], rms: bool) {
    if let ([mean, .., rstd], false) = (outs, rms) {
        mean.write_floats(eval.precision(), stats.iter().map(|s| s.mean));
        rstd.write_floats(eval.precision(), stats.iter().map(|s| s.rstd));
    } else if let [rstd] = outs {
        rstd.write_floats(eval.precision(), stats.iter().map(|s| s.rstd));
    }
}

/// The step from 1 to the next number.
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        // PyTorch computes halves in f32, and takes its step.
        _ => f64::from(f32::EPSILON),
    }
}

/// How many dimensions stand before the normalised ones.
fn lead_of(meta: &Meta, normalised: &[i64]) -> Result<usize, OpError> {
    if normalised.is_empty() || !meta.shape.ends_with(normalised) {
        return misfit(format!("a tensor of shape {:?} is normalised over {normalised:?}", meta.shape));
    }
    Ok(meta.rank() - normalised.len())
}

fn batch_and_channels(meta: &Meta) -> Result<(i64, i64), OpError> {
    match meta.shape[..] {
        [batch, channels, ..] => Ok((batch, channels)),
        _ => misfit(format!("a tensor of shape {:?} has no channels", meta.shape)),
    }
}

fn need_params(shapes: &dyn Shapes, input: &Meta, params: &[Option<ValueId>], shape: &[i64]) -> Result<(), OpError> {
    for param in params.iter().flatten() {
        let param = shapes.meta(*param)?;
        if param.shape != shape {
            return misfit(format!("a parameter of shape {:?}, expected {shape:?}", param.shape));
        }
        let half = matches!(input.dtype, DType::F16 | DType::BF16);
        if param.dtype != input.dtype && !(half && param.dtype == DType::F32) {
            return Err(OpError::DtypesDiffer(input.dtype, param.dtype));
        }
    }
    Ok(())
}

fn last(args: &Args<'_>, rms: bool, stats: bool) -> Result<Norm, OpError> {
    ignore(args, &["cudnn_enable"]);
    let eps = args.opt_float("eps")?;
    Ok(Norm::Last {
        input: args.tensor("input")?,
        shape: args.ints("normalized_shape")?,
        weight: args.opt_tensor("weight")?,
        bias: if rms { None } else { args.opt_tensor("bias")? },
        eps: if rms { eps } else { Some(eps.unwrap_or(1e-5)) },
        rms,
        stats,
    })
}

fn group(args: &Args<'_>, native: bool) -> Result<Norm, OpError> {
    ignore(args, &["cudnn_enabled"]);
    Ok(Norm::Group {
        input: args.tensor("input")?,
        weight: args.opt_tensor("weight")?,
        bias: args.opt_tensor("bias")?,
        groups: args.known_int(if native { "group" } else { "num_groups" })?,
        eps: args.opt_float("eps")?.unwrap_or(1e-5),
        sizes: if native { Some([args.int("N")?, args.int("C")?, args.int("HxW")?]) } else { None },
    })
}

/// A group for each channel, or each channel by given statistics.
fn instance(args: &Args<'_>) -> Result<Norm, OpError> {
    ignore(args, &["momentum", "cudnn_enabled"]);
    let stats = [args.opt_tensor("running_mean")?, args.opt_tensor("running_var")?];
    let (input, weight, bias) = (args.tensor("input")?, args.opt_tensor("weight")?, args.opt_tensor("bias")?);
    let eps = args.opt_float("eps")?.unwrap_or(1e-5);
    match (args.bool_or("use_input_stats", true)?, stats) {
        (true, [None, None]) => Ok(Norm::Group { input, weight, bias, groups: EACH_CHANNEL, eps, sizes: None }),
        (false, [Some(mean), Some(var)]) => Ok(Norm::Batch { input, weight, bias, mean, var, eps, stats: false }),
        _ => refuse("use_input_stats", "true", "running statistics would change: export the model after model.eval()"),
    }
}

fn own_batch(args: &Args<'_>) -> Result<Norm, OpError> {
    ignore(args, &["momentum"]);
    if !args.bool_or("training", true)? {
        return refuse("training", "false", "there are no statistics but the batch's own");
    }
    let (weight, bias) = (args.opt_tensor("weight")?, args.opt_tensor("bias")?);
    Ok(Norm::OwnBatch { input: args.tensor("input")?, weight, bias, eps: args.opt_float("eps")?.unwrap_or(1e-5) })
}

fn batch(args: &Args<'_>, stats: bool) -> Result<Norm, OpError> {
    ignore(args, &["momentum", "cudnn_enabled"]);
    if args.bool_or("training", false)? {
        return refuse("training", "true", "export the model after model.eval()");
    }
    Ok(Norm::Batch {
        input: args.tensor("input")?,
        weight: args.opt_tensor("weight")?,
        bias: args.opt_tensor("bias")?,
        mean: args.tensor("running_mean")?,
        var: args.tensor("running_var")?,
        eps: args.opt_float("eps")?.unwrap_or(1e-5),
        stats,
    })
}
