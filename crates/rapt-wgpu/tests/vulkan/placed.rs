//! Host tensors of the testkit in buffers: the whole of each tensor's memory, with its strides, its offset modulo 64 and bands of a pattern around
//! it, which are read back.

use rapt_core::{Error, Extent, Kernel, Operands, Plan, Result, Spec, Tensors, View};
use rapt_testkit::PATTERN;
use rapt_wgpu::wgpu::{self, BufferUsages};
use rapt_wgpu::{BufferTensor, BufferTensors, Gpu};

use crate::common::read;

const BAND_BYTES: usize = 512;

/// A tensor's memory in a buffer.
struct Placed {
    name: &'static str,
    buffer: wgpu::Buffer,
    /// What was put there, bands included, and where the tensor's memory begins in it.
    bytes: Vec<u8>,
    begin: usize,
    tensor: (u64, rapt_core::DType, rapt_core::Shape, rapt_core::Strides),
}

impl Placed {
    fn new(gpu: &Gpu, name: &'static str, view: &View<'_>) -> Self {
        let Extent::Proven { address, len_bytes } = view.extent() else { panic!("{name} has an extent") };
        let begin = BAND_BYTES + address % 64;
        let mut bytes = vec![PATTERN; (begin + len_bytes + BAND_BYTES).next_multiple_of(4)];
        // SAFETY: the whole of a proven extent is readable.
        let memory = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len_bytes) };
        bytes[begin..begin + len_bytes].copy_from_slice(memory);
        let (device, queue) = gpu.wgpu();
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
        let size = bytes.len() as u64;
        let buffer =
            device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false });
        queue.write_buffer(&buffer, 0, &bytes);
        let offset = (begin + view.address().wrapping_sub(address)) as u64;
        // A tensor without elements may point anywhere.
        let offset = if view.shape().contains(&0) { begin as u64 } else { offset };
        Placed { name, buffer, bytes, begin, tensor: (offset, view.dtype(), *view.shape(), *view.strides()) }
    }

    fn tensor(&self) -> BufferTensor<'_> {
        let (offset_bytes, dtype, shape, strides) = self.tensor;
        BufferTensor { buffer: &self.buffer, offset_bytes, dtype, shape, strides }
    }
}

/// Runs a request of host tensors in buffers and brings the outputs' memory back, whole. Panics if a byte of an input or a band has changed.
fn in_buffers(gpu: &Gpu, kernel: Option<Kernel>, spec: &Spec, tensors: Tensors<'_>) -> Result<Plan> {
    let mut on_gpu = spec.clone();
    on_gpu.device = gpu.device();
    let plan = kernel.map_or_else(|| gpu.plan(&on_gpu), |kernel| gpu.plan_kernel(&on_gpu, kernel))?;
    // Checked as the tensors of the host that they are.
    let mut operands = Operands::check(tensors, spec)?;
    let outputs = (operands.out_ptr(), operands.lse_ptr());
    let tensors = operands.tensors();
    let place = |name, view: &View<'_>| Placed::new(gpu, name, view);
    let optional = |name, view: &Option<View<'_>>| view.as_ref().map(|view| place(name, view));
    let (q, k, v) = (place("q", &tensors.q), place("k", &tensors.k), place("v", &tensors.v));
    let mask = optional("mask", &tensors.mask);
    let (sinks, slopes) = (optional("sinks", &tensors.sinks), optional("alibi_slopes", &tensors.alibi_slopes));
    let out = place("out", &tensors.out.as_view());
    let lse = tensors.lse.as_ref().map(|lse| place("lse", &lse.as_view()));
    fn tensor(placed: &Option<Placed>) -> Option<BufferTensor<'_>> {
        placed.as_ref().map(Placed::tensor)
    }
    let in_buffers = BufferTensors {
        mask: tensor(&mask),
        sinks: tensor(&sinks),
        alibi_slopes: tensor(&slopes),
        lse: tensor(&lse),
        ..BufferTensors::new(q.tensor(), k.tensor(), v.tensor(), out.tensor())
    };
    gpu.run(&plan, &in_buffers)?;
    let all: Vec<&Placed> =
        [Some(&q), Some(&k), Some(&v), mask.as_ref(), sinks.as_ref(), slopes.as_ref(), Some(&out), lse.as_ref()]
            .into_iter()
            .flatten()
            .collect();
    let now = read(gpu, &all.iter().map(|placed| &placed.buffer).collect::<Vec<_>>());
    for (placed, now) in all.iter().zip(&now) {
        let Placed { name, bytes, begin, .. } = placed;
        let (address, len) = match (*name, outputs) {
            ("out", _) => extent_of(&tensors.out.as_view()),
            ("lse", _) => extent_of(&tensors.lse.as_ref().expect("lse").as_view()),
            _ => (0, 0),
        };
        let after = *begin + len;
        assert!(
            bytes[..*begin] == now[..*begin] && bytes[after..] == now[after..],
            "{name}: a byte of it or beside it changed"
        );
        if len > 0 {
            // SAFETY: the extent is that of an output, which nobody else reads or writes meanwhile.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    now[*begin..after].as_ptr(),
                    std::ptr::with_exposed_provenance_mut(address),
                    len,
                );
            }
        }
    }
    Ok(plan)
}

fn extent_of(view: &View<'_>) -> (usize, usize) {
    let Extent::Proven { address, len_bytes } = view.extent() else { panic!("an output has an extent") };
    (address, len_bytes)
}

/// The engine of [`in_buffers`], with one kernel for all or those that `select` chooses.
pub(crate) fn engine(gpu: &Gpu, kernel: Option<Kernel>) -> impl FnMut(&Spec, Tensors<'_>) -> Result<(), Error> + '_ {
    move |spec, tensors| in_buffers(gpu, kernel, spec, tensors).map(drop)
}

/// The engine that copies tensors of the host.
pub(crate) fn host_engine(gpu: &Gpu) -> impl FnMut(&Spec, Tensors<'_>) -> Result<(), Error> + '_ {
    |spec, tensors| {
        let plan = gpu.plan_host(spec)?;
        gpu.run_host(&plan, &mut Operands::check(tensors, spec)?)
    }
}
