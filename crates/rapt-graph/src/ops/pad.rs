//! Elements around a tensor: `pad`, `constant_pad_nd`, `reflection_pad1d`, `replication_pad1d` and the like.
//!
//! Each padded dimension is at most three runs of the input's elements: those before it, its own, those after it. The runs
//! of a reflection go backwards, those of a replication stay in place. A constant has no runs but the input's own.

use super::fill;
use super::shape::{bounded, cells, count, fresh_in_format, is_channels_last, misfit, need_plain, refuse, row_major};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Scalar, Shapes, Tensor, ValueId, strides};

/// A padding.
#[derive(Clone, Debug, PartialEq)]
pub struct Pad {
    /// The tensor.
    pub input: ValueId,
    /// How much before and after each dimension, the last dimension first; negative numbers cut.
    pub padding: Vec<Int>,
    /// What stands there.
    pub mode: PadMode,
}

/// What stands around a padded tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PadMode {
    /// A number.
    Constant(Scalar),
    /// The elements beside the edge, backwards, without the edge itself.
    Reflect,
    /// The edge.
    Replicate,
    /// The elements of the other side.
    Circular,
}

/// Elements of a dimension of the input, and where they go in the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first element in the input.
    pub from: i64,
    /// From one element to the next: 1, −1 or 0.
    pub step: i64,
    /// The first element in the result.
    pub to: i64,
    /// How many.
    pub len: i64,
}

impl Pad {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Pad, OpError>> {
        let mode = match target.strip_prefix("torch.ops.aten.")? {
            "pad.default" => mode(args),
            "constant_pad_nd.default" => {
                args.opt_scalar("value").map(|value| PadMode::Constant(value.unwrap_or(Scalar::Int(Int::Known(0)))))
            }
            "reflection_pad1d.default" | "reflection_pad2d.default" | "reflection_pad3d.default" => {
                Ok(PadMode::Reflect)
            }
            "replication_pad1d.default" | "replication_pad2d.default" | "replication_pad3d.default" => {
                Ok(PadMode::Replicate)
            }
            "_pad_circular.default" => Ok(PadMode::Circular),
            _ => return None,
        };
        let name = if args.raw("padding").is_some() { "padding" } else { "pad" };
        Some(mode.and_then(|mode| Ok(Pad { input: args.tensor("self")?, padding: args.ints(name)?, mode })))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        need_plain("padding", meta.dtype)?;
        let (shape, runs) = self.runs(shapes, meta)?;
        bounded(&shape)?;
        if let PadMode::Constant(value) = self.mode {
            fill::element(meta.dtype, shapes.number(value)?)?;
            if shapes.ints(&self.padding)?.iter().all(|&n| n <= 0) {
                // Nothing is filled: PyTorch clones what is left.
                let strides = runs.iter().zip(&meta.strides).map(|(_, &stride)| stride).collect();
                let left = Meta { shape, strides, ..meta.clone() };
                return Ok(vec![Out::Fresh(Meta { strides: strides::preserved(&left), offset: 0, ..left })]);
            }
        }
        // PyTorch makes a circular one of slices that are copied to a row-major tensor.
        // Of volumes its constant padding alone keeps the format.
        let may_keep = match self.mode {
            PadMode::Constant(_) => true,
            PadMode::Reflect | PadMode::Replicate => meta.rank() == 4,
            PadMode::Circular => false,
        };
        let keeps_format = may_keep && is_channels_last(meta);
        Ok(vec![fresh_in_format(meta.dtype, &shape, keeps_format)?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let (shape, runs) = self.runs(eval, &input.meta)?;
        let mut places: Vec<Option<usize>> = vec![Some(0)];
        for ((&size, runs), stride) in shape.iter().zip(&runs).zip(row_major(&input.meta.shape)) {
            let mut sources = vec![None; count(size)];
            for run in runs {
                for i in 0..run.len {
                    sources[count(run.to + i)] = Some(count((run.from + i * run.step) * stride));
                }
            }
            let next = |place: &Option<usize>| {
                let place = *place;
                sources.iter().map(move |source| Some(place? + (*source)?)).collect::<Vec<_>>()
            };
            places = places.iter().flat_map(next).collect();
        }
        let around = self.element(eval, input.meta.dtype)?;
        let result = match (cells(input), around) {
            (Cells::Float(x), around) => {
                let edge = if let Some(Cells::Float(edge)) = around { edge[0] } else { 0.0 };
                Cells::Float(places.into_iter().map(|place| place.map_or(edge, |place| x[place])).collect())
            }
            (Cells::Int(x), around) => {
                let edge = if let Some(Cells::Int(edge)) = around { edge[0] } else { 0 };
                Cells::Int(places.into_iter().map(|place| place.map_or(edge, |place| x[place])).collect())
            }
        };
        outs[0].write(eval.precision(), result);
        Ok(())
    }

    /// The number that stands around, as an element of this dtype; `None` where it is the tensor's own elements.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn element(&self, shapes: &dyn Shapes, dtype: rapt_core::DType) -> Result<Option<Cells>, OpError> {
        match self.mode {
            PadMode::Constant(value) => fill::rounded(dtype, shapes.number(value)?).map(Some),
            _ => Ok(None),
        }
    }

