//! Views: operators whose result is their operand's storage in another form.
//!
//! `view`, `_unsafe_view` and `unflatten` are views or errors; `reshape` and `flatten`, which may copy, stand in `copy`.

use crate::{Args, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A view of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// The tensor.
    pub input: ValueId,
    /// Its new form.
    pub form: Form,
}

/// How a view sees its tensor. Dimensions are counted from the end where negative.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// `alias`, `detach`: as it is.
    Alias,
    /// `detach_`: the tensor itself.
    Itself,
    /// `transpose.int`: two dimensions change places.
    Transpose([i64; 2]),
    /// `t`: a matrix transposed; fewer dimensions stay.
    MatrixTranspose,
    /// `permute`: the dimensions in this order.
    Permute(Vec<i64>),
    /// `view`, `_unsafe_view`: another shape of as many elements, one size of which may be −1.
    Shape(Vec<Int>),
    /// `unflatten.int`: a dimension becomes several.
    Unflatten(i64, Vec<Int>),
    /// `expand`: dimensions of size 1, and new ones in front, stand for many; −1 keeps a size.
    Expand(Vec<Int>),
    /// `expand_as`: to the shape of another tensor.
    ExpandAs(ValueId),
    /// `unsqueeze`: a new dimension of size 1.
    Unsqueeze(i64),
    /// `squeeze`: without these dimensions, where they have size 1; `None` means all.
    Squeeze(Option<Vec<i64>>),
    /// `select.int`: one index of a dimension.
    Select(i64, Int),
    /// `slice.Tensor`: indices of a dimension from start to end by step.
    Slice {
        /// The dimension.
        dim: i64,
        /// The first index; 0 if missing.
        start: Option<Int>,
        /// The index behind the last; the size if missing.
        end: Option<Int>,
        /// The distance of indices.
        step: Int,
    },
    /// `split.Tensor`: parts of this size; the last may be smaller.
    Split(i64, Int),
    /// `split_with_sizes`: parts of these sizes.
    SplitSizes(i64, Vec<Int>),
    /// `chunk`: at most this many parts of one size; the last may be smaller.
    Chunk(i64, Int),
    /// `unbind.int`: each index of a dimension.
    Unbind(i64),
    /// `movedim`: dimensions, and where each goes; the others keep their order.
    Move(Vec<i64>, Vec<i64>),
    /// `numpy_T`: the dimensions in reverse order.
    Reverse,
    /// `mT`, `mH`, `adjoint`: the last two dimensions change places.
    Adjoint,
    /// `narrow`: as many indices of a dimension from a start.
    Narrow {
        /// The dimension.
        dim: i64,
        /// The first index; from the end where it is negative.
        start: Int,
        /// How many.
        length: Int,
    },
    /// `diagonal`: a diagonal of two dimensions, as a last dimension.
    Diagonal {
        /// How far above the main diagonal.
        offset: i64,
        /// The two dimensions.
        dims: [i64; 2],
    },
    /// `unfold`: windows of a dimension, each a last dimension.
    Unfold {
        /// The dimension.
        dim: i64,
        /// The windows' size.
        size: Int,
        /// From one window to the next.
        step: Int,
    },
    /// `view_as`: the shape of another tensor.
    ShapeOf(ValueId),
    /// `tensor_split.sections`: this many parts, the first ones larger by 1 where they cannot be equal.
    Sections(i64, Int),
    /// `tensor_split.indices`: parts that begin at these indices.
    Cuts(i64, Vec<Int>),
    /// `hsplit`, `vsplit`, `dsplit` into equal parts, along dimension 1, 0 or 2; of one dimension, dimension 1 is the first.
    SideParts(i64, Int),
    /// The same into parts that begin at these indices.
    SideCuts(i64, Vec<Int>),
    /// `atleast_1d`, `atleast_2d`, `atleast_3d`: with as many dimensions at least.
    AtLeast(usize),
    /// `as_strided`: elements of the storage, wherever the tensor lies in it.
    Strided {
        /// The sizes.
        size: Vec<Int>,
        /// As many strides.
        stride: Vec<Int>,
        /// The first element, counted from the storage's; the tensor's own if missing.
        offset: Option<Int>,
    },
}

