//! Tensors in the caller's buffers, as views: the boundary that host memory has, in a space of addresses of this backend.
//!
//! ```text
//! address = (1 + number of the buffer among the operands) · 2^48 + byte in the buffer
//! ```
//! So a view that leaves its buffer is refused, and what overlaps is found, by the checks of rapt-core. No address is ever read.

use std::sync::{Mutex, PoisonError};

use rapt_core::{
    DType, Device, Error, Extent, Operands, Plan, Result as CoreResult, Shape, Spec, Strides, Tensors, View, ViewMut,
};
use rapt_shader::{Caps, KernelVariant, ShaderLaunch, select};
use rustc_hash::FxHashMap;

use crate::error::{MetalError, Result};
use crate::launch::{self, Encoder};

/// The bits of an address that count bytes of a buffer.
const OFFSET_BITS: u32 = 48;

/// A buffer of Metal's, as far as its bytes are concerned: an `MTLBuffer`, or what stands for one.
pub trait Buffer: Clone {
    /// Its length.
    fn len_bytes(&self) -> usize;
    /// Whether both are one.
    fn is(&self, other: &Self) -> bool;
}

/// A device of Metal's and a queue of it, the caller's; or what stands for them.
pub trait Metal {
    /// Its buffers.
    type Buffer: Buffer;
    /// Its compiled kernels.
    type Pipeline: Clone;
    /// Compiles the kernel `name` of `text`.
    ///
    /// # Errors
    /// [`MetalError::Failed`] with the compiler's words.
    fn compile(&self, text: &str, name: &str) -> std::result::Result<Self::Pipeline, MetalError>;
    /// A buffer for the GPU alone.
    ///
    /// # Errors
    /// [`MetalError::Failed`] where there is no memory.
    fn buffer(&self, bytes: usize) -> std::result::Result<Self::Buffer, MetalError>;
    /// Encodes these, one behind the other, behind all that the queue has, and waits for nothing.
    ///
    /// # Errors
    /// [`MetalError::Failed`].
    fn submit(&self, dispatches: &[BufferDispatch<Self>]) -> std::result::Result<(), MetalError>;
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct BufferDispatch<M: Metal + ?Sized> {
    /// The kernel.
    pub pipeline: M::Pipeline,
    /// The bytes of slot 0.
    pub params: Vec<u8>,
    /// Of the other slots the buffer, and where in it they begin.
    pub bound: Vec<(u32, M::Buffer, usize)>,
    /// Workgroups.
    pub groups: [usize; 2],
    /// Threads of each.
    pub threads: usize,
}

/// A tensor in a buffer.
#[derive(Clone, Debug)]
pub struct BufferTensor<B> {
    /// The buffer.
    pub buffer: B,
    /// Where element 0 lies, in bytes.
    pub offset_bytes: usize,
    /// The dtype of the elements.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Shape,
    /// Strides in elements, of any sign.
    pub strides: Strides,
}

/// The tensors of one run. Shapes are those of [`Tensors`].
#[derive(Clone, Debug)]
pub struct BufferTensors<B> {
    /// Queries.
    pub q: BufferTensor<B>,
    /// Keys.
    pub k: BufferTensor<B>,
    /// Values.
    pub v: BufferTensor<B>,
    /// Boolean or additive mask.
    pub mask: Option<BufferTensor<B>>,
    /// One more logit per head.
    pub sinks: Option<BufferTensor<B>>,
    /// ALiBi slopes.
    pub alibi_slopes: Option<BufferTensor<B>>,
    /// Where the result goes.
    pub out: BufferTensor<B>,
    /// Where the log of the sum of exponentials goes.
    pub lse: Option<BufferTensor<B>>,
}

impl<B: Buffer> BufferTensors<B> {
    /// Numbers that attend without mask, sinks, slopes and lse.
    #[must_use]
    pub fn new(q: BufferTensor<B>, k: BufferTensor<B>, v: BufferTensor<B>, out: BufferTensor<B>) -> Self {
        BufferTensors { q, k, v, mask: None, sinks: None, alibi_slopes: None, out, lse: None }
    }

    /// The buffers, each once.
    fn buffers(&self) -> Vec<B> {
        let BufferTensors { q, k, v, mask, sinks, alibi_slopes, out, lse } = self;
        let optional = [mask, sinks, alibi_slopes, lse].into_iter().flatten();
        let mut buffers: Vec<B> = Vec::new();
        for tensor in [q, k, v, out].into_iter().chain(optional) {
            if !buffers.iter().any(|buffer| buffer.is(&tensor.buffer)) {
                buffers.push(tensor.buffer.clone());
            }
        }
        buffers
    }

