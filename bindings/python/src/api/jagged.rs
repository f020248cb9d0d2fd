//! Attention of nested tensors of layout `torch.jagged`: many sequences in one tensor, each between two offsets or, with
//! lengths, from an offset on.
//!
//! ```text
//! values [rows, heads, head_dim]   row r of sequence i lies in offsets[i] .. offsets[i + 1], or offsets[i] .. + lengths[i]
//! ```
//! They are [`Engine::packed_attention`](rapt::Engine::packed_attention)'s, and [`packed_backward`](rapt::Engine::packed_backward)'s: rows of no sequence
//! are zeros in what either writes.

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rapt::{
    BackwardTensors, DType, Device, DropoutSeed, ErrorKind, Options, PackedTensors, SequenceRows,
    VarlenBackwardTensors, VarlenTensors,
};

use crate::api::backward::{self, Arriving, written};
use crate::api::ragged::{enqueue, on_threads, size};
use crate::api::varlen::VarlenOnDevice;
use crate::api::varlen_backward::BackwardOnDevice;
use crate::engine::Home;
use crate::errors::Failure;
use crate::kind::Kind;
use crate::tensors::{self, Operand, Product, StreamContext};
use crate::torch::stats;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// Offsets `[batch + 1]`, and lengths `[batch]` of sequences that end before the next begins.
pub(crate) type Sequences<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// A call, as it was given: q, k and v.
pub(crate) struct Jagged<'a, 'py> {
    pub(crate) values: [Object<'a, 'py>; 3],
    pub(crate) sequences: [Sequences<'py>; 3],
    pub(crate) enable_gqa: bool,
    pub(crate) dropout: Option<DropoutSeed>,
}

/// What each tensor and its parts are called.
const NAMES: [[&str; 3]; 3] = [
    ["q", "offsets of q", "lengths of q"],
    ["k", "offsets of k", "lengths of k"],
    ["v", "offsets of v", "lengths of v"],
];

/// One of q, k and v: its values and the rows of each sequence.
struct Part {
    values: Operand,
    rows: Vec<Range<usize>>,
}

impl Jagged<'_, '_> {
    /// q, k and v, of which the rows fit one another.
    fn read(&self) -> Result<([Operand; 3], SequenceRows), Failure> {
        let part = |at: usize| Part::read(self.values[at], &self.sequences[at], &NAMES[at]);
        let [q, k, v] = [part(0)?, part(1)?, part(2)?];
        check(&q, &k, &v)?;
        let mut values = [q.values, k.values, v.values];
        if !self.enable_gqa {
            broadcast_heads(values.each_mut())?;
        }
        Ok((values, SequenceRows { q: q.rows, k: k.rows, v: v.rows }))
    }
}

/// Computes it into new values, `[rows of q, heads, head_dim of v]`; with `return_lse` beside its lse, `[heads, rows of q]`.
pub(crate) fn run<'py>(
    py: Python<'py>,
    request: &Jagged<'_, 'py>,
    options: &Options,
    return_lse: bool,
) -> Result<Bound<'py, PyAny>, Failure> {
    let like = request.values[0];
    let first = tensors::read("q", like, Kind::Torch, like)?;
    if let Device::Cuda(device) = first.device {
        return on_device(py, request, options, return_lse, device);
    }
    let ([q, k, v], rows) = request.read()?;
    let (count, heads) = (size(&q, 0), size(&q, 1));
    let allocate = |name, dtype, shape| tensors::allocate(name, Kind::Torch, like, Device::Cpu, dtype, shape);
    let (product, mut out) = allocate("out", q.dtype, [count, heads, size(&v, 2)].into())?;
    let mut lse = return_lse.then(|| allocate("lse", q.dtype.accumulation(), [heads, count].into())).transpose()?;
    let tensors = PackedTensors {
        q: q.view()?,
        k: k.view()?,
        v: v.view()?,
        codes: rapt::Qkv::default(),
        sinks: None,
        alibi_slopes: None,
        dropout: request.dropout,
        out: out.view_mut()?,
        lse: lse.as_mut().map(|(_, lse)| lse.view_mut()).transpose()?,
    };
    on_threads(py, &Home::Default, Kind::Torch, |engine, queue| {
        engine.packed_attention(tensors, &rows, options, queue)
    })??;
    drop(out);
    with_lse(py, product, lse)
}