impl View {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<View, OpError>> {
        let name = target.strip_prefix("torch.ops.aten.")?;
        if name == "linalg_diagonal.default" {
            return Some(matrix_diagonal(args));
        }
        let form = form(name, args)?;
        Some(form.and_then(|form| Ok(View { input: args.tensor("self")?, form })))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        if self.form == Form::Itself {
            shapes.meta(self.input)?;
            return Ok(vec![Out::Same(self.input)]);
        }
        let metas = self.form.of(shapes.meta(self.input)?, shapes)?;
        Ok(metas.into_iter().map(|meta| Out::View { of: self.input, meta }).collect())
    }

    // One form for every family: views write nothing and compute nothing.
    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, _: &dyn Eval, _: &[Tensor]) -> Result<(), OpError> {
        Ok(())
    }
}

pub(super) fn form(name: &str, args: &Args<'_>) -> Option<Result<Form, OpError>> {
    let dim = || args.known_int_or("dim", 0);
    Some(match name {
        "alias.default" | "detach.default" => Ok(Form::Alias),
        "detach_.default" | "positive.default" | "resolve_conj.default" | "resolve_neg.default" => Ok(Form::Itself),
        "lift_fresh.default" => Ok(Form::Itself),
        // In place nothing is written: what follows reads the result.
        "swapdims.default" | "swapdims_.default" => {
            args.known_int("dim0").and_then(|a| Ok(Form::Transpose([a, args.known_int("dim1")?])))
        }
        "swapaxes.default" | "swapaxes_.default" => {
            args.known_int("axis0").and_then(|a| Ok(Form::Transpose([a, args.known_int("axis1")?])))
        }
        "movedim.int" | "movedim.intlist" | "moveaxis.int" | "moveaxis.intlist" => {
            known(args, "source").and_then(|from| Ok(Form::Move(from, known(args, "destination")?)))
        }
        "numpy_T.default" => Ok(Form::Reverse),
        "mT.default" | "mH.default" | "adjoint.default" => Ok(Form::Adjoint),
        "matrix_H.default" => Ok(Form::MatrixTranspose),
        "narrow.default" => args
            .known_int("dim")
            .and_then(|dim| Ok(Form::Narrow { dim, start: args.int("start")?, length: args.int("length")? })),
        "diagonal.default" => args.known_int_or("offset", 0).and_then(|offset| {
            Ok(Form::Diagonal { offset, dims: [args.known_int_or("dim1", 0)?, args.known_int_or("dim2", 1)?] })
        }),
        "unfold.default" => args
            .known_int("dimension")
            .and_then(|dim| Ok(Form::Unfold { dim, size: args.int("size")?, step: args.int("step")? })),
        "as_strided.default" | "as_strided_.default" => args.ints("size").and_then(|size| {
            Ok(Form::Strided { size, stride: args.ints("stride")?, offset: args.opt_int("storage_offset")? })
        }),
        "view_as.default" => args.tensor("other").map(Form::ShapeOf),
        "broadcast_to.default" => args.ints("size").map(Form::Expand),
        "transpose.int" | "transpose_.default" => {
            args.known_int("dim0").and_then(|a| Ok(Form::Transpose([a, args.known_int("dim1")?])))
        }
        "t.default" | "t_.default" => Ok(Form::MatrixTranspose),
        "permute.default" => known(args, "dims").map(Form::Permute),
        "view.default" | "_unsafe_view.default" => args.ints("size").map(Form::Shape),
        "unflatten.int" => args.known_int("dim").and_then(|dim| Ok(Form::Unflatten(dim, args.ints("sizes")?))),
        // `implicit` says which function of PyTorch asked, and changes nothing.
        "expand.default" => args.bool_or("implicit", false).and_then(|_| args.ints("size").map(Form::Expand)),
        "expand_as.default" => args.tensor("other").map(Form::ExpandAs),
        "unsqueeze.default" | "unsqueeze_.default" => args.known_int("dim").map(Form::Unsqueeze),
        "squeeze.default" | "squeeze_.default" => Ok(Form::Squeeze(None)),
        "squeeze.dim" | "squeeze_.dim" => args.known_int("dim").map(|dim| Form::Squeeze(Some(vec![dim]))),
        "squeeze.dims" | "squeeze_.dims" => known(args, "dim").map(|dims| Form::Squeeze(Some(dims))),
        "select.int" => args.known_int("dim").and_then(|dim| Ok(Form::Select(dim, args.int("index")?))),
        "slice.Tensor" => slice(args),
        "split.Tensor" | "unsafe_split.Tensor" => args.int("split_size").and_then(|size| Ok(Form::Split(dim()?, size))),
        "split.sizes" => args.ints("split_size").and_then(|sizes| Ok(Form::SplitSizes(dim()?, sizes))),
        "split_with_sizes.default" | "unsafe_split_with_sizes.default" => {
            args.ints("split_sizes").and_then(|sizes| Ok(Form::SplitSizes(dim()?, sizes)))
        }
        "chunk.default" | "unsafe_chunk.default" => {
            args.int("chunks").and_then(|chunks| Ok(Form::Chunk(dim()?, chunks)))
        }
        "unbind.int" => dim().map(Form::Unbind),
        "tensor_split.sections" => args.int("sections").and_then(|n| Ok(Form::Sections(dim()?, n))),
        "tensor_split.indices" => args.ints("indices").and_then(|cuts| Ok(Form::Cuts(dim()?, cuts))),
        "hsplit.int" => side(args, 1, true),
        "hsplit.array" => side(args, 1, false),
        "vsplit.int" => side(args, 0, true),
        "vsplit.array" => side(args, 0, false),
        "dsplit.int" => side(args, 2, true),
        "dsplit.array" => side(args, 2, false),
        "atleast_1d.default" => Ok(Form::AtLeast(1)),
        "atleast_2d.default" => Ok(Form::AtLeast(2)),
        "atleast_3d.default" => Ok(Form::AtLeast(3)),
        _ => return None,
    })
}

