//! From a Python tensor to a [`View`] and back. No element is read, copied or converted here.
//!
//! An [`Operand`] is what a tensor says of itself; its `view` is where rapt-core checks it. Three producers are known:
//! torch tensors (extent proven by their storage), numpy arrays and DLPack capsules (extent declared). Who lends stream and
//! memory to a call on a GPU stands in `lender`.

mod cuda_interface;
pub(crate) mod dlpack;
mod dlpack_abi;
pub(crate) mod lender;
pub(crate) mod numpy;
pub(crate) mod torch;

use pyo3::prelude::*;
use rapt::{DType, Device, ErrorKind, Extent, Shape, Strides, TensorForm, View, ViewMut};

use crate::errors::Failure;
use lender::Lender;

/// Whose tensor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `torch.Tensor`.
    Torch,
    /// `numpy.ndarray`.
    Numpy,
    /// Anything with `__dlpack__`.
    DlPack,
}

/// A tensor as it describes itself, borrowed for the length of one call.
pub(crate) struct Operand {
    pub(crate) name: &'static str,
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) strides: Strides,
    pub(crate) device: Device,
    pub(crate) extent: Extent,
    pub(crate) writable: bool,
    /// Keeps a DLPack export alive, and ends it when dropped.
    pub(crate) _hold: Option<dlpack::Export>,
}

impl Operand {
    /// What it says of itself but for its address.
    pub(crate) fn form(&self) -> TensorForm {
        TensorForm::new(self.dtype, self.shape, self.strides, self.device).at(self.ptr.addr())
    }

    /// This tensor to be read.
    pub(crate) fn view(&self) -> rapt::Result<View<'_>> {
        // SAFETY: the producer vouches for shape, strides and memory; the caller's reference (or `_hold`) keeps it alive
        // for as long as `self` is borrowed. As with every library, writing a tensor from another thread while a call
        // reads it is the program's own race.
        unsafe {
            View::from_raw_parts(self.name, self.ptr, self.dtype, self.shape, self.strides, self.device, self.extent)
        }
    }

    /// This tensor to be written.
    pub(crate) fn view_mut(&mut self) -> rapt::Result<ViewMut<'_>> {
        if !self.writable {
            return Err(rapt::Error::ReadOnly { tensor: self.name });
        }
        // SAFETY: as in `view`, and the producer says that it may be written.
        unsafe {
            ViewMut::from_raw_parts(self.name, self.ptr, self.dtype, self.shape, self.strides, self.device, self.extent)
        }
    }
}

/// The dimensions in `sizes`; more than rapt serves is an error that names the tensor.
pub(crate) fn shape(name: &'static str, sizes: &[usize]) -> Result<Shape, Failure> {
    Shape::new(sizes).ok_or_else(|| too_many_dimensions(name, sizes.len()))
}

fn too_many_dimensions(name: &'static str, rank: usize) -> Failure {
    let message = format!("{name} has {rank} dimensions; at most {} are read", rapt::MAX_RANK);
    Failure::door(ErrorKind::Shape, message, format!("`{name}.reshape(-1, *{name}.shape[-3:])`"))
}

/// Whose tensor `object` is, or `None` if it is no tensor.
pub(crate) fn kind_of(object: &Bound<'_, PyAny>) -> PyResult<Option<Kind>> {
    if torch::is_exactly_tensor(object) {
        return Ok(Some(Kind::Torch));
    }
    if numpy::is_exactly_array(object) {
        return Ok(Some(Kind::Numpy));
    }
    if torch::is_tensor(object)? {
        return Ok(Some(Kind::Torch));
    }
    if numpy::is_array(object)? {
        return Ok(Some(Kind::Numpy));
    }
    Ok(dlpack::is_producer(object)?.then_some(Kind::DlPack))
}

/// What errors call the type of `object`.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    match kind_of(object) {
        Ok(Some(Kind::Torch)) => "torch tensor".to_owned(),
        Ok(Some(Kind::Numpy)) => "numpy array".to_owned(),
        _ => object.get_type().fully_qualified_name().map_or_else(|_| "unknown".to_owned(), |name| name.to_string()),
    }
}

/// The kind of `q`, which is that of the call.
pub(crate) fn source_kind(q: &Bound<'_, PyAny>) -> Result<Kind, Failure> {
    kind_of(q)?.ok_or_else(|| {
        let message =
            format!("q is a {}: allowed are numpy arrays, torch tensors and objects with __dlpack__", type_name(q));
        Failure::door(ErrorKind::Kind, message, "`numpy.asarray(q)`, or `torch.as_tensor(q)`")
    })
}

