//! Norms and softmax of tensors that do not lie in rows, and norms of channels.
//!
//! ```text
//! group norm   rows of groups: (x − mean) / √(var + eps), then a chain:   · weight[channel] + bias[channel]
//! batch norm   once for each channel:  scale = weight / √(var + eps),  shift = bias − mean · scale;   a chain:  x · scale + shift
//! ```

use rapt_core::DType;
use rapt_cpu::pointwise::Register;
use rapt_cpu::rows::{RowFunction, RowKernel};
use rapt_graph::ops::{Binary, EACH_CHANNEL, Emitter, Norm, Op, Scan, Unary, groups_of};
use rapt_graph::{Node, OpError, ValueId};

use super::super::ModelError;
use super::build::Builder;
use super::group::{Group, Writer};
use super::place::Place;
use super::strided::{is_float, permuted, wide};
use super::{Kernel, Step};

impl Builder<'_> {
    /// Norms and softmax of any tensor: copied to rows where it does not lie so.
    pub(super) fn norms(&mut self, n: usize, node: &Node) -> Result<bool, ModelError> {
        match &node.op {
            Op::Norm(Norm::Last { input, shape, weight, bias, eps, rms, .. }) if !self.wants_more(node) => {
                let x = self.place(*input)?;
                let least = if x.meta.dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
                let eps = eps.unwrap_or(least);
                let function = if *rms { RowFunction::RmsNorm { eps } } else { RowFunction::LayerNorm { eps } };
                let Some(lead) = x.meta.rank().checked_sub(shape.len()) else { return Ok(false) };
                let order: Vec<usize> = (0..x.meta.rank()).collect();
                self.rows_of_copies(n, node, (function, x), (lead, &order), [*weight, *bias])
            }
            Op::Norm(Norm::Group { .. } | Norm::OwnBatch { .. }) if !self.wants_more(node) => self.group_norm(n, node),
            Op::Norm(Norm::Batch { .. }) if !self.wants_more(node) => self.batch_norm(n, node),
            Op::Scan(Scan::Softmax { input, dim, log, .. }) => {
                let x = self.place(*input)?;
                let rank = x.meta.rank();
                let Ok(dim) = x.meta.dim(*dim) else { return Ok(false) };
                let mut order: Vec<usize> = (0..rank).filter(|&d| d != dim).collect();
                order.extend((dim < rank).then_some(dim));
                let function = if *log { RowFunction::LogSoftmax } else { RowFunction::Softmax };
                self.rows_of_copies(n, node, (function, x), (rank.saturating_sub(1), &order), [None, None])
            }
            _ => Ok(false),
        }
    }

    /// Whether somebody reads another result than the first: the statistics of a norm.
    fn wants_more(&self, node: &Node) -> bool {
        node.outputs.iter().skip(1).flatten().any(|id| self.is_wanted_value(*id))
    }

    /// A function of rows: those dimensions from `lead` on, in an order of dimensions.
    fn rows_of_copies(
        &mut self,
        n: usize,
        node: &Node,
        (function, x): (RowFunction, Place),
        (lead, order): (usize, &[usize]),
        params: [Option<ValueId>; 2],
    ) -> Result<bool, ModelError> {
        let Some(out) = self.output(n, node, 0) else { return Ok(false) };
        let dtype = out.meta.dtype;
        let (x, out) = (permuted(&x, order), permuted(&out, order));
        let rows: i64 = x.meta.shape[..lead].iter().product();
        let columns: i64 = x.meta.shape[lead..].iter().product();
        if !is_float(dtype) {
            return Ok(false);
        }
        self.close_for(&node.inputs)?;
        let mut dtypes = [None; 2];
        let mut places = [None, None, None, None];
        for (slot, id) in params.into_iter().enumerate() {
            let Some(id) = id else { continue };
            let param = self.place(id)?;
            let lies = param.reshaped(&[columns]).filter(|param| columns <= 1 || param.meta.strides[0] == 1);
            let param = match lies {
                Some(param) => param,
                None => self.copied(n, &param, param.meta.dtype)?,
            };
            dtypes[slot] = Some(param.meta.dtype);
            places[slot + 1] = param.reshaped(&[columns]);
        }
        let columns_of = usize::try_from(columns).unwrap_or(0);
        let Ok(kernel) = RowKernel::new(self.arch, function, dtype, columns_of, dtypes) else { return Ok(false) };
        let in_rows =
            |place: &Place| place.reshaped(&[rows, columns]).filter(|place| columns <= 1 || place.meta.strides[1] == 1);
        let own = in_rows(&x).filter(|x| x.meta.dtype == dtype);
        let from = match own {
            Some(x) => x,
            None => in_rows(&self.copied(n, &x, dtype)?).ok_or_else(|| lost("rows"))?,
        };
        let direct = in_rows(&out);
        let to = match &direct {
            Some(to) => to.clone(),
            None => in_rows(&self.temporary(dtype, &out.meta.shape)).ok_or_else(|| lost("rows"))?,
        };
        (places[0], places[3]) = (Some(from), Some(to.clone()));
        let uses = places.iter().flatten().map(|place| place.buffer).collect();
        let kernel = Kernel::Rows { rows: kernel, places: Box::new(places) };
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
        if direct.is_none() {
            let whole = to.reshaped(&out.meta.shape).ok_or_else(|| lost("rows"))?;
            self.copy_to(n, &whole, &out)?;
        }
        Ok(true)
    }

    fn group_norm(&mut self, n: usize, node: &Node) -> Result<bool, ModelError> {
        let (input, weight, bias, groups, eps) = match &node.op {
            Op::Norm(Norm::Group { input, weight, bias, groups, eps, .. }) => (input, weight, bias, *groups, eps),
            Op::Norm(Norm::OwnBatch { input, weight, bias, eps }) => (input, weight, bias, EACH_CHANNEL, eps),
            _ => return Ok(false),
        };
        let Some(out) = self.output(n, node, 0) else { return Ok(false) };
        let (Some(Some(id)), x) = (node.outputs.first(), self.place(*input)?) else { return Ok(false) };
        // The channel of a batch of several is no row.
        if matches!(node.op, Op::Norm(Norm::OwnBatch { .. })) && x.meta.shape[0] != 1 {
            return Ok(false);
        }
        let Some(root) = self.root(*id) else { return Ok(false) };
        let dtype = wide(x.meta.dtype);
        let rows = x.meta.shape[0] * groups_of(groups, x.meta.shape[1]);
        if rows == 0 || x.meta.numel() == 0 {
            return Ok(false);
        }
        let shape = [rows, x.meta.numel() / rows];
        let columns = usize::try_from(shape[1]).unwrap_or(0);
        let function = RowFunction::LayerNorm { eps: *eps };
        let Ok(kernel) = RowKernel::new(self.arch, function, dtype, columns, [None, None]) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        let own = x.reshaped(&shape).filter(|x| x.meta.dtype == dtype && (columns == 1 || x.meta.strides[1] == 1));
        let from = match own {
            Some(from) => from,
            None => self.copied(n, &x, dtype)?.reshaped(&shape).ok_or_else(|| lost("groups"))?,
        };
        let normal = self.temporary(dtype, &x.meta.shape);
        let to = normal.reshaped(&shape).ok_or_else(|| lost("groups"))?;
        let uses = vec![from.buffer, to.buffer];
        let kernel = Kernel::Rows { rows: kernel, places: Box::new([Some(from), None, None, Some(to)]) };
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
        let weight = weight.map(|id| self.of_channels(id, x.meta.rank())).transpose()?;
        let bias = bias.map(|id| self.of_channels(id, x.meta.rank())).transpose()?;
        let result = out.meta.dtype;
        let emit = |writer: &mut Writer<'_>| {
            let mut y = writer.place(&normal);
            if let Some(weight) = &weight {
                let w = in_dtype(writer, weight, dtype);
                y = match &bias {
                    Some(bias) => {
                        let b = in_dtype(writer, bias, dtype);
                        writer.mul_add([y, w, b], dtype)
                    }
                    None => writer.binary(Binary::Mul, [y, w], (dtype, dtype)),
                };
            } else if let Some(bias) = &bias {
                let b = in_dtype(writer, bias, dtype);
                y = writer.binary(Binary::Add, [y, b], (dtype, dtype));
            }
            Ok(if dtype == result { y } else { writer.convert(y, dtype, result) })
        };
        self.grouped(n, node, (root, &out), &out.meta.shape.clone(), emit)
    }

    /// A parameter of channels, which are dimension 1 of a tensor of this rank.
    fn of_channels(&self, id: ValueId, rank: usize) -> Result<Place, ModelError> {
        Ok(along_channels(&self.place(id)?, rank))
    }

    fn batch_norm(&mut self, n: usize, node: &Node) -> Result<bool, ModelError> {
        let Op::Norm(Norm::Batch { input, weight, bias, mean, var, eps, .. }) = &node.op else { return Ok(false) };
        let Some(out) = self.output(n, node, 0) else { return Ok(false) };
        let (Some(Some(id)), x) = (node.outputs.first(), self.place(*input)?) else { return Ok(false) };
        let Some(root) = self.root(*id) else { return Ok(false) };
        let (dtype, result) = (wide(x.meta.dtype), out.meta.dtype);
        let [mean, var] = [self.place(*mean)?, self.place(*var)?];
        let weight = weight.map(|id| self.place(id)).transpose()?;
        let bias = bias.map(|id| self.place(id)).transpose()?;
        self.close_for(&node.inputs)?;
        // In float64, rounded once: both are as good as numbers of the dtype can be.
        let shape = mean.meta.shape.clone();
        let [scale, shift] = [0, 1].map(|_| self.temporary(dtype, &shape));
        let mut group = Group::new(shape.clone());
        let float = DType::F64;
        let scaled = |writer: &mut Writer<'_>| -> Result<Register, OpError> {
            let (var, eps) = (in_dtype(writer, &var, float), writer.float(float, *eps));
            let var = writer.binary(Binary::Add, [var, eps], (float, float));
            let root = writer.unary(Unary::Sqrt, var, (float, float));
            let one = match &weight {
                Some(weight) => in_dtype(writer, weight, float),
                None => writer.float(float, 1.0),
            };
            Ok(writer.binary(Binary::Div, [one, root], (float, float)))
        };
        let mut of_scale = None;
        let of_shift = group.extend(&self.places, &shape, |writer| {
            let scale = scaled(writer)?;
            of_scale = Some(scale);
            let mean = in_dtype(writer, &mean, float);
            let down = writer.binary(Binary::Mul, [mean, scale], (float, float));
            let from = match &bias {
                Some(bias) => in_dtype(writer, bias, float),
                None => writer.float(float, 0.0),
            };
            Ok(writer.binary(Binary::Sub, [from, down], (float, float)))
        });
        let (Some(of_scale), Some(of_shift)) = (of_scale, of_shift) else { return Ok(false) };
        self.store(n, &group, of_scale, &scale)?;
        self.store(n, &group, of_shift, &shift)?;
        let rank = x.meta.rank();
        let (scale, shift) = (along_channels(&scale, rank), along_channels(&shift, rank));
        let emit = |writer: &mut Writer<'_>| {
            let x = in_dtype(writer, &x, dtype);
            let [scale, shift] = [&scale, &shift].map(|place| writer.place(place));
            let y = writer.mul_add([x, scale, shift], dtype);
            Ok(if dtype == result { y } else { writer.convert(y, dtype, result) })
        };
        self.grouped(n, node, (root, &out), &out.meta.shape.clone(), emit)
    }
}

/// The element at a place, in another dtype.
fn in_dtype(writer: &mut Writer<'_>, place: &Place, dtype: DType) -> Register {
    let x = writer.place(place);
    if place.meta.dtype == dtype { x } else { writer.convert(x, place.meta.dtype, dtype) }
}

/// A vector of channels as a tensor whose dimension 1 they are; the others have size 1.
fn along_channels(place: &Place, rank: usize) -> Place {
    let mut place = place.clone();
    place.meta.shape.resize(rank.saturating_sub(1).max(1), 1);
    place.meta.strides.resize(rank.saturating_sub(1).max(1), 0);
    place
}

fn lost(what: &str) -> ModelError {
    ModelError::Plan { why: format!("{what} of a copy that is no copy") }
}
