//! What several families need of shapes, layouts and numbers.
//!
//! Layouts are those that PyTorch's fake tensors give when a program is exported, as the archive records them: where eager
//! PyTorch lays a result out otherwise, the archive's word counts.

use rapt_core::DType;

use crate::number::{float_to_int, int_to_float, is_float, round, wrap};
use crate::{Args, Cells, Eval, Meta, Number, OpError, Out, Precision, Scalar, Shapes, Tensor, ValueId, strides};

/// The largest number of elements that a result may have: what no memory holds is refused before it is asked for.
const MAX_ELEMENTS: i64 = 1 << 46;

/// An error about shapes.
pub(super) fn misfit<T>(text: impl Into<String>) -> Result<T, OpError> {
    Err(OpError::Shape(text.into()))
}

/// An argument's value that is not served.
pub(super) fn refuse<T>(name: &str, value: impl Into<String>, why: &'static str) -> Result<T, OpError> {
    Err(OpError::ArgumentValue { name: name.into(), value: value.into(), why })
}

/// A tensor of its own, row-major.
pub(super) fn fresh(dtype: DType, shape: &[i64]) -> Result<Out, OpError> {
    bounded(shape)?;
    Ok(Out::Fresh(Meta::contiguous(dtype, shape)))
}

/// That sizes are not negative and their product is one that a tensor can have.
pub(super) fn bounded(shape: &[i64]) -> Result<(), OpError> {
    let numel = shape.iter().try_fold(1i64, |numel, &n| if n < 0 { None } else { numel.checked_mul(n.max(1)) });
    match numel {
        Some(numel) if numel <= MAX_ELEMENTS => Ok(()),
        _ => misfit(format!("a tensor of shape {shape:?}")),
    }
}

/// A size as a number of steps. Shapes that were inferred have no negative sizes.
pub(super) fn count(n: i64) -> usize {
    usize::try_from(n).unwrap_or(0)
}

/// The row-major strides of a shape.
pub(super) fn row_major(shape: &[i64]) -> Vec<i64> {
    Meta::contiguous(DType::F32, shape).strides
}

/// The places of all elements of a shape with these strides, in row-major order.
pub(super) fn places(shape: &[i64], strides: &[i64]) -> Vec<usize> {
    if shape.contains(&0) {
        return Vec::new();
    }
    let mut places = vec![0usize];
    for (&n, &stride) in shape.iter().zip(strides) {
        let (n, stride) = (count(n), count(stride));
        places = places.iter().flat_map(|&p| (0..n).map(move |i| p + i * stride)).collect();
    }
    places
}

/// A dimension's place in a row-major tensor: `outer` blocks of `size` rows of `inner` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lanes {
    pub(super) outer: usize,
    pub(super) size: usize,
    pub(super) inner: usize,
}

impl Lanes {
    /// The lanes along a dimension; a tensor without dimensions has one lane of one element.
    pub(super) fn of(shape: &[i64], dim: usize) -> Lanes {
        if shape.is_empty() {
            return Lanes { outer: 1, size: 1, inner: 1 };
        }
        let product = |sizes: &[i64]| sizes.iter().map(|&n| count(n)).product();
        Lanes { outer: product(&shape[..dim]), size: count(shape[dim]), inner: product(&shape[dim + 1..]) }
    }

    /// The first element of each lane.
    pub(super) fn starts(self) -> impl Iterator<Item = usize> {
        (0..self.outer).flat_map(move |o| (0..self.inner).map(move |i| o * self.size * self.inner + i))
    }
}

/// Strides that read a tensor of shape `from` as if it had shape `to`; `strides` are its own.
pub(super) fn expand_strides(from: &[i64], strides: &[i64], to: &[i64]) -> Result<Vec<i64>, OpError> {
    let Some(lead) = to.len().checked_sub(from.len()) else {
        return misfit(format!("shape {from:?} does not expand to {to:?}"));
    };
    let mut out = vec![0; lead];
    for ((&n, &stride), &m) in from.iter().zip(strides).zip(&to[lead..]) {
        match n {
            _ if n == m => out.push(if n == 1 { 0 } else { stride }),
            1 => out.push(0),
            _ => return misfit(format!("shape {from:?} does not expand to {to:?}")),
        }
    }
    Ok(out)
}

/// The row-major places in a tensor of shape `from` of the elements of shape `to` that it broadcasts to.
pub(super) fn expand_places(from: &[i64], to: &[i64]) -> Result<Vec<usize>, OpError> {
    Ok(places(to, &expand_strides(from, &row_major(from), to)?))
}

/// Whether PyTorch suggests channels-last for an image or a volume, with its verdicts on ambiguous strides.
pub(super) fn is_channels_last(meta: &Meta) -> bool {
    let (shape, strides) = (&meta.shape, &meta.strides);
    let order: &[usize] = match shape.len() {
        4 => &[1, 3, 2, 0],
        5 => &[1, 4, 3, 2, 0],
        _ => return false,
    };
    if strides[1] == 0 {
        return false;
    }
    let mut min = 0;
    for &d in order {
        if shape[d] == 0 || strides[d] < min || (d == 0 && min == strides[1]) {
            return false;
        }
        min = strides[d] * shape[d].max(1);
    }
    true
}

/// A tensor of its own: of an image or a volume channels-last where that is asked for, else row-major.
pub(super) fn fresh_in_format(dtype: DType, shape: &[i64], channels_last: bool) -> Result<Out, OpError> {
    bounded(shape)?;
    let mut meta = Meta::contiguous(dtype, shape);
    if channels_last && matches!(shape.len(), 4 | 5) {
        meta.strides = strides::channels_innermost(shape);
    }
    Ok(Out::Fresh(meta))
}

