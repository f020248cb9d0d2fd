//! Tensors in the caller's buffers, as views: the boundary that host memory has, in a space of addresses of this backend.
//!
//! ```text
//! address = (1 + number of the buffer among the operands) · 2^48 + byte in the buffer
//! ```
//! So a view that leaves its buffer is refused, and what overlaps is found, by the checks of rapt-core. No address is ever read.

use rapt_core::{DType, Device, Error, Extent, Result, Shape, Strides, Tensors, View, ViewMut};

/// The bits of an address that count bytes of a buffer.
const OFFSET_BITS: u32 = 48;

/// A tensor in a buffer with usage `STORAGE`.
#[derive(Clone, Copy, Debug)]
pub struct BufferTensor<'a> {
    /// The buffer.
    pub buffer: &'a wgpu::Buffer,
    /// Where element 0 lies, in bytes.
    pub offset_bytes: u64,
    /// The dtype of the elements.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Shape,
    /// Strides in elements, of any sign.
    pub strides: Strides,
}

impl<'a> BufferTensor<'a> {
    /// A row-major tensor at the begin of `buffer`.
    ///
    /// # Errors
    /// [`Error::Overflow`].
    pub fn contiguous(tensor: &'static str, buffer: &'a wgpu::Buffer, dtype: DType, shape: Shape) -> Result<Self> {
        let strides = shape.contiguous().ok_or(Error::Overflow { tensor, shape, strides: Strides::from([]) })?;
        Ok(BufferTensor { buffer, offset_bytes: 0, dtype, shape, strides })
    }
}

/// The tensors of one run. Shapes are those of [`Tensors`].
#[derive(Clone, Copy, Debug)]
pub struct BufferTensors<'a> {
    /// Queries.
    pub q: BufferTensor<'a>,
    /// Keys.
    pub k: BufferTensor<'a>,
    /// Values.
    pub v: BufferTensor<'a>,
    /// Boolean or additive mask.
    pub mask: Option<BufferTensor<'a>>,
    /// One more logit per head.
    pub sinks: Option<BufferTensor<'a>>,
    /// ALiBi slopes.
    pub alibi_slopes: Option<BufferTensor<'a>>,
    /// Where the result goes, in a buffer that has no other tensor.
    pub out: BufferTensor<'a>,
    /// Where the log of the sum of exponentials goes, in a buffer that has no other tensor.
    pub lse: Option<BufferTensor<'a>>,
}

impl<'a> BufferTensors<'a> {
    /// Numbers that attend without mask, sinks, slopes and lse.
    #[must_use]
    pub fn new(q: BufferTensor<'a>, k: BufferTensor<'a>, v: BufferTensor<'a>, out: BufferTensor<'a>) -> Self {
        BufferTensors { q, k, v, mask: None, sinks: None, alibi_slopes: None, out, lse: None }
    }

    /// In the order of [`BINDINGS`](rapt_shader::BINDINGS).
    pub(crate) fn bound(&self) -> [Option<BufferTensor<'a>>; 8] {
        let BufferTensors { q, k, v, mask, sinks, alibi_slopes, out, lse } = *self;
        [Some(q), Some(k), Some(v), mask, sinks, alibi_slopes, Some(out), lse]
    }

    /// These tensors as views of `device`, for [`Spec::builder`](rapt_core::Spec::builder) and its like: what they reach is checked.
    ///
    /// # Errors
    /// [`Error::OutOfExtent`] for a tensor that leaves its buffer; [`Error::Unaligned`], [`Error::Overflow`], [`Error::Rank`].
    pub fn views(&self, device: Device) -> Result<Tensors<'a>> {
        let mut buffers: Vec<&wgpu::Buffer> = Vec::new();
        let mut place = |tensor: &BufferTensor<'a>| {
            let number = buffers.iter().position(|buffer| *buffer == tensor.buffer).unwrap_or_else(|| {
                buffers.push(tensor.buffer);
                buffers.len() - 1
            });
            (number + 1) << OFFSET_BITS
        };
        let parts = |name: &'static str, tensor: &BufferTensor<'a>, begin: usize| {
            let BufferTensor { buffer, offset_bytes, shape, strides, .. } = *tensor;
            let overflow = Error::Overflow { tensor: name, shape, strides };
            let most = 1u64 << OFFSET_BITS;
            let is_inside = offset_bytes < most && buffer.size() < most;
            let at = usize::try_from(offset_bytes).ok().filter(|_| is_inside).ok_or(overflow)?;
            Ok::<_, Error>((begin + at, Extent::Proven { address: begin, len_bytes: buffer.size() as usize }))
        };
        let mut view = |name: &'static str, tensor: &BufferTensor<'a>| {
            let (address, extent) = parts(name, tensor, place(tensor))?;
            let ptr = std::ptr::without_provenance(address);
            // SAFETY: the extent is that of a buffer which the caller borrows for 'a; its memory belongs to `device`, so that nothing on the
            // host reads it by way of this view.
            unsafe { View::from_raw_parts(name, ptr, tensor.dtype, tensor.shape, tensor.strides, device, extent) }
        };
        let optional =
            |view: &mut dyn FnMut(&'static str, &BufferTensor<'a>) -> Result<View<'a>>, name, tensor: &Option<_>| {
                tensor.as_ref().map(|tensor| view(name, tensor)).transpose()
            };
        let (q, k, v) = (view("q", &self.q)?, view("k", &self.k)?, view("v", &self.v)?);
        let mask = optional(&mut view, "mask", &self.mask)?;
        let sinks = optional(&mut view, "sinks", &self.sinks)?;
        let alibi_slopes = optional(&mut view, "alibi_slopes", &self.alibi_slopes)?;
        let mut view_mut = |name: &'static str, tensor: &BufferTensor<'a>| {
            let (address, extent) = parts(name, tensor, place(tensor))?;
            let ptr = std::ptr::without_provenance_mut(address);
            // SAFETY: as of what is read; the device alone writes it, in the order of the queue.
            unsafe { ViewMut::from_raw_parts(name, ptr, tensor.dtype, tensor.shape, tensor.strides, device, extent) }
        };
        let out = view_mut("out", &self.out)?;
        let lse = self.lse.as_ref().map(|lse| view_mut("lse", lse)).transpose()?;
        Ok(Tensors { mask, sinks, alibi_slopes, lse, ..Tensors::new(q, k, v, out) })
    }
}