    /// The result's shape, and for each dimension the runs of the input's elements in it.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn runs(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<(Vec<i64>, Vec<Vec<Run>>), OpError> {
        let padding = shapes.ints(&self.padding)?;
        let padded = padding.len() / 2;
        if padding.len() % 2 != 0 || padded > meta.rank() {
            return misfit(format!("padding {padding:?} of a tensor of shape {:?}", meta.shape));
        }
        let is_constant = matches!(self.mode, PadMode::Constant(_));
        // The others take a tensor of channels, with a batch or without.
        let rank_fits = is_constant || ((1..=3).contains(&padded) && matches!(meta.rank() - padded, 1 | 2));
        if !rank_fits {
            return misfit(format!("padding {padding:?} of a tensor of shape {:?}", meta.shape));
        }
        let mut shape = meta.shape.clone();
        let mut all = Vec::with_capacity(meta.rank());
        for (d, size) in shape.iter_mut().enumerate() {
            let own = *size;
            let at = meta.rank() - 1 - d;
            let (before, after) = if at < padded { (padding[2 * at], padding[2 * at + 1]) } else { (0, 0) };
            let Some(padded) = own.checked_add(before).and_then(|n| n.checked_add(after)).filter(|&n| n >= 0) else {
                return misfit(format!("padding {before} and {after} of {own} elements"));
            };
            let most = match self.mode {
                PadMode::Constant(_) => i64::MAX,
                PadMode::Reflect => own - 1,
                PadMode::Replicate => {
                    if own > 0 {
                        i64::MAX
                    } else {
                        0
                    }
                }
                PadMode::Circular => own,
            };
            let is_too_much = at < padding.len() / 2 && (before > most.max(0) || after > most.max(0));
            if is_too_much || (!is_constant && padded == 0 && own > 0) {
                return refuse("padding", format!("{before} and {after}"), "it is more than the dimension has");
            }
            all.push(self.mode.runs(own, before, after));
            *size = padded;
        }
        Ok((shape, all))
    }
}

impl PadMode {
    fn runs(self, size: i64, before: i64, after: i64) -> Vec<Run> {
        let first = (-before).max(0);
        let own = Run { from: first, step: 1, to: before.max(0), len: size - first - (-after).max(0) };
        let mut runs = vec![own];
        let ends = match self {
            PadMode::Constant(_) => None,
            PadMode::Reflect => Some(((before, -1), (size - 2, -1))),
            PadMode::Replicate => Some(((0, 0), (size - 1, 0))),
            PadMode::Circular => Some(((size - before, 1), (0, 1))),
        };
        if let Some(((from, step), (from_end, step_end))) = ends {
            runs.push(Run { from, step, to: 0, len: before });
            runs.push(Run { from: from_end, step: step_end, to: before + size, len: after });
        }
        runs.retain(|run| run.len > 0);
        runs
    }
}

fn mode(args: &Args<'_>) -> Result<PadMode, OpError> {
    let value = args.opt_scalar("value")?;
    let mode = match args.opt_str("mode")?.unwrap_or("constant") {
        "constant" => return Ok(PadMode::Constant(value.unwrap_or(Scalar::Int(Int::Known(0))))),
        "reflect" => PadMode::Reflect,
        "replicate" => PadMode::Replicate,
        "circular" => PadMode::Circular,
        other => return refuse("mode", other, "the modes are constant, reflect, replicate and circular"),
    };
    match value {
        None => Ok(mode),
        Some(_) => refuse("value", "a number", "only the mode constant takes one"),
    }
}