/// A tensor of its own that lies as another does, without its gaps: `empty_like`.
pub(super) fn like(meta: &Meta, dtype: DType) -> Meta {
    Meta { dtype, shape: meta.shape.clone(), strides: strides::preserved(meta), offset: 0 }
}

/// The form of a copy that keeps a view's strides, gaps included; its storage is its own, and it starts there.
pub(super) fn copy_in_place_of(meta: &Meta) -> Meta {
    if strides::overlaps_itself(meta) { like(meta, meta.dtype) } else { Meta { offset: 0, ..meta.clone() } }
}

/// A list of dimensions, each once, in ascending order.
pub(super) fn dims_of(meta: &Meta, dims: &[i64]) -> Result<Vec<usize>, OpError> {
    let mut out = dims.iter().map(|&dim| meta.dim(dim)).collect::<Result<Vec<_>, _>>()?;
    out.sort_unstable();
    if let Some(twice) = out.windows(2).find(|pair| pair[0] == pair[1]) {
        return misfit(format!("dimension {} appears twice", twice[0]));
    }
    out.retain(|&d| d < meta.rank());
    Ok(out)
}

/// That a dtype is a float that Rapt computes in.
pub(super) fn need_float(what: &'static str, dtype: DType) -> Result<(), OpError> {
    if is_float(dtype) { Ok(()) } else { Err(OpError::Dtype { what, dtype }) }
}

/// That a dtype is a float or an integer, not a boolean.
pub(super) fn need_number(what: &'static str, dtype: DType) -> Result<(), OpError> {
    if is_float(dtype) || is_int(dtype) { Ok(()) } else { Err(OpError::Dtype { what, dtype }) }
}

/// That a dtype is one that the interpreter holds: a float, an integer or a boolean.
pub(super) fn need_plain(what: &'static str, dtype: DType) -> Result<(), OpError> {
    if dtype == DType::Bool { Ok(()) } else { need_number(what, dtype) }
}

/// That two dtypes are equal.
pub(super) fn need_same(a: DType, b: DType) -> Result<(), OpError> {
    if a == b { Ok(()) } else { Err(OpError::DtypesDiffer(a, b)) }
}

/// Whether a dtype is an integer; a boolean is none.
pub(super) fn is_int(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// A tensor's numbers in row-major order, as they are.
pub(super) fn cells(tensor: &Tensor) -> Cells {
    tensor.cast(tensor.meta.dtype, Precision::Wide)
}

/// The numbers at these places.
pub(super) fn pick(cells: &Cells, places: impl IntoIterator<Item = usize>) -> Cells {
    match cells {
        Cells::Float(x) => Cells::Float(places.into_iter().map(|p| x[p]).collect()),
        Cells::Int(x) => Cells::Int(places.into_iter().map(|p| x[p]).collect()),
    }
}

/// A number as f64.
pub(super) fn scalar_float(shapes: &dyn Shapes, scalar: Scalar) -> Result<f64, OpError> {
    Ok(match shapes.number(scalar)? {
        Number::Int(n) => n as f64,
        Number::Float(x) => x,
        Number::Bool(b) => f64::from(u8::from(b)),
    })
}

/// A number as one of a dtype's cells, as PyTorch's fill converts it.
pub(super) fn scalar_cell(
    shapes: &dyn Shapes,
    scalar: Scalar,
    dtype: DType,
    precision: Precision,
) -> Result<Cells, OpError> {
    let rounded = |x: f64| if precision == Precision::Wide { x } else { round(dtype, x) };
    Ok(match (shapes.number(scalar)?, is_float(dtype)) {
        (Number::Float(x), true) => Cells::Float(vec![rounded(x)]),
        (Number::Float(x), false) => Cells::Int(vec![float_to_int(dtype, x)]),
        (Number::Int(n), true) => {
            Cells::Float(vec![if precision == Precision::Wide { n as f64 } else { int_to_float(dtype, n) }])
        }
        (Number::Int(n), false) => Cells::Int(vec![wrap(dtype, n)]),
        (Number::Bool(b), true) => Cells::Float(vec![f64::from(u8::from(b))]),
        (Number::Bool(b), false) => Cells::Int(vec![i64::from(b)]),
    })
}

/// Reads arguments that change nothing here: they tell training, or a GPU, what to do.
pub(super) fn ignore(args: &Args<'_>, names: &[&str]) {
    for name in names {
        let _ = args.raw(name);
    }
}

/// A list of floats, or nothing.
pub(super) fn opt_floats(args: &Args<'_>, name: &str) -> Result<Option<Vec<f64>>, OpError> {
    use rapt_pt2::Argument;
    match args.raw(name) {
        None | Some(Argument::None) => Ok(None),
        Some(Argument::Floats(list)) => Ok(Some(list.clone())),
        Some(Argument::Ints(list)) => Ok(Some(list.iter().map(|&n| n as f64).collect())),
        Some(Argument::Float(x)) => Ok(Some(vec![*x])),
        Some(other) => {
            Err(OpError::ArgumentKind { name: name.into(), expected: "a list of floats", got: format!("{other:?}") })
        }
    }
}

/// The numbers of an optional operand as floats.
pub(super) fn opt_floats_of(eval: &dyn Eval, id: Option<ValueId>) -> Result<Option<Vec<f64>>, OpError> {
    id.map(|id| Ok(eval.tensor(id)?.floats())).transpose()
}