/// Fills those of `gradients` that are given, by the values of q, k and v.
pub(crate) fn backward<'py>(
    py: Python<'py>,
    request: &Jagged<'_, 'py>,
    arriving: Arriving<'_, 'py>,
    gradients: [Option<Object<'_, 'py>>; 3],
    options: &Options,
) -> Result<(), Failure> {
    let arrived = arriving.read(Kind::Torch, request.values[0])?;
    let mut made = [const { None }; 3];
    for ((made, name), given) in made.iter_mut().zip(["dq", "dk", "dv"]).zip(gradients) {
        *made = given.map(|given| tensors::read(name, given, Kind::Torch, request.values[0])).transpose()?;
    }
    if let Device::Cuda(device) = arrived.out.device {
        let (inputs, offsets) = request.on_device()?;
        let [cu_seqlens_q, cu_seqlens_kv] = &offsets;
        let (cu_seqlens_q, cu_seqlens_kv) = (cu_seqlens_q.view()?, cu_seqlens_kv.view()?);
        let tensors = VarlenBackwardTensors {
            cu_seqlens_q,
            cu_seqlens_kv,
            tensors: request.backward(&inputs, &arrived, &mut made)?,
        };
        let context = StreamContext::of(Kind::Torch, request.values[0])?;
        let enqueued = enqueue(py, &Home::Default, device, &context, BackwardOnDevice { tensors, options })?;
        let used = request.tensors().chain(arriving.named().map(|(_, tensor)| tensor));
        return context.hold(py, Some(enqueued), used.chain(gradients.into_iter().flatten()), std::iter::empty());
    }
    let (inputs, rows) = request.read()?;
    let tensors = request.backward(&inputs, &arrived, &mut made)?;
    Ok(on_threads(py, &Home::Default, Kind::Torch, |engine, queue| {
        engine.packed_backward(tensors, &rows, options, queue)
    })??)
}

impl<'py> Jagged<'_, 'py> {
    /// q, k and v on a GPU, which reads where sequences begin, and their offsets: one more than there are, int32, and no lengths. Those of v are
    /// those of k.
    fn on_device(&self) -> Result<([Operand; 3], [Operand; 2]), Failure> {
        let [of_q, of_k, of_v] = &self.sequences;
        if [of_q, of_k, of_v].iter().any(|of| of.1.is_some()) || !of_k.0.is(&of_v.0) {
            let message = "lengths, or keys and values with offsets of their own, on a GPU";
            return Err(Failure::binding(ErrorKind::Unsupported, message, "one tensor of offsets for k and v"));
        }
        let given = self.values;
        let read = |name, object| tensors::read(name, object, Kind::Torch, given[0]);
        let mut values = [read("q", given[0])?, read("k", given[1])?, read("v", given[2])?];
        let offsets = [read(NAMES[0][1], &of_q.0)?, read(NAMES[1][1], &of_k.0)?];
        if !self.enable_gqa && values.iter().all(|operand| operand.shape.len() == 3) {
            broadcast_heads(values.each_mut())?;
        }
        Ok((values, offsets))
    }

    /// What is asked of these values.
    fn backward<'a>(
        &self,
        [q, k, v]: &'a [Operand; 3],
        arrived: &'a backward::Read,
        [dq, dk, dv]: &'a mut [Option<Operand>; 3],
    ) -> rapt::Result<BackwardTensors<'a>> {
        let (out, lse, d_o) = (arrived.out.view()?, arrived.lse.view()?, arrived.d_o.view()?);
        Ok(BackwardTensors {
            dropout: self.dropout,
            d_lse: arrived.d_lse.as_ref().map(Operand::view).transpose()?,
            dq: written(dq)?,
            dk: written(dk)?,
            dv: written(dv)?,
            ..BackwardTensors::new([q.view()?, k.view()?, v.view()?], out, lse, d_o)
        })
    }

    /// Those tensors.
    fn tensors(&self) -> impl Iterator<Item = Object<'_, 'py>> {
        let [of_q, of_k, _] = &self.sequences;
        self.values.into_iter().chain([&of_q.0, &of_k.0])
    }
}

