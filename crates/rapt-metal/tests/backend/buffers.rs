//! Tensors in buffers, on a recorded fake of Metal's objects, which runs each dispatch as the fake of PyTorch does.

use std::cell::{Cell, RefCell};

use rapt_core::{DType, Device, Error, Extent, Kernel, Result, Shape, Spec, Strides, Tensors};
use rapt_metal::{Buffer, BufferDispatch, BufferTensor, BufferTensors, Buffers, Metal, MetalError};
use rapt_shader::{KernelVariant, PARTIALS, matrix_variants, variants};
use rapt_testkit::replay;

use crate::host::{self, Arithmetic, Bound};

/// An `MTLBuffer`: memory of this process.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Memory {
    address: usize,
    len_bytes: usize,
}

impl Buffer for Memory {
    fn len_bytes(&self) -> usize {
        self.len_bytes
    }
    fn is(&self, other: &Self) -> bool {
        self == other
    }
}

/// Slots with addresses, and workgroups.
type Dispatched = (Vec<(u32, usize)>, [usize; 2]);

/// A device and its queue.
#[derive(Debug, Default)]
struct Fake {
    compiled: Cell<usize>,
    dispatches: RefCell<Vec<Dispatched>>,
    workspaces: RefCell<Vec<Vec<u128>>>,
    /// A slot that is bound one byte of two late.
    late: Cell<Option<u32>>,
}

impl Metal for &Fake {
    type Buffer = Memory;
    type Pipeline = KernelVariant;

    fn compile(&self, text: &str, name: &str) -> std::result::Result<KernelVariant, MetalError> {
        assert_eq!(name, "attention");
        self.compiled.set(self.compiled.get() + 1);
        let is_named = |variant: &KernelVariant| text.contains(&format!("// {variant}\n"));
        let variant = variants().into_iter().chain(matrix_variants()).find(is_named).expect("a variant of rapt-shader");
        assert_eq!(variant.msl(), text);
        Ok(variant)
    }

    fn buffer(&self, bytes: usize) -> std::result::Result<Memory, MetalError> {
        let mut own = vec![u128::MAX; bytes / 16];
        let made = Memory { address: own.as_mut_ptr().expose_provenance(), len_bytes: bytes };
        self.workspaces.borrow_mut().push(own);
        Ok(made)
    }

    fn submit(&self, dispatches: &[BufferDispatch<Self>]) -> std::result::Result<(), MetalError> {
        for BufferDispatch { pipeline: variant, params, bound, groups, threads } in dispatches {
            assert_eq!(*threads, variant.threads());
            let places: Vec<(u32, usize)> =
                bound.iter().map(|(slot, buffer, begin)| (*slot, buffer.address + begin)).collect();
            self.dispatches.borrow_mut().push((places, *groups));
            let mut ranges: Vec<Bound> = Vec::new();
            for binding in variant.bindings() {
                let (_, buffer, begin) = bound.iter().find(|(slot, ..)| *slot == binding.index).expect("every slot");
                let begin = begin + if self.late.get() == Some(binding.index) { 2 } else { 0 };
                let at = std::ptr::with_exposed_provenance_mut::<u8>(buffer.address).wrapping_add(begin);
                // What stands for a tensor that the request does not have is neither read nor written.
                let is_another = ranges.iter().any(|range| range.begin == at) && binding.index != PARTIALS;
                let len_bytes = if is_another { 0 } else { buffer.len_bytes - begin };
                ranges.push(Bound {
                    index: binding.index,
                    name: binding.tensor,
                    begin: at,
                    len_bytes,
                    is_output: binding.is_output,
                });
            }
            let groups = (groups[0] as u32, groups[1] as u32);
            let text = variant.msl();
            let ran = host::compile(&text, variant, Arithmetic::Fast)
                .and_then(|program| program.run_bytes(*threads, groups, params, &ranges));
            ran.map_err(|why| MetalError::Failed { call: "dispatch", why })?;
        }
        Ok(())
    }
}

/// A tensor of the testkit in a buffer, which is its memory.
fn tensor(address: usize, dtype: DType, shape: Shape, strides: Strides, extent: Extent) -> BufferTensor<Memory> {
    let Extent::Proven { address: begin, len_bytes } = extent else { panic!("the testkit's extents are proven") };
    let buffer = Memory { address: begin, len_bytes };
    BufferTensor { buffer, offset_bytes: address.saturating_sub(begin), dtype, shape, strides }
}

macro_rules! of {
    ($view:expr) => {{
        let view = $view;
        tensor(view.address(), view.dtype(), *view.shape(), *view.strides(), view.extent())
    }};
}

