//! A launch plan on tensors in buffers: what is bound, and the dispatches, window by window.

use std::num::NonZeroU64;

use rapt_core::{Error, LaunchPlan, Operands, Result, Spec};
use rapt_shader::{BINDINGS, KernelVariant, PARTIALS, Params, ShaderLaunch, Window};

use crate::buffers::{BufferTensor, BufferTensors};
use crate::device::{Open, Pipeline, params_stride};
use crate::error::GpuError;

/// One window bound: of each tensor the buffer, its first byte and its length.
struct Bound<'a> {
    buffers: Vec<wgpu::BufferBinding<'a>>,
    params: Params,
    /// Workgroups of the kernel, and of the one that folds what it leaves.
    groups: [(u32, u32); 2],
}

/// The bytes of `tensor` that a window binds, and where its element 0 lies, in elements from the first of them.
///
/// # Errors
/// [`Error::Unsupported`] where the last element's word is not wholly in the buffer.
fn bind<'a>(
    name: &'static str,
    tensor: &BufferTensor<'a>,
    reach: rapt_shader::Range,
    alignment: u64,
) -> Result<(wgpu::BufferBinding<'a>, i64)> {
    // A tensor lies in its buffer: neither sum leaves it.
    let origin = tensor.offset_bytes.cast_signed();
    let (lo, hi) = ((origin + reach.lo).cast_unsigned(), (origin + reach.hi).cast_unsigned());
    let begin = lo / alignment * alignment;
    let end = hi.next_multiple_of(4);
    if end > tensor.buffer.size() {
        let what = format!("{name} at the end of a buffer of {} bytes", tensor.buffer.size());
        return Err(Error::unsupported(
            what,
            "words of 4 bytes are bound",
            "make the buffer a multiple of 4 bytes long",
        ));
    }
    let size = NonZeroU64::new(end - begin);
    let first = (origin - begin.cast_signed()) / tensor.dtype.size_bytes() as i64;
    Ok((wgpu::BufferBinding { buffer: tensor.buffer, offset: begin, size }, first))
}

fn bound<'a>(
    open: &'a Open,
    spec: &Spec,
    launch: &ShaderLaunch,
    window: &Window,
    tensors: &BufferTensors<'a>,
) -> Result<Bound<'a>> {
    let limits = open.device.limits();
    let alignment = u64::from(limits.min_storage_buffer_offset_alignment);
    let mut first = [0; 8];
    let mut buffers = Vec::with_capacity(BINDINGS.len());
    let [unused, unused_out, unused_lse] = &open.unused;
    for ((binding, tensor), at) in BINDINGS.iter().zip(tensors.bound()).zip(0..) {
        let reached = tensor.as_ref().zip(window.reach[at]);
        buffers.push(match reached {
            Some((tensor, reach)) => {
                let (bound, first_element) = bind(binding.tensor, tensor, reach, alignment)?;
                first[at] = first_element;
                bound
            }
            None => {
                let buffer = match binding.tensor {
                    "out" => unused_out,
                    "lse" => unused_lse,
                    _ => unused,
                };
                wgpu::BufferBinding { buffer, offset: 0, size: None }
            }
        });
    }
    let most = limits.max_compute_workgroups_per_dimension as usize;
    let groups = [launch.items_of(window), launch.combine_items_of(window)]
        .map(|items| (items.min(most) as u32, items.div_ceil(most) as u32));
    Ok(Bound { buffers, params: Params::new(spec, launch, window, first), groups })
}

/// That every buffer may be bound, and what is written lies in a buffer of its own: a device takes no buffer to read and to write at once.
fn check_buffers(tensors: &BufferTensors<'_>) -> Result<()> {
    let bound = tensors.bound();
    let named = || BINDINGS.iter().zip(&bound).filter_map(|(binding, tensor)| Some((binding, tensor.as_ref()?)));
    for (at, (binding, tensor)) in named().enumerate() {
        if !tensor.buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            let what = format!("a buffer of {} without usage STORAGE", binding.tensor);
            return Err(Error::unsupported(what, "kernels bind storage", "create it with BufferUsages::STORAGE"));
        }
        let mut others = named().enumerate().filter(|(other, _)| *other != at);
        if let Some((_, (other, _))) = others.find(|(_, (_, of))| binding.is_output && of.buffer == tensor.buffer) {
            let what = format!("{} in the buffer of {}", binding.tensor, other.tensor);
            let why = "a dispatch takes no buffer to read and to write";
            return Err(Error::unsupported(what, why, "give it a buffer of its own"));
        }
    }
    Ok(())
}

