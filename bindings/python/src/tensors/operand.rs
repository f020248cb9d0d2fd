//! What a tensor says of itself, and where rapt-core checks it.

use rapt::{DType, Device, ErrorKind, Extent, Shape, Strides, TensorForm, View, ViewMut};

use super::export::Export;
use crate::errors::Failure;

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
    pub(crate) _hold: Option<Export>,
}

impl Operand {
    /// What it says of itself but for its address.
    pub(crate) fn form(&self) -> TensorForm {
        TensorForm::new(self.dtype, self.shape, self.strides, self.device).at(self.ptr.addr())
    }

    /// The same memory, of the sizes and strides of `form`.
    pub(crate) fn in_form(self, form: &TensorForm) -> Operand {
        Operand { shape: form.shape, strides: form.strides, ..self }
    }

    /// The same memory, without the hold on it: for as long as this one lives.
    pub(crate) fn alias(&self) -> Operand {
        let Operand { name, ptr, dtype, shape, strides, device, extent, writable, .. } = *self;
        Operand { name, ptr, dtype, shape, strides, device, extent, writable, _hold: None }
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

pub(super) fn too_many_dimensions(name: &'static str, rank: usize) -> Failure {
    let message = format!("{name} has {rank} dimensions; at most {} are read", rapt::MAX_RANK);
    Failure::binding(ErrorKind::Shape, message, format!("`{name}.reshape(-1, *{name}.shape[-3:])`"))
}