/// The same on a GPU.
fn on_device<'py>(
    py: Python<'py>,
    request: &Jagged<'_, 'py>,
    options: &Options,
    return_lse: bool,
    device: u32,
) -> Result<Bound<'py, PyAny>, Failure> {
    let ([q, k, v], [offsets_q, offsets_k]) = request.on_device()?;
    let given = request.values;
    let (count, heads) = (size(&q, 0), size(&q, 1));
    let allocate =
        |name, dtype, shape| tensors::allocate(name, Kind::Torch, given[0], Device::Cuda(device), dtype, shape);
    let (product, mut out) = allocate("out", q.dtype, [count, heads, size(&v, 2)].into())?;
    let mut lse = return_lse.then(|| allocate("lse", q.dtype.accumulation(), [heads, count].into())).transpose()?;
    let tensors = VarlenTensors {
        q: q.view()?,
        k: k.view()?,
        v: v.view()?,
        cu_seqlens_q: offsets_q.view()?,
        cu_seqlens_kv: offsets_k.view()?,
        codes: rapt::Qkv::default(),
        sinks: None,
        alibi_slopes: None,
        dropout: request.dropout,
        out: out.view_mut()?,
        lse: lse.as_mut().map(|(_, lse)| lse.view_mut()).transpose()?,
    };
    let context = StreamContext::of(Kind::Torch, given[0])?;
    let enqueued = enqueue(py, &Home::Default, device, &context, VarlenOnDevice { tensors, options })?;
    let exports = [q, k, v, offsets_q, offsets_k].into_iter().filter_map(|operand| operand._hold);
    context.hold(py, Some(enqueued), request.tensors(), exports)?;
    drop(out);
    with_lse(py, product, lse)
}

/// The answer of a call that ran, beside its lse if it has one. Counted as served.
fn with_lse<'py>(
    py: Python<'py>,
    product: Product<'py>,
    lse: Option<(Product<'py>, Operand)>,
) -> Result<Bound<'py, PyAny>, Failure> {
    let answer = product.finish(py)?;
    stats::count_served();
    match lse {
        Some((product, operand)) => {
            drop(operand);
            Ok(PyTuple::new(py, [answer, product.finish(py)?])?.into_any())
        }
        None => Ok(answer),
    }
}