/// Two places of a query set, where the device writes when a launch begins and ends.
pub(crate) struct Timer<'a> {
    pub(crate) set: &'a wgpu::QuerySet,
    pub(crate) first: u32,
}

impl Timer<'_> {
    pub(crate) fn writes(&self) -> wgpu::ComputePassTimestampWrites<'_> {
        wgpu::ComputePassTimestampWrites {
            query_set: self.set,
            beginning_of_pass_write_index: Some(self.first),
            end_of_pass_write_index: Some(self.first + 1),
        }
    }
}

/// Submits `launch` on tensors that were proven to be those of its spec. Waits for nothing.
///
/// # Errors
/// [`Error::Unsupported`] for buffers that cannot be bound; those of the device.
pub(crate) fn submit(
    open: &Open,
    launch: &ShaderLaunch,
    proven: &Operands<'_>,
    spec: &Spec,
    tensors: &BufferTensors<'_>,
    timer: Option<&Timer<'_>>,
) -> Result<()> {
    proven.expect(spec)?;
    let Some(variant) = &launch.variant else { return Ok(()) };
    check_buffers(tensors)?;
    let on = |error: GpuError| error.on(spec.device);
    let kernels = std::iter::once(variant).chain(&launch.combine);
    let kernels: Vec<(&KernelVariant, Pipeline)> = kernels
        .map(|kernel| Ok((kernel, open.pipeline(kernel)?)))
        .collect::<std::result::Result<_, _>>()
        .map_err(on)?;
    let workspace_bytes = launch.workspace_bytes();
    let workspace = (workspace_bytes > 0).then(|| open.workspace(workspace_bytes)).transpose().map_err(on)?;
    let windows: Vec<Bound<'_>> =
        launch.windows.iter().map(|window| bound(open, spec, launch, window, tensors)).collect::<Result<_>>()?;
    let stride = params_stride(&open.device);
    let mut bytes = vec![0; stride * windows.len()];
    for (window, place) in windows.iter().zip(bytes.chunks_mut(stride)) {
        place[..Params::BYTES].copy_from_slice(&window.params.bytes());
    }
    let params = open.buffer(bytes.len(), wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST).map_err(on)?;
    let calls = || {
        open.queue.write_buffer(&params, 0, &bytes);
        let mut encoder = open.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("rapt") });
        {
            let timestamp_writes = timer.map(Timer::writes);
            let descriptor = wgpu::ComputePassDescriptor { label: Some("rapt"), timestamp_writes };
            let mut pass = encoder.begin_compute_pass(&descriptor);
            // wgpu orders what one dispatch writes before another that reads it.
            for (at, window) in windows.iter().enumerate() {
                let of_params =
                    wgpu::BufferBinding { buffer: &params, offset: (at * stride) as u64, size: PARAMS_SIZE };
                for ((kernel, compiled), groups) in kernels.iter().zip(window.groups) {
                    let group = group(open, compiled, kernel, of_params.clone(), window, workspace.as_ref());
                    pass.set_pipeline(&compiled.pipeline);
                    pass.set_bind_group(0, &group, &[]);
                    pass.dispatch_workgroups(groups.0, groups.1, 1);
                }
            }
        }
        open.queue.submit([encoder.finish()])
    };
    open.guarded("submit", bytes.len(), calls).map(drop).map_err(on)
}

const PARAMS_SIZE: Option<NonZeroU64> = NonZeroU64::new(Params::BYTES as u64);

/// What `kernel` binds of a window.
fn group(
    open: &Open,
    compiled: &Pipeline,
    kernel: &KernelVariant,
    params: wgpu::BufferBinding<'_>,
    window: &Bound<'_>,
    workspace: Option<&wgpu::Buffer>,
) -> wgpu::BindGroup {
    let tensors = BINDINGS.iter().zip(&window.buffers).map(|(binding, buffer)| (binding.index, buffer.clone()));
    let partials = workspace.map(|buffer| (PARTIALS, wgpu::BufferBinding { buffer, offset: 0, size: None }));
    let is_bound = |index: u32| kernel.bindings().iter().any(|binding| binding.index == index);
    let entries: Vec<wgpu::BindGroupEntry<'_>> = std::iter::once((0, params))
        .chain(tensors.chain(partials).filter(|(index, _)| is_bound(*index)))
        .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: wgpu::BindingResource::Buffer(buffer) })
        .collect();
    let descriptor = wgpu::BindGroupDescriptor { label: Some("rapt"), layout: &compiled.layout, entries: &entries };
    open.device.create_bind_group(&descriptor)
}