fn run(buffers: &Buffers<&Fake>, spec: &Spec, tensors: &Tensors<'_>) -> Result<()> {
    let in_buffers = BufferTensors {
        mask: tensors.mask.as_ref().map(|mask| of!(mask)),
        sinks: tensors.sinks.as_ref().map(|sinks| of!(sinks)),
        alibi_slopes: tensors.alibi_slopes.as_ref().map(|slopes| of!(slopes)),
        lse: tensors.lse.as_ref().map(|lse| of!(lse)),
        ..BufferTensors::new(of!(&tensors.q), of!(&tensors.k), of!(&tensors.v), of!(&tensors.out))
    };
    let mut spec = spec.clone();
    spec.device = buffers.device();
    buffers.run(&buffers.plan(&spec)?, &in_buffers)
}

#[test]
fn tensors_in_buffers_conform() {
    if !host::has_compiler() {
        return;
    }
    let fake = Fake::default();
    let buffers = Buffers::new(&fake);
    let mut engine = |spec: &Spec, tensors: Tensors<'_>| run(&buffers, spec, &tensors);
    for seed in 0..8 {
        let case = crate::case(seed, Kernel::Decode, DType::BF16, None);
        replay(&mut engine, &case).unwrap_or_else(|failure| panic!("{failure}"));
    }
    replay(&mut engine, &crate::plain()).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_tensor_that_is_bound_late_is_found() {
    if !host::has_compiler() {
        return;
    }
    let case = crate::plain();
    for late in [1, 2, 3, 4, 7, 8] {
        let fake = Fake::default();
        fake.late.set(Some(late));
        let buffers = Buffers::new(&fake);
        let mut engine = |spec: &Spec, tensors: Tensors<'_>| run(&buffers, spec, &tensors);
        assert!(replay(&mut engine, &case).is_err(), "slot {late}");
    }
}

#[test]
fn what_leaves_its_buffer_overlaps_or_is_of_another_device_is_refused() {
    let fake = Fake::default();
    let buffers = Buffers::new(&fake);
    let memory = Memory { address: 0x1000, len_bytes: 4096 };
    let at = |offset_bytes| BufferTensor {
        buffer: memory,
        offset_bytes,
        dtype: DType::F32,
        shape: [1, 1, 4, 8].into(),
        strides: [32, 32, 8, 1].into(),
    };
    let refused = |out| {
        let tensors = BufferTensors::new(at(0), at(128), at(256), at(out));
        let views = tensors.views(buffers.device())?;
        let spec =
            Spec::builder(&views.q, &views.k, &views.v, &rapt_core::Options::default()).out(&views.out).build()?;
        buffers.run(&buffers.plan(&spec)?, &tensors)
    };
    assert_eq!(refused(4), Err(Error::OutputOverlaps { tensor: "out", other: "q" }));
    assert!(matches!(refused(4000), Err(Error::OutOfExtent { tensor: "out", .. })));
    assert!(matches!(refused(2), Err(Error::Unaligned { tensor: "out", .. })));
    let tensors = BufferTensors::new(at(0), at(128), at(256), at(384));
    let views = tensors.views(Device::Mps(0)).unwrap();
    let spec = Spec::builder(&views.q, &views.k, &views.v, &rapt_core::Options::default()).build().unwrap();
    assert!(matches!(buffers.plan(&spec), Err(Error::DeviceUnavailable { device: Device::Mps(0), .. })));
}

#[test]
fn a_kernel_is_compiled_once_and_each_tensor_bound_where_it_begins() {
    if !host::has_compiler() {
        return;
    }
    let fake = Fake::default();
    let buffers = Buffers::new(&fake);
    let begins = RefCell::new(Vec::new());
    let mut engine = |spec: &Spec, tensors: Tensors<'_>| {
        let (q, out) = (tensors.q.address(), tensors.out.address());
        begins.borrow_mut().push([
            q.wrapping_add_signed(tensors.q.reach_bytes().0),
            out.wrapping_add_signed(tensors.out.reach_bytes().0),
        ]);
        run(&buffers, spec, &tensors)
    };
    replay(&mut engine, &crate::plain()).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(fake.compiled.get(), 1);
    let dispatches = fake.dispatches.borrow();
    let bound: Vec<[usize; 2]> = dispatches
        .iter()
        .map(|(places, groups)| {
            // 2 · 2 heads of k, two blocks of 64 of their 74 rows.
            assert_eq!((places.len(), *groups), (8, [8, 1]));
            [1, 7].map(|slot| places.iter().find(|(at, _)| *at == slot).expect("bound").1)
        })
        .collect();
    assert_eq!(bound, *begins.borrow());
}
