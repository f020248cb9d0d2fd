//! A launch plan on tensors in buffers: what is bound, and the dispatches, window by window.

use std::num::NonZeroU64;

use rapt_core::{LaunchPlan, Operands, Result, Spec};
use rapt_shader::{
    BINDINGS, Binding, BoundRange, BoundWindow, KernelVariant, PARTIALS, Params, Place, Places, ShaderLaunch,
    check_places,
};

use crate::buffers::{BufferTensor, BufferTensors};
use crate::device::{Open, Pipeline, params_stride};
use crate::error::GpuError;

/// One window with the buffers that it binds.
struct Bound<'a> {
    buffers: Vec<wgpu::BufferBinding<'a>>,
    window: BoundWindow,
}

/// Where each tensor lies: buffers by number.
fn places(tensors: &[Option<BufferTensor<'_>>; 8]) -> Places {
    let number = |of: &BufferTensor<'_>| {
        tensors.iter().position(|tensor| tensor.is_some_and(|tensor| tensor.buffer == of.buffer)).unwrap_or_default()
    };
    tensors.map(|tensor| {
        tensor.map(|tensor| Place {
            buffer: number(&tensor),
            buffer_bytes: tensor.buffer.size(),
            offset_bytes: tensor.offset_bytes,
            is_storage: tensor.buffer.usage().contains(wgpu::BufferUsages::STORAGE),
        })
    })
}

/// `window` with the buffers of `tensors`, and in the place of those that the request does not have, buffers of the engine.
fn bound<'a>(open: &'a Open, window: BoundWindow, tensors: &[Option<BufferTensor<'a>>; 8]) -> Bound<'a> {
    let [unused, unused_out, unused_lse] = &open.unused;
    let buffer = |((binding, tensor), range): ((&Binding, &Option<BufferTensor<'a>>), &Option<BoundRange>)| match tensor
        .zip(*range)
    {
        Some((tensor, BoundRange { offset_bytes, size_bytes })) => {
            wgpu::BufferBinding { buffer: tensor.buffer, offset: offset_bytes, size: NonZeroU64::new(size_bytes) }
        }
        None => {
            let buffer = match binding.tensor {
                "out" => unused_out,
                "lse" => unused_lse,
                _ => unused,
            };
            wgpu::BufferBinding { buffer, offset: 0, size: None }
        }
    };
    Bound { buffers: BINDINGS.iter().zip(tensors).zip(&window.ranges).map(buffer).collect(), window }
}

/// Two places of a query set, where the device writes when launches begin and end.
pub(crate) struct Timer<'a> {
    pub(crate) set: &'a wgpu::QuerySet,
    pub(crate) first: u32,
    /// How many launches, one behind another.
    pub(crate) launches: usize,
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
    if launch.variant.is_none() {
        return Ok(());
    }
    let tensors = tensors.bound();
    let places = places(&tensors);
    check_places(&places)?;
    let on = |error: GpuError| error.on(spec.device);
    let workspace_bytes = launch.workspace_bytes();
    let workspace = (workspace_bytes > 0).then(|| open.workspace(workspace_bytes)).transpose().map_err(on)?;
    let limits = open.device.limits();
    let alignment = u64::from(limits.min_storage_buffer_offset_alignment);
    let most_groups = limits.max_compute_workgroups_per_dimension as usize;
    let windows: Vec<Bound<'_>> = launch
        .windows
        .iter()
        .map(|window| Ok(bound(open, launch.bound(spec, window, &places, alignment, most_groups)?, &tensors)))
        .collect::<Result<_>>()?;
    let kernels: Vec<Vec<(&KernelVariant, Pipeline)>> = windows
        .iter()
        .map(|Bound { window, .. }| {
            let kernels = window.variant.iter().chain(&launch.combine);
            kernels.map(|kernel| Ok((kernel, open.pipeline(kernel)?))).collect::<std::result::Result<_, _>>()
        })
        .collect::<std::result::Result<_, _>>()
        .map_err(on)?;
    let stride = params_stride(&open.device);
    let mut bytes = vec![0; stride * windows.len()];
    for (window, place) in windows.iter().zip(bytes.chunks_mut(stride)) {
        place[..Params::BYTES].copy_from_slice(&window.window.params.bytes());
    }
    let params = open.buffer(bytes.len(), wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST).map_err(on)?;
    let calls = || {
        open.queue.write_buffer(&params, 0, &bytes);
        let mut encoder = open.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("rapt") });
        {
            let timestamp_writes = timer.map(Timer::writes);
            let descriptor = wgpu::ComputePassDescriptor { label: Some("rapt"), timestamp_writes };
            let mut pass = encoder.begin_compute_pass(&descriptor);
            // wgpu orders what one dispatch writes before another that reads or writes it.
            let launches = timer.map_or(1, |timer| timer.launches);
            for (at, window) in (0..launches).flat_map(|_| windows.iter().enumerate()) {
                let of_params =
                    wgpu::BufferBinding { buffer: &params, offset: (at * stride) as u64, size: PARAMS_SIZE };
                for ((kernel, compiled), groups) in kernels[at].iter().zip(window.window.groups) {
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