/// Reads what `object` says of itself; it must be of the kind of `q`.
pub(crate) fn read(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    kind: Kind,
    q: &Bound<'_, PyAny>,
) -> Result<Operand, Failure> {
    let same = match kind {
        Kind::Torch => torch::is_tensor(object)?,
        Kind::Numpy => numpy::is_array(object)?,
        Kind::DlPack => object.get_type().is(q.get_type()),
    };
    if !same {
        return Err(rapt::Error::KindMismatch { tensor: name, expected: type_name(q), got: type_name(object) }.into());
    }
    match kind {
        Kind::Torch => torch::read(name, object),
        Kind::Numpy => numpy::read(name, object),
        Kind::DlPack => dlpack::read(name, object, &Lender::of(kind, q)?),
    }
}

/// A new tensor of the kind of `q` on `device`: the Python object and what it says of itself.
pub(crate) fn allocate<'py>(
    name: &'static str,
    kind: Kind,
    q: &Bound<'py, PyAny>,
    device: Device,
    dtype: DType,
    shape: Shape,
) -> Result<(Product<'py>, Operand), Failure> {
    let ready = |object: Bound<'py, PyAny>, operand: Operand| {
        // The strides of an empty tensor are free, and numpy's are not those of a row-major spec.
        let strides = shape.contiguous().filter(|_| shape.contains(&0)).unwrap_or(operand.strides);
        (Product::Ready(object), Operand { strides, ..operand })
    };
    match (kind, device) {
        (Kind::Torch, _) => {
            let overflow = rapt::Error::Overflow { tensor: name, shape, strides: Strides::from([]) };
            let strides = shape.contiguous().ok_or(overflow)?;
            let (object, operand) = torch::empty_strided(q, name, dtype, &shape, &strides)?;
            Ok(ready(object, operand))
        }
        (Kind::Numpy, _) => {
            let object = numpy::empty(q, dtype, &shape)?;
            let operand = numpy::read(name, &object)?;
            Ok(ready(object, operand))
        }
        (Kind::DlPack, Device::Cuda(index)) => match Lender::of(kind, q)? {
            lender @ Lender::Cupy(_) => {
                let Lender::Cupy(cupy) = &lender else { return Err(no_output()) };
                let object = lender::empty_cupy(cupy, q, index, dtype, &shape)?;
                // Made here, and so writable, whichever capsule says it.
                let operand = Operand { writable: true, ..dlpack::read(name, &object, &lender)? };
                Ok(ready(object, operand))
            }
            _ => {
                let from_dlpack = dlpack::from_dlpack_of(q)?;
                let (buffer, operand) = dlpack::lend(name, index, dtype, shape)?;
                Ok((Product::Exported { buffer, from_dlpack }, operand))
            }
        },
        (Kind::DlPack, _) => {
            let from_dlpack = dlpack::from_dlpack_of(q)?;
            let (buffer, operand) = dlpack::allocate(name, dtype, shape)?;
            Ok((Product::Exported { buffer, from_dlpack }, operand))
        }
    }
}

/// As [`allocate`], for a tensor that is looked at and never handed out: its producer need not know how to take it.
pub(crate) fn reserve<'py>(
    name: &'static str,
    kind: Kind,
    q: &Bound<'py, PyAny>,
    device: Device,
    dtype: DType,
    shape: Shape,
) -> Result<(Product<'py>, Operand), Failure> {
    if kind != Kind::DlPack {
        return allocate(name, kind, q, device, dtype, shape);
    }
    let (buffer, operand) = match device {
        Device::Cuda(index) => dlpack::lend(name, index, dtype, shape)?,
        _ => dlpack::allocate(name, dtype, shape)?,
    };
    Ok((Product::Kept(buffer), operand))
}

fn no_output() -> Failure {
    Failure::door(ErrorKind::Unsupported, "no output was made", "")
}

/// A tensor made for a result.
pub(crate) enum Product<'py> {
    /// Memory that nobody is given.
    Kept(#[allow(dead_code, reason = "held for its memory")] dlpack::Buffer),
    /// As it is handed to the caller.
    Ready(Bound<'py, PyAny>),
    /// To be taken over by the producer's library when it is written.
    Exported {
        /// The memory.
        buffer: dlpack::Buffer,
        /// The producer's own import.
        from_dlpack: Bound<'py, PyAny>,
    },
}

impl<'py> Product<'py> {
    /// The object for the caller; its operand must have been dropped.
    pub(crate) fn finish(self, py: Python<'py>) -> Result<Bound<'py, PyAny>, Failure> {
        match self {
            Product::Ready(object) => Ok(object),
            Product::Kept(_) => Err(no_output()),
            Product::Exported { buffer, from_dlpack } => Ok(from_dlpack.call1((Bound::new(py, buffer)?,))?),
        }
    }
}
