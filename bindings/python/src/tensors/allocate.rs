//! New tensors for results, of the kind of `q`.

use pyo3::prelude::*;
use rapt::{DType, Device, ErrorKind, Extent, Shape, Strides};

use super::stream_context::{self, StreamContext};
use super::{Operand, dlpack, numpy, torch};
use crate::errors::Failure;
use crate::kind::Kind;

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
        (Product::Ready(object), owned(Operand { strides, ..operand }))
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
        (Kind::DlPack, Device::Cuda(index)) => match StreamContext::of(kind, q)? {
            context @ StreamContext::Cupy(_) => {
                let StreamContext::Cupy(cupy) = &context else { return Err(no_output()) };
                let object = stream_context::empty_cupy(cupy, q, index, dtype, &shape)?;
                // Made here, and so writable, whichever capsule says it.
                let operand = Operand { writable: true, ..dlpack::read(name, &object, &context)? };
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

/// `operand` with its storage known: a row-major tensor that was made here holds its own elements and nothing else.
fn owned(operand: Operand) -> Operand {
    if operand.extent != Extent::Declared {
        return operand;
    }
    let len_bytes = operand.shape.iter().product::<usize>() * operand.dtype.size_bytes();
    Operand { extent: Extent::Proven { address: operand.ptr.addr(), len_bytes }, ..operand }
}

fn no_output() -> Failure {
    Failure::binding(ErrorKind::Unsupported, "no output was made", "")
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