fn matrix_diagonal(args: &Args<'_>) -> Result<View, OpError> {
    let (offset, dims) =
        (args.known_int_or("offset", 0)?, [args.known_int_or("dim1", -2)?, args.known_int_or("dim2", -1)?]);
    Ok(View { input: args.tensor("A")?, form: Form::Diagonal { offset, dims } })
}

fn side(args: &Args<'_>, dim: i64, by_number: bool) -> Result<Form, OpError> {
    Ok(if by_number { Form::SideParts(dim, args.int("sections")?) } else { Form::SideCuts(dim, args.ints("indices")?) })
}

fn slice(args: &Args<'_>) -> Result<Form, OpError> {
    Ok(Form::Slice {
        dim: args.known_int_or("dim", 0)?,
        start: args.opt_int("start")?,
        end: args.opt_int("end")?,
        step: args.int_or("step", 1)?,
    })
}

/// A list of dimensions, each a number in the archive.
fn known(args: &Args<'_>, name: &str) -> Result<Vec<i64>, OpError> {
    let number = |int| match int {
        Int::Known(n) => Ok(n),
        Int::Value(_) => {
            Err(OpError::ArgumentValue { name: name.into(), value: "symbolic".into(), why: "dimensions are numbers" })
        }
    };
    args.ints(name)?.into_iter().map(number).collect()
}

impl Form {
    /// The one view of a tensor.
    ///
    /// # Errors
    /// [`OpError`] where the form does not fit, or gives parts.
    pub(super) fn one(&self, meta: &Meta, shapes: &dyn Shapes) -> Result<Meta, OpError> {
        match <[Meta; 1]>::try_from(self.of(meta, shapes)?) {
            Ok([view]) => Ok(view),
            Err(parts) => Err(OpError::Shape(format!("one view is expected, not {}", parts.len()))),
        }
    }

