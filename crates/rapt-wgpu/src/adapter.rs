//! Adapters: what there is, what each offers, and what it lacks.

use rapt_core::Arch;
use rapt_shader::{Caps, MatrixUnits};
use wgpu::{Features, Limits};

use crate::error::{GpuError, Result};

/// What an adapter is, for reports and for selection.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterFacts {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its driver and the driver's version.
    pub driver: String,
    /// `discrete`, `integrated`, `virtual`, `cpu` or `other`.
    pub kind: &'static str,
    /// Threads of a subgroup: least and most.
    pub subgroups: (u32, u32),
    /// What selection depends on.
    pub caps: Caps,
    /// Whether its driver says what it compiled, so that it is kept on disk.
    pub keeps_kernels: bool,
    /// What kernels could use and this adapter does not have.
    pub lacks: Vec<&'static str>,
    /// What the kernels need and this adapter does not have; such a device is not opened.
    pub missing: Option<String>,
}

/// Features that are used where they are there, by what they are for.
const OPTIONAL: [(Features, &str); 4] = [
    (Features::SHADER_I16, "16-bit stores (two atomic operations stand in)"),
    (Features::SHADER_F16, "16-bit arithmetic"),
    (Features::SUBGROUP, "subgroup operations"),
    (Features::EXPERIMENTAL_COOPERATIVE_MATRIX, "cooperative matrices"),
];

/// What every WebGPU device has, and the kernels need.
fn missing(limits: &Limits) -> Option<String> {
    let needed = [
        ("threads of a workgroup", limits.max_compute_invocations_per_workgroup, 256),
        ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, 16_384),
        ("storage buffers of a stage", limits.max_storage_buffers_per_shader_stage, 9),
    ];
    let lacking = needed.into_iter().find(|(_, has, needed)| has < needed);
    lacking.map(|(what, has, needed)| format!("{needed} {what} (it has {has})"))
}

impl AdapterFacts {
    fn new(index: usize, adapter: &wgpu::Adapter) -> Self {
        let (info, features, limits) = (adapter.get_info(), adapter.features(), adapter.limits());
        let kind = match info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::VirtualGpu => "virtual",
            wgpu::DeviceType::Cpu => "cpu",
            wgpu::DeviceType::Other => "other",
        };
        let lacks = OPTIONAL.iter().filter(|(feature, _)| !features.contains(*feature)).map(|(_, what)| *what);
        let caps = Caps { matrices: matrices(adapter, features, &info), ..caps(features, &limits, &info) };
        AdapterFacts {
            index: u32::try_from(index).unwrap_or(u32::MAX),
            name: info.name,
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
            kind,
            subgroups: (info.subgroup_min_size, info.subgroup_max_size),
            caps,
            keeps_kernels: features.contains(Features::PIPELINE_CACHE),
            lacks: lacks.collect(),
            missing: missing(&limits),
        }
    }
}

/// What matrices need.
const OF_MATRICES: Features =
    Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(Features::SHADER_F16).union(Features::SUBGROUP);

/// Its matrices of float16 that sum in float32, the larger ones; `None` where threads of a subgroup vary, by which a text shares them, and by way of Metal, for which
/// naga 30 writes no valid text of matrices (rapt-metal has its own).
fn matrices(adapter: &wgpu::Adapter, features: Features, info: &wgpu::AdapterInfo) -> Option<MatrixUnits> {
    let subgroup_threads = info.subgroup_min_size as usize;
    let is_metal = info.backend == wgpu::Backend::Metal;
    if is_metal || !features.contains(OF_MATRICES) || info.subgroup_min_size != info.subgroup_max_size {
        return None;
    }
    let all = adapter.cooperative_matrix_properties();
    let is_served = |tile: &usize| {
        let tile = *tile as u32;
        all.iter().any(|of| {
            (of.m_size, of.n_size, of.k_size) == (tile, tile, tile)
                && of.ab_type == wgpu::CooperativeScalarType::F16
                && of.cr_type == wgpu::CooperativeScalarType::F32
                && !of.saturating_accumulation
        })
    };
    [16, 8].into_iter().find(is_served).map(|tile| MatrixUnits { tile, subgroup_threads, has_floats: false })
}

/// What selection depends on, of a device or an adapter, but for its matrices.
pub(crate) fn caps(features: Features, limits: &Limits, info: &wgpu::AdapterInfo) -> Caps {
    let is_processor = info.device_type == wgpu::DeviceType::Cpu;
    let of_dimension = limits.max_compute_workgroups_per_dimension as usize;
    Caps {
        arch: Arch::Wgsl,
        has_16_bit_stores: features.contains(Features::SHADER_I16),
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        offset_alignment: limits.min_storage_buffer_offset_alignment,
        max_items: of_dimension.saturating_mul(of_dimension),
        max_threads: limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x) as usize,
        max_shared_bytes: limits.max_compute_workgroup_storage_size as usize,
        few_blocks: if is_processor { 0 } else { Caps::WEBGPU.few_blocks },
        has_lanes: is_processor
            && features.contains(Features::SUBGROUP)
            && (info.subgroup_min_size, info.subgroup_max_size) == (8, 8),
        matrices: None,
    }
}

fn enumerate() -> Vec<wgpu::Adapter> {
    let descriptor = wgpu::InstanceDescriptor {
        backends: wgpu::Backends::VULKAN,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    };
    pollster::block_on(wgpu::Instance::new(descriptor).enumerate_adapters(wgpu::Backends::VULKAN))
}

/// Every adapter that Vulkan shows, in the order that it has them; none where there is no libvulkan.
#[must_use]
pub fn adapters() -> Vec<AdapterFacts> {
    enumerate().iter().enumerate().map(|(index, adapter)| AdapterFacts::new(index, adapter)).collect()
}

/// The adapter of this index, which has what the kernels need.
///
/// # Errors
/// [`GpuError::NoAdapter`], [`GpuError::Missing`].
pub(crate) fn adapter(index: u32) -> Result<(wgpu::Adapter, AdapterFacts)> {
    let mut all = enumerate();
    let count = all.len();
    let at = usize::try_from(index).ok().filter(|at| *at < count).ok_or(GpuError::NoAdapter { index, count })?;
    let adapter = all.swap_remove(at);
    let facts = AdapterFacts::new(at, &adapter);
    match &facts.missing {
        Some(what) => Err(GpuError::Missing { adapter: facts.name, what: what.clone() }),
        None => Ok((adapter, facts)),
    }
}

/// The features that a device is opened with: those of `OPTIONAL` that texts use today.
pub(crate) fn features_used(adapter: &wgpu::Adapter) -> Features {
    adapter.features() & (Features::SHADER_I16 | Features::PIPELINE_CACHE | Features::TIMESTAMP_QUERY | OF_MATRICES)
}