    /// These tensors as views of `device`, for [`Spec::builder`](rapt_core::Spec::builder) and its like: what they reach is checked.
    ///
    /// # Errors
    /// [`Error::OutOfExtent`] for a tensor that leaves its buffer; [`Error::Unaligned`], [`Error::Overflow`], [`Error::Rank`].
    pub fn views(&self, device: Device) -> CoreResult<Tensors<'_>> {
        let buffers = self.buffers();
        let place = |name: &'static str, tensor: &BufferTensor<B>| {
            let BufferTensor { buffer, offset_bytes, shape, strides, .. } = tensor;
            let number = buffers.iter().position(|known| known.is(buffer)).unwrap_or(buffers.len());
            let begin = (number + 1) << OFFSET_BITS;
            match (offset_bytes >> OFFSET_BITS, buffer.len_bytes() >> OFFSET_BITS) {
                (0, 0) => Ok((begin + offset_bytes, Extent::Proven { address: begin, len_bytes: buffer.len_bytes() })),
                _ => Err(Error::Overflow { tensor: name, shape: *shape, strides: *strides }),
            }
        };
        let view = |name: &'static str, tensor: &BufferTensor<B>| {
            let (address, extent) = place(name, tensor)?;
            let ptr = std::ptr::without_provenance(address);
            // SAFETY: the extent is that of a buffer which is borrowed; its memory belongs to `device`, so that nothing on the host reads it by way of
            // this view.
            unsafe { View::from_raw_parts(name, ptr, tensor.dtype, tensor.shape, tensor.strides, device, extent) }
        };
        let maybe =
            |name, tensor: &Option<BufferTensor<B>>| tensor.as_ref().map(|tensor| view(name, tensor)).transpose();
        let view_mut = |name: &'static str, tensor: &BufferTensor<B>| {
            let (address, extent) = place(name, tensor)?;
            let ptr = std::ptr::without_provenance_mut(address);
            // SAFETY: as of what is read; the device alone writes it, in the order of its queue.
            unsafe { ViewMut::from_raw_parts(name, ptr, tensor.dtype, tensor.shape, tensor.strides, device, extent) }
        };
        Ok(Tensors {
            mask: maybe("mask", &self.mask)?,
            sinks: maybe("sinks", &self.sinks)?,
            alibi_slopes: maybe("alibi_slopes", &self.alibi_slopes)?,
            lse: self.lse.as_ref().map(|lse| view_mut("lse", lse)).transpose()?,
            ..Tensors::new(view("q", &self.q)?, view("k", &self.k)?, view("v", &self.v)?, view_mut("out", &self.out)?)
        })
    }
}

/// Where the tensors of buffers are: Metal, by DLPack's number.
const DEVICE: Device = Device::Other { dlpack_code: 8, index: 0 };

/// Attention on tensors in buffers of a device of Metal's. Every method may be called from several threads at once where `M` may.
#[derive(Debug)]
pub struct Buffers<M: Metal> {
    metal: M,
    kernels: Mutex<FxHashMap<KernelVariant, M::Pipeline>>,
}

impl<M: Metal> Buffers<M> {
    /// On this device, by this queue.
    #[must_use]
    pub fn new(metal: M) -> Self {
        Buffers { metal, kernels: Mutex::default() }
    }

    /// The device of the views that [`BufferTensors::views`] makes for it.
    #[must_use]
    pub const fn device(&self) -> Device {
        DEVICE
    }

    /// What runs for `spec`, its kernels compiled.
    ///
    /// # Errors
    /// As [`select`](rapt_shader::select()); [`Error::DeviceUnavailable`] for another device; [`Error::DeviceFailed`] where Metal's compiler refuses a text.
    pub fn plan(&self, spec: &Spec) -> CoreResult<Plan> {
        if spec.device != DEVICE {
            let why = "these buffers are of another device".to_owned();
            return Err(Error::DeviceUnavailable { device: spec.device, why });
        }
        let plan = select(spec, &Caps::METAL)?;
        let launch = plan.launch_plan::<ShaderLaunch>()?;
        for variant in launch.variant.iter().chain(&launch.combine) {
            self.kernel(variant).map_err(|error| error.on(DEVICE))?;
        }
        Ok(plan)
    }

    /// Submits `plan` on `tensors` and waits for nothing: what is submitted to the queue later comes after it.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] and others of [`Operands::check`]; [`Error::DeviceFailed`].
    pub fn run(&self, plan: &Plan, tensors: &BufferTensors<M::Buffer>) -> CoreResult<()> {
        let (launch, spec) = (plan.launch_plan::<ShaderLaunch>()?, plan.spec());
        let mut operands = Operands::check(tensors.views(DEVICE)?, spec)?;
        let mut run = Run { of: self, buffers: tensors.buffers(), dispatches: Vec::new() };
        let encoded = launch::encode(&mut run, launch, spec, &mut operands);
        encoded.and_then(|()| self.metal.submit(&run.dispatches)).map_err(|error| error.on(DEVICE))
    }

    /// The kernel of `variant`, compiled once.
    fn kernel(&self, variant: &KernelVariant) -> Result<M::Pipeline> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(variant) {
            return Ok(kernel.clone());
        }
        let kernel = self.metal.compile(&variant.msl(), variant.entry())?;
        kernels.insert(*variant, kernel.clone());
        Ok(kernel)
    }
}

/// The dispatches of one run.
struct Run<'a, M: Metal> {
    of: &'a Buffers<M>,
    buffers: Vec<M::Buffer>,
    dispatches: Vec<BufferDispatch<M>>,
}

impl<M: Metal> Encoder for Run<'_, M> {
    type Bound = (M::Buffer, usize);

    fn bind(&self, name: &'static str, address: usize, reach: (i64, i64), _: usize) -> Result<Self::Bound> {
        let buffer = (address >> OFFSET_BITS).checked_sub(1).and_then(|number| self.buffers.get(number));
        let begin = (address & ((1 << OFFSET_BITS) - 1)).checked_add_signed(reach.0 as isize);
        let (buffer, begin) = buffer.zip(begin).ok_or(MetalError::NotHeld { tensor: name })?;
        Ok((buffer.clone(), begin))
    }

    fn workspace(&self, bytes: usize) -> Result<Self::Bound> {
        Ok((self.of.metal.buffer(bytes)?, 0))
    }

    fn dispatch(&mut self, dispatch: launch::Dispatch<'_, Self::Bound>) -> Result<()> {
        let launch::Dispatch { variant, params, bound, groups } = dispatch;
        self.dispatches.push(BufferDispatch {
            pipeline: self.of.kernel(variant)?,
            params: params.to_vec(),
            bound: bound.iter().map(|(slot, (buffer, begin))| (*slot, buffer.clone(), *begin)).collect(),
            groups,
            threads: variant.threads(),
        });
        Ok(())
    }
}