    /// The views of a tensor: one, or the parts.
    fn of(&self, meta: &Meta, shapes: &dyn Shapes) -> Result<Vec<Meta>, OpError> {
        let one = |shape: Vec<i64>, strides: Vec<i64>| vec![Meta { shape, strides, ..meta.clone() }];
        Ok(match self {
            Form::Alias | Form::Itself => vec![meta.clone()],
            Form::Transpose([a, b]) => vec![transpose(meta, *a, *b)?],
            Form::MatrixTranspose if meta.rank() < 2 => vec![meta.clone()],
            Form::MatrixTranspose if meta.rank() == 2 => vec![transpose(meta, 0, 1)?],
            Form::MatrixTranspose => {
                return Err(OpError::Shape(format!("t takes at most 2 dimensions, not {}", meta.rank())));
            }
            Form::Permute(dims) => {
                let order = distinct(meta, dims)?;
                if order.len() != meta.rank() {
                    return Err(OpError::Shape(format!("permute of {} dimensions names {}", meta.rank(), order.len())));
                }
                let pick = |from: &[i64]| order.iter().map(|&d| from[d]).collect();
                one(pick(&meta.shape), pick(&meta.strides))
            }
            Form::Shape(size) => {
                let shape = complete(&shapes.ints(size)?, meta.numel())?;
                one(shape.clone(), view_strides(meta, &shape)?)
            }
            Form::Unflatten(dim, sizes) => {
                let shape = unflattened(meta, *dim, &shapes.ints(sizes)?)?;
                one(shape.clone(), view_strides(meta, &shape)?)
            }
            Form::Expand(size) => vec![expand(meta, &shapes.ints(size)?)?],
            Form::ExpandAs(other) => vec![expand(meta, &shapes.meta(*other)?.shape)?],
            Form::Unsqueeze(dim) => vec![unsqueeze(meta, *dim)?],
            Form::Squeeze(dims) => {
                let gone = match dims {
                    Some(dims) => distinct(meta, dims)?,
                    None => (0..meta.rank()).collect(),
                };
                let stays = |d: &usize| meta.shape[*d] != 1 || !gone.contains(d);
                let pick = |from: &[i64]| (0..meta.rank()).filter(stays).map(|d| from[d]).collect();
                one(pick(&meta.shape), pick(&meta.strides))
            }
            Form::Select(dim, index) => vec![select(meta, *dim, shapes.int(*index)?)?],
            Form::Slice { dim, start, end, step } => {
                let bound = |int: &Option<Int>| int.map(|int| shapes.int(int)).transpose();
                vec![slice_of(meta, *dim, [bound(start)?, bound(end)?], shapes.int(*step)?)?]
            }
            Form::Split(dim, size) => {
                let dim = dim_of(meta, *dim, "split")?;
                let size = shapes.int(*size)?;
                parts(meta, dim, &equal_parts(meta.shape[dim], size)?)?
            }
            Form::SplitSizes(dim, sizes) => parts(meta, dim_of(meta, *dim, "split")?, &shapes.ints(sizes)?)?,
            Form::Chunk(dim, chunks) => {
                let dim = dim_of(meta, *dim, "chunk")?;
                let (len, chunks) = (meta.shape[dim], shapes.int(*chunks)?);
                if chunks < 1 {
                    return Err(OpError::Shape(format!("chunk takes at least 1 part, not {chunks}")));
                }
                let size = len / chunks + i64::from(len % chunks != 0);
                if size == 0 {
                    parts(meta, dim, &vec![0; usize::try_from(chunks.min(1 << 16)).unwrap_or(1)])?
                } else {
                    parts(meta, dim, &equal_parts(len, size)?)?
                }
            }
            Form::Unbind(dim) => {
                let dim = dim_of(meta, *dim, "unbind")?;
                bounded(meta.shape[dim])?;
                let at = i64::try_from(dim).unwrap_or(0);
                (0..meta.shape[dim]).map(|index| select(meta, at, index)).collect::<Result<_, _>>()?
            }
            Form::Move(from, to) => vec![moved(meta, from, to)?],
            Form::Reverse => {
                let back = |from: &[i64]| from.iter().rev().copied().collect();
                one(back(&meta.shape), back(&meta.strides))
            }
            Form::Adjoint if meta.rank() < 2 => {
                return Err(OpError::Shape(format!("a transposed matrix has 2 dimensions, not {}", meta.rank())));
            }
            Form::Adjoint => vec![transpose(meta, -2, -1)?],
            Form::Narrow { dim, start, length } => {
                vec![narrowed(meta, *dim, shapes.int(*start)?, shapes.int(*length)?)?]
            }
            Form::Diagonal { offset, dims } => vec![diagonal(meta, *offset, *dims)?],
            Form::Unfold { dim, size, step } => vec![unfolded(meta, *dim, shapes.int(*size)?, shapes.int(*step)?)?],
            Form::Strided { size, stride, offset } => {
                let (shape, strides) = (shapes.ints(size)?, shapes.ints(stride)?);
                let offset = offset.map_or(Ok(meta.offset), |offset| shapes.int(offset))?;
                if shape.len() != strides.len() || shape.iter().chain(&strides).chain([&offset]).any(|&n| n < 0) {
                    return Err(OpError::Shape(format!("as_strided to {shape:?} strides {strides:?} offset {offset}")));
                }
                vec![Meta { shape, strides, offset, ..meta.clone() }]
            }
            Form::Sections(..) | Form::Cuts(..) | Form::SideCuts(..) | Form::SideParts(..) | Form::AtLeast(_) => {
                self.parts_or_ranks(meta, shapes)?
            }
            Form::ShapeOf(other) => {
                let shape = complete(&shapes.meta(*other)?.shape, meta.numel())?;
                one(shape.clone(), view_strides(meta, &shape)?)
            }
        })
    }

