//! Metal's own objects: the caller's device, queue and buffers. Compiled for macOS by the tests, and never run.

use std::ffi::c_void;
use std::ptr::NonNull;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue, MTLComputeCommandEncoder, MTLComputePipelineState,
    MTLDevice, MTLLibrary, MTLResourceOptions, MTLSize,
};

use crate::buffers::{Buffer, BufferDispatch, Metal};
use crate::error::MetalError;

/// An `MTLBuffer`.
pub type MetalBuffer = Retained<ProtocolObject<dyn MTLBuffer>>;

impl Buffer for MetalBuffer {
    fn len_bytes(&self) -> usize {
        self.length()
    }
    fn is(&self, other: &Self) -> bool {
        std::ptr::eq(Retained::as_ptr(self), Retained::as_ptr(other))
    }
}

/// The caller's queue, and its device.
#[derive(Clone, Debug)]
pub struct MetalQueue {
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    device: Retained<ProtocolObject<dyn MTLDevice>>,
}

impl MetalQueue {
    /// Of this queue.
    #[must_use]
    pub fn new(queue: Retained<ProtocolObject<dyn MTLCommandQueue>>) -> Self {
        let device = queue.device();
        MetalQueue { queue, device }
    }

    /// Of a queue that C has, which is retained; `None` for NULL.
    ///
    /// # Safety
    /// `queue` is an `id<MTLCommandQueue>`, or NULL.
    #[must_use]
    pub unsafe fn from_raw(queue: *mut c_void) -> Option<Self> {
        // SAFETY: the caller's word.
        unsafe { Retained::retain(queue.cast()) }.map(Self::new)
    }

    /// A buffer that C has, which is retained; `None` for NULL.
    ///
    /// # Safety
    /// `buffer` is an `id<MTLBuffer>`, or NULL.
    #[must_use]
    pub unsafe fn buffer_from_raw(buffer: *mut c_void) -> Option<MetalBuffer> {
        // SAFETY: the caller's word.
        unsafe { Retained::retain(buffer.cast()) }
    }
}

fn failed(call: &'static str, error: &NSError) -> MetalError {
    MetalError::Failed { call, why: error.localizedDescription().to_string() }
}

fn none(call: &'static str) -> MetalError {
    MetalError::Failed { call, why: "Metal gave none".to_owned() }
}

impl Metal for MetalQueue {
    type Buffer = MetalBuffer;
    type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

    fn compile(&self, text: &str, name: &str) -> Result<Self::Pipeline, MetalError> {
        let library = self.device.newLibraryWithSource_options_error(&NSString::from_str(text), None);
        let library = library.map_err(|error| failed("newLibraryWithSource", &error))?;
        let function =
            library.newFunctionWithName(&NSString::from_str(name)).ok_or_else(|| none("newFunctionWithName"))?;
        let pipeline = self.device.newComputePipelineStateWithFunction_error(&function);
        pipeline.map_err(|error| failed("newComputePipelineStateWithFunction", &error))
    }

    fn buffer(&self, bytes: usize) -> Result<Self::Buffer, MetalError> {
        let made = self.device.newBufferWithLength_options(bytes, MTLResourceOptions::StorageModePrivate);
        made.ok_or_else(|| none("newBufferWithLength"))
    }

    fn submit(&self, dispatches: &[BufferDispatch<Self>]) -> Result<(), MetalError> {
        let commands = self.queue.commandBuffer().ok_or_else(|| none("commandBuffer"))?;
        // One encoder, whose dispatches run in turn.
        let encoder = commands.computeCommandEncoder().ok_or_else(|| none("computeCommandEncoder"))?;
        for BufferDispatch { pipeline, params, bound, groups, threads } in dispatches {
            encoder.setComputePipelineState(pipeline);
            let bytes = NonNull::from(params.as_slice()).cast::<c_void>();
            // SAFETY: that many bytes, which are copied, into slot 0 of 31.
            unsafe { encoder.setBytes_length_atIndex(bytes, params.len(), 0) };
            for (slot, buffer, begin) in bound {
                // SAFETY: the slots of a variant are below 31, and the window's first byte is in its buffer: `views` proved what it reaches.
                unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), *begin, *slot as usize) };
            }
            let size = |width, height| MTLSize { width, height, depth: 1 };
            encoder.dispatchThreadgroups_threadsPerThreadgroup(size(groups[0], groups[1]), size(*threads, 1));
        }
        encoder.endEncoding();
        commands.commit();
        Ok(())
    }
}