impl Part {
    fn read(
        values: Object<'_, '_>,
        (offsets, lengths): &Sequences<'_>,
        names: &[&'static str; 3],
    ) -> Result<Self, Failure> {
        let [name, offsets_name, lengths_name] = *names;
        let read = |name, object| tensors::read(name, object, Kind::Torch, values);
        let values = tensors::read(name, values, Kind::Torch, values)?;
        if values.shape.len() != 3 {
            let message = format!("{name} has shape {}; values of sequences are [rows, heads, head_dim]", values.shape);
            return Err(Failure::binding(ErrorKind::Shape, message, ""));
        }
        let offsets = numbers(&read(offsets_name, offsets)?)?;
        let lengths = lengths.as_ref().map(|lengths| numbers(&read(lengths_name, lengths)?)).transpose()?;
        let batch = offsets.len().saturating_sub(1);
        if offsets.is_empty() || lengths.as_ref().is_some_and(|lengths| lengths.len() != batch) {
            let (offsets, lengths) = (offsets.len(), lengths.map_or(0, |lengths| lengths.len()));
            let message = format!("{name} has {offsets} offsets and {lengths} lengths");
            return Err(Failure::binding(
                ErrorKind::Shape,
                message,
                "one offset more than sequences, and a length for each",
            ));
        }
        let count = size(&values, 0);
        let row = |at: usize| {
            let begin = offsets[at];
            let end = lengths.as_ref().map_or(Some(offsets[at + 1]), |lengths| begin.checked_add(lengths[at]));
            let place = |number: i64| usize::try_from(number).ok().filter(|number| *number <= count);
            match (place(begin), end.and_then(place)) {
                (Some(begin), Some(end)) if begin <= end => Ok(begin..end),
                _ => {
                    let end = end.map_or_else(|| "an end past int64".to_owned(), |end| end.to_string());
                    let message =
                        format!("sequence {at} of {name} is rows {begin} to {end}; {name} has rows 0 to {count}");
                    Err(Failure::binding(
                        ErrorKind::Index,
                        message,
                        "offsets that do not fall, and end within the values",
                    ))
                }
            }
        };
        let rows = (0..batch).map(row).collect::<Result<_, _>>()?;
        Ok(Part { values, rows })
    }

    /// Whether no sequence begins before the one before it has ended.
    fn is_in_order(&self) -> bool {
        self.rows.windows(2).all(|pair| pair[0].end <= pair[1].start)
    }
}

/// The numbers of offsets or lengths.
fn numbers(tensor: &Operand) -> Result<Vec<i64>, Failure> {
    let view = tensor.view()?;
    if view.shape().len() != 1 {
        let message = format!("{} has shape {}; one dimension is asked", tensor.name, view.shape());
        return Err(Failure::binding(ErrorKind::Shape, message, ""));
    }
    match view.dtype() {
        DType::I32 => Ok(view.lines::<i32>(tensor.name)?.elements().map(i64::from).collect()),
        DType::I64 => Ok(view.lines::<i64>(tensor.name)?.elements().collect()),
        got => {
            let allowed = vec![DType::I64, DType::I32];
            Err(rapt::Error::UnsupportedDtype { tensor: tensor.name, got, allowed }.into())
        }
    }
}

/// What holds between the sequences of q, k and v.
fn check(q: &Part, k: &Part, v: &Part) -> Result<(), Failure> {
    let shape = |message: String| Err(Failure::binding(ErrorKind::Shape, message, ""));
    for part in [k, v] {
        if part.rows.len() != q.rows.len() {
            return shape(format!("{} has {} sequences, q has {}", part.values.name, part.rows.len(), q.rows.len()));
        }
    }
    if let Some(at) = (0..k.rows.len()).find(|&at| k.rows[at].len() != v.rows[at].len()) {
        let (of_k, of_v) = (k.rows[at].len(), v.rows[at].len());
        return shape(format!("k and v must have one kv_len, got {of_k} rows of k and {of_v} of v in sequence {at}"));
    }
    if !q.is_in_order() {
        let message = "sequences of q share rows or lie out of their order: their outputs would be one another's";
        return Err(Failure::binding(ErrorKind::Layout, message, "offsets that rise by each length at least"));
    }
    Ok(())
}

/// One head for all, by strides of 0; k and v that have one each stay so, and serve all heads of q as a group.
fn broadcast_heads([q, k, v]: [&mut Operand; 3]) -> Result<(), Failure> {
    let each = [&*q, k, v].map(|operand| operand.shape[1]);
    let heads = each.into_iter().find(|heads| *heads != 1).unwrap_or(1);
    if each.iter().any(|own| *own != 1 && *own != heads) {
        let [q, k, v] = each;
        let message = format!("q has {q} heads, k {k} and v {v}: without enable_gqa they must be equal or 1");
        return Err(Failure::binding(ErrorKind::Shape, message, "`enable_gqa=True`"));
    }
    let spread = |operand: &mut Operand| {
        if operand.shape[1] == 1 && heads != 1 {
            operand.shape = [operand.shape[0], heads, operand.shape[2]].into();
            operand.strides = [operand.strides[0], 0, operand.strides[2]].into();
        }
    };
    spread(q);
    if k.shape[1] != v.shape[1] {
        spread(k);
        spread(v);
    }
    Ok(())
}