    /// `tensor_split` and its kin, and tensors with more dimensions.
    fn parts_or_ranks(&self, meta: &Meta, shapes: &dyn Shapes) -> Result<Vec<Meta>, OpError> {
        Ok(match self {
            Form::Sections(dim, sections) => {
                let d = dim_of(meta, *dim, "tensor_split")?;
                let (len, sections) = (meta.shape[d], shapes.int(*sections)?);
                bounded(sections)?;
                if sections < 1 {
                    return Err(OpError::Shape(format!("tensor_split takes at least 1 part, not {sections}")));
                }
                let size = |n: i64| len / sections + i64::from(n < len % sections);
                parts(meta, d, &(0..sections).map(size).collect::<Vec<_>>())?
            }
            Form::Cuts(dim, cuts) => cut(meta, *dim, &shapes.ints(cuts)?)?,
            Form::SideCuts(dim, cuts) => cut(meta, side_dim(meta, *dim)?, &shapes.ints(cuts)?)?,
            Form::SideParts(dim, number) => {
                let d = meta.dim(side_dim(meta, *dim)?)?;
                let (number, len) = (shapes.int(*number)?, meta.shape[d]);
                bounded(number)?;
                if number < 1 || len % number != 0 {
                    return Err(OpError::Shape(format!("size {len} is not split into {number} equal parts")));
                }
                parts(meta, d, &vec![len / number; usize::try_from(number).unwrap_or(0)])?
            }
            Form::AtLeast(rank) => vec![match (meta.rank(), rank) {
                (0, _) => Meta { shape: vec![1; *rank], strides: vec![1; *rank], ..meta.clone() },
                (1, 2) => unsqueeze(meta, 0)?,
                (1, 3) => unsqueeze(&unsqueeze(meta, 0)?, -1)?,
                (2, 3) => unsqueeze(meta, -1)?,
                _ => meta.clone(),
            }],
            _ => vec![meta.clone()],
        })
    }
}

fn moved(meta: &Meta, from: &[i64], to: &[i64]) -> Result<Meta, OpError> {
    let (from, to) = (distinct(meta, from)?, distinct(meta, to)?);
    if from.len() != to.len() {
        return Err(OpError::Shape(format!("movedim of {} dimensions to {} places", from.len(), to.len())));
    }
    let mut rest = (0..meta.rank()).filter(|d| !from.contains(d));
    let mut order = Vec::with_capacity(meta.rank());
    for place in 0..meta.rank() {
        match to.iter().position(|&d| d == place) {
            Some(n) => order.push(from[n]),
            None => order.extend(rest.next()),
        }
    }
    let pick = |from: &[i64]| order.iter().map(|&d| from[d]).collect();
    Ok(Meta { shape: pick(&meta.shape), strides: pick(&meta.strides), ..meta.clone() })
}

/// The bounds must lie in the dimension.
fn narrowed(meta: &Meta, dim: i64, start: i64, length: i64) -> Result<Meta, OpError> {
    let d = dim_of(meta, dim, "narrow")?;
    let size = meta.shape[d];
    let first = if start < 0 { start.saturating_add(size) } else { start };
    if length < 0 || start > size || first < 0 || first > size - length {
        return Err(OpError::Shape(format!("narrow to {length} elements from {start} of {size}")));
    }
    let mut meta = meta.clone();
    meta.offset = meta.offset.saturating_add(first.saturating_mul(meta.strides[d]));
    meta.shape[d] = length;
    Ok(meta)
}

fn diagonal(meta: &Meta, offset: i64, [a, b]: [i64; 2]) -> Result<Meta, OpError> {
    let (a, b) = (dim_of(meta, a, "diagonal")?, dim_of(meta, b, "diagonal")?);
    if a == b {
        return Err(OpError::Shape(format!("a diagonal of dimension {a} and itself")));
    }
    let (rows, columns) = (meta.shape[a], meta.shape[b]);
    let size =
        if offset >= 0 { rows.min(columns.saturating_sub(offset)) } else { rows.saturating_add(offset).min(columns) }
            .max(0);
    let mut out = meta.clone();
    if size > 0 {
        let by = if offset >= 0 { offset * meta.strides[b] } else { -offset * meta.strides[a] };
        out.offset = out.offset.saturating_add(by);
    }
    let stride = meta.strides[a].saturating_add(meta.strides[b]);
    for d in [a.max(b), a.min(b)] {
        out.shape.remove(d);
        out.strides.remove(d);
    }
    out.shape.push(size);
    out.strides.push(stride);
    Ok(out)
}

fn unfolded(meta: &Meta, dim: i64, size: i64, step: i64) -> Result<Meta, OpError> {
    let d = meta.dim(dim)?;
    let (whole, stride) = if meta.shape.is_empty() { (1, 1) } else { (meta.shape[d], meta.strides[d]) };
    if size < 0 || size > whole || step < 1 {
        return Err(OpError::Shape(format!("windows of {size} by steps of {step} over {whole} elements")));
    }
    let mut out = meta.clone();
    if !meta.shape.is_empty() {
        out.shape[d] = (whole - size) / step + 1;
        out.strides[d] = stride.saturating_mul(step);
    }
    out.shape.push(size);
    out.strides.push(stride);
    Ok(out)
}

fn transpose(meta: &Meta, a: i64, b: i64) -> Result<Meta, OpError> {
    let mut meta = meta.clone();
    let (a, b) = (meta.dim(a)?, meta.dim(b)?);
    if !meta.shape.is_empty() {
        meta.shape.swap(a, b);
        meta.strides.swap(a, b);
    }
    Ok(meta)
}

/// The dimensions that a list names, each once. A tensor without dimensions has none.
fn distinct(meta: &Meta, dims: &[i64]) -> Result<Vec<usize>, OpError> {
    let mut found = Vec::with_capacity(dims.len());
    for &dim in dims {
        let d = meta.dim(dim)?;
        if found.contains(&d) {
            return Err(OpError::Shape(format!("dimension {dim} is named twice")));
        }
        found.push(d);
    }
    found.retain(|&d| d < meta.rank());
    Ok(found)
}

fn dim_of(meta: &Meta, dim: i64, what: &str) -> Result<usize, OpError> {
    let d = meta.dim(dim)?;
    if meta.shape.is_empty() {
        return Err(OpError::Shape(format!("{what} takes at least 1 dimension")));
    }
    Ok(d)
}

/// A shape of this many elements: a size of −1 is what is left.
pub(super) fn complete(size: &[i64], numel: i64) -> Result<Vec<i64>, OpError> {
    let fail = || OpError::Shape(format!("shape {size:?} is not one of {numel} elements"));
    let mut shape = size.to_vec();
    let open: Vec<usize> = (0..size.len()).filter(|&d| size[d] == -1).collect();
    let fixed = size.iter().filter(|&&n| n != -1);
    let rest = fixed.clone().try_fold(1i64, |product, &n| product.checked_mul(n)).ok_or_else(fail)?;
    if fixed.clone().any(|&n| n < 0) || open.len() > 1 {
        return Err(fail());
    }
    if let [d] = open.as_slice() {
        if rest == 0 || numel % rest != 0 {
            return Err(fail());
        }
        shape[*d] = numel / rest;
    } else if rest != numel {
        return Err(fail());
    }
    Ok(shape)
}

fn view_strides(meta: &Meta, shape: &[i64]) -> Result<Vec<i64>, OpError> {
    let fail =
        || OpError::Shape(format!("shape {shape:?} is no view of shape {:?} strides {:?}", meta.shape, meta.strides));
    strides::of_view(meta, shape).ok_or_else(fail)
}

/// The shape with one dimension taken apart.
fn unflattened(meta: &Meta, dim: i64, sizes: &[i64]) -> Result<Vec<i64>, OpError> {
    let d = dim_of(meta, dim, "unflatten")?;
    let inner = complete(sizes, meta.shape[d])?;
    let mut shape = meta.shape.clone();
    shape.splice(d..=d, inner);
    Ok(shape)
}

fn expand(meta: &Meta, size: &[i64]) -> Result<Meta, OpError> {
    let fail = || OpError::Shape(format!("shape {:?} does not expand to {size:?}", meta.shape));
    let lead = size.len().checked_sub(meta.rank()).ok_or_else(fail)?;
    let (mut shape, mut strides) = (size.to_vec(), vec![0; size.len()]);
    for d in (0..size.len()).rev() {
        // A new dimension of size 1 has the stride of one that lies outside of the next.
        let (own, stride) = match d.checked_sub(lead) {
            Some(own) => (meta.shape[own], meta.strides[own]),
            None if d + 1 < size.len() => (1, shape[d + 1].saturating_mul(strides[d + 1])),
            None => (1, 1),
        };
        if size[d] == -1 && d >= lead {
            shape[d] = own;
        }
        if shape[d] < 0 || (shape[d] != own && own != 1) {
            return Err(fail());
        }
        strides[d] = if shape[d] == own { stride } else { 0 };
    }
    Ok(Meta { shape, strides, ..meta.clone() })
}

fn unsqueeze(meta: &Meta, dim: i64) -> Result<Meta, OpError> {
    let rank = i64::try_from(meta.rank()).unwrap_or(i64::MAX - 1) + 1;
    if dim < -rank || dim >= rank {
        return Err(OpError::DimOutOfRange { dim, rank: meta.rank() });
    }
    let d = usize::try_from(dim.rem_euclid(rank)).unwrap_or(0);
    let mut meta = meta.clone();
    let stride = if d < meta.rank() { meta.shape[d].saturating_mul(meta.strides[d]) } else { 1 };
    meta.shape.insert(d, 1);
    meta.strides.insert(d, stride);
    Ok(meta)
}

fn select(meta: &Meta, dim: i64, index: i64) -> Result<Meta, OpError> {
    let d = dim_of(meta, dim, "select")?;
    let size = meta.shape[d];
    if index < -size || index >= size {
        return Err(OpError::IndexOutOfRange { index, dim: d, size });
    }
    let mut meta = meta.clone();
    let place = if index < 0 { index + size } else { index };
    meta.offset = meta.offset.saturating_add(place.saturating_mul(meta.strides[d]));
    meta.shape.remove(d);
    meta.strides.remove(d);
    Ok(meta)
}

/// Bounds beyond the dimension are moved into it, as in Python.
fn slice_of(meta: &Meta, dim: i64, [start, end]: [Option<i64>; 2], step: i64) -> Result<Meta, OpError> {
    let d = dim_of(meta, dim, "slice")?;
    if step < 1 {
        return Err(OpError::Shape(format!("slice takes a step of at least 1, not {step}")));
    }
    let size = meta.shape[d];
    let inside = |bound: i64| if bound < 0 { bound.saturating_add(size) } else { bound };
    let start = inside(start.unwrap_or(0)).clamp(0, size);
    let end = inside(end.unwrap_or(size)).clamp(start, size);
    let mut meta = meta.clone();
    let len = end - start;
    meta.shape[d] = len / step + i64::from(len % step != 0);
    meta.offset = meta.offset.saturating_add(start.saturating_mul(meta.strides[d]));
    meta.strides[d] = meta.strides[d].saturating_mul(step);
    Ok(meta)
}

/// Sizes of parts of a dimension: `size` each, the last what is left; one part at least.
fn equal_parts(len: i64, size: i64) -> Result<Vec<i64>, OpError> {
    if size < 0 || (size == 0 && len > 0) {
        return Err(OpError::Shape(format!("size {len} is not split into parts of {size}")));
    }
    if size == 0 || len == 0 {
        return Ok(vec![len]);
    }
    bounded(len / size)?;
    Ok((0..len).step_by(usize::try_from(size).unwrap_or(usize::MAX)).map(|start| size.min(len - start)).collect())
}

/// The dimension in which a tensor of rows and columns is split.
fn side_dim(meta: &Meta, dim: i64) -> Result<i64, OpError> {
    let least = if dim == 1 { 1 } else { dim.max(1) + 1 };
    if i64::try_from(meta.rank()).unwrap_or(i64::MAX) < least {
        return Err(OpError::Shape(format!("shape {:?} has no dimension to split", meta.shape)));
    }
    Ok(if meta.rank() == 1 { 0 } else { dim })
}

/// Parts that begin at these indices, each moved into the dimension as in Python.
fn cut(meta: &Meta, dim: i64, cuts: &[i64]) -> Result<Vec<Meta>, OpError> {
    dim_of(meta, dim, "tensor_split")?;
    let starts = std::iter::once(None).chain(cuts.iter().map(|&at| Some(at)));
    let ends = cuts.iter().map(|&at| Some(at)).chain(std::iter::once(None));
    starts.zip(ends).map(|(start, end)| slice_of(meta, dim, [start, end], 1)).collect()
}

/// A node names its parts; more than this many are no program.
fn bounded(parts: i64) -> Result<(), OpError> {
    if parts > 1 << 16 { Err(OpError::Shape(format!("{parts} parts are too many"))) } else { Ok(()) }
}

fn parts(meta: &Meta, dim: usize, sizes: &[i64]) -> Result<Vec<Meta>, OpError> {
    let sum = sizes.iter().try_fold(0i64, |sum, &n| if n < 0 { None } else { sum.checked_add(n) });
    if sum != Some(meta.shape[dim]) {
        return Err(OpError::Shape(format!("size {} is not split into parts of {sizes:?}", meta.shape[dim])));
    }
    let mut start = 0;
    let part = |&size: &i64| {
        let mut part = meta.clone();
        part.shape[dim] = size;
        part.offset = part.offset.saturating_add(meta.strides[dim].saturating_mul(start));
        start += size;
        part
    };
    Ok(sizes.iter().map(part).collect())
}
