//! The backend on a recorded fake of PyTorch: what it calls, byte for byte, and what comes of it on this machine, against the reference.

#[allow(dead_code, reason = "shared with the tests of rapt-shader")]
#[path = "../../../rapt-shader/tests/msl/host.rs"]
mod host;

mod buffers;
mod calls;
mod fake;

use rapt_core::{Causal, DType, Device, Error, Extent, Kernel, Operands, Result, Spec, Tensors, View, ViewMut, Window};
use rapt_metal::{Backend, Placed};
use rapt_testkit::{Case, MaskCase, Places, replay};

use fake::{Mistake, state};

const GPU: Device = Device::Mps(0);

/// The first byte of a storage and its length.
fn storage(extent: Extent) -> (usize, usize) {
    match extent {
        Extent::Proven { address, len_bytes } => (address, len_bytes),
        Extent::Declared => panic!("the testkit's extents are proven"),
    }
}

/// A tensor of the testkit as PyTorch would have it: its storage has an address while it is held.
fn place(backend: &Backend, address: usize, dtype: DType, extent: Extent) -> Placed {
    let (begin, len_bytes) = storage(extent);
    let size = dtype.size_bytes();
    let offset = address.saturating_sub(begin);
    let handle = fake::tensor(begin, len_bytes, offset / size, size);
    // SAFETY: a handle of the fake, which nobody else gives back, and what it says.
    unsafe { backend.place(handle, begin, len_bytes, offset, dtype) }.expect("a number for a storage")
}

fn view(backend: &Backend, held: &mut Vec<Placed>, name: &'static str, of: &View<'_>) -> View<'static> {
    let placed = place(backend, of.address(), of.dtype(), of.extent());
    let extent = Extent::Proven { address: placed.storage_address(), len_bytes: storage(of.extent()).1 };
    let at = std::ptr::without_provenance(placed.address());
    held.push(placed);
    // SAFETY: an address of the backend's, of which nothing on the host is read.
    unsafe { View::from_raw_parts(name, at, of.dtype(), *of.shape(), *of.strides(), GPU, extent) }.expect("inside")
}

fn view_mut(backend: &Backend, held: &mut Vec<Placed>, name: &'static str, of: &ViewMut<'_>) -> ViewMut<'static> {
    let placed = place(backend, of.address(), of.dtype(), of.extent());
    let extent = Extent::Proven { address: placed.storage_address(), len_bytes: storage(of.extent()).1 };
    let at = std::ptr::without_provenance_mut(placed.address());
    held.push(placed);
    // SAFETY: as above.
    unsafe { ViewMut::from_raw_parts(name, at, of.dtype(), *of.shape(), *of.strides(), GPU, extent) }.expect("inside")
}

/// Computes a request of the host's on the fake.
fn run(backend: &Backend, kernel: Option<Kernel>, spec: &Spec, tensors: &Tensors<'_>) -> Result<()> {
    let mut held = Vec::new();
    let mut maybe = |name, of: Option<&View<'_>>| of.map(|of| view(backend, &mut held, name, of));
    let (mask, sinks) = (maybe("mask", tensors.mask.as_ref()), maybe("sinks", tensors.sinks.as_ref()));
    let alibi_slopes = maybe("alibi_slopes", tensors.alibi_slopes.as_ref());
    let [q, k, v] =
        [("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v)].map(|(name, of)| view(backend, &mut held, name, of));
    let out = view_mut(backend, &mut held, "out", &tensors.out);
    let lse = tensors.lse.as_ref().map(|lse| view_mut(backend, &mut held, "lse", lse));
    let mut spec = spec.clone();
    spec.device = GPU;
    let plan = match kernel {
        Some(kernel) => backend.plan_kernel(&spec, kernel)?,
        None => backend.plan(&spec)?,
    };
    let tensors = Tensors { mask, sinks, alibi_slopes, lse, ..Tensors::new(q, k, v, out) };
    backend.run(&plan, &mut Operands::check(tensors, plan.spec())?)
}

/// The kernel, the dtype of a request and the mask's. Few texts, since each takes seconds to compile: all are run by rapt-shader's tests.
const FEW: [(Kernel, DType, Option<DType>); 3] = [
    (Kernel::Forward, DType::F32, Some(DType::Bool)),
    (Kernel::Matrices, DType::BF16, None),
    (Kernel::Decode, DType::BF16, None),
];

/// A random problem that `kernel` serves by one text.
fn case(seed: u64, kernel: Kernel, dtype: DType, mask: Option<DType>) -> Case {
    let random = Case::random(seed, &[dtype], 60_000);
    let mask = mask.map(|dtype| match random.mask {
        Some(mask) => MaskCase { dtype, ..mask },
        None => MaskCase { dtype, full: [false, false, true, true], rank: 2, lowest: false },
    });
    let [batch, heads, q_len, head_dim] = random.q;
    let (q, num_kv_heads, head_dim_v) = match kernel {
        Kernel::Decode => ([batch, heads.min(4), 1, head_dim], 1, random.head_dim_v),
        _ => ([batch, heads, q_len, head_dim], random.num_kv_heads, random.head_dim_v.min(64)),
    };
    Case { q, num_kv_heads, head_dim_v, mask, out_dtype: None, ..random }
}

#[test]
fn requests_conform_on_the_whole_road() {
    if !host::has_compiler() {
        return;
    }
    let backend = fake::backend(Mistake::None, true);
    let mut dispatches = 0;
    for (kernel, dtype, mask) in FEW {
        for seed in 0..12 {
            let mut engine = |spec: &Spec, tensors: Tensors<'_>| run(&backend, Some(kernel), spec, &tensors);
            let asked = case(seed, kernel, dtype, mask);
            let answer = replay(&mut engine, &asked);
            let why = state(|state| state.failure.take()).unwrap_or_default();
            answer.unwrap_or_else(|failure| panic!("{}: {failure}; {why}", kernel.name()));
        }
        let now = state(|state| state.calls.iter().filter(|call| matches!(call, fake::Call::Dispatch(..))).count());
        assert!(now > dispatches, "{} ran", kernel.name());
        dispatches = now;
    }
    assert_eq!(state(|state| state.alive), 0, "every tensor is given back");
}

/// Two heads of keys, rows of several heads, a step in memory between elements, every option.
fn plain() -> Case {
    Case {
        num_kv_heads: 2,
        head_dim_v: 21,
        mask: Some(MaskCase { dtype: DType::Bool, full: [true, false, true, true], rank: 4, lowest: false }),
        places: Places { q: 2, k: 4, v: 5, mask: 1, vectors: 0, out: 3, lse: 2 },
        causal: Some(Causal::TopLeft),
        window: Window { left: Some(9), right: None },
        sinks: Some(DType::F32),
        lse: true,
        // Two heads of 50 queries: rows in the last of four blocks of 32.
        ..Case::plain(DType::F32, [2, 4, 50, 19], 70)
    }
}

#[test]
fn every_mistake_behind_the_backend_is_found() {
    if !host::has_compiler() {
        return;
    }
    let answer = |mistake| {
        let backend = fake::backend(mistake, true);
        let mut engine = |spec: &Spec, tensors: Tensors<'_>| run(&backend, Some(Kernel::Forward), spec, &tensors);
        replay(&mut engine, &plain()).map_err(|failure| failure.to_string())
    };
    answer(Mistake::None).expect("without a mistake");
    let offsets = [1, 2, 3, 4, 5, 7, 8].map(Mistake::Offset);
    let params = ["q_stride", "k_stride", "v_stride", "mask_stride", "out_stride", "lse_stride", "q_base", "head_dim"];
    let mistakes = offsets.into_iter().chain(params.map(Mistake::Param)).chain([Mistake::Grid]);
    let missed: Vec<Mistake> = mistakes.filter(|mistake| answer(*mistake).is_ok()).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn what_pytorch_refuses_is_an_error_that_names_the_call() {
    for call in [
        "aoti_torch_mps_create_shader_library",
        "aoti_torch_mps_get_kernel_function",
        "aoti_torch_mps_run_command_block",
        "aoti_torch_mps_start_encoding",
        "torch_mps_set_arg_bytes",
        "aoti_torch_mps_set_arg_tensor",
        "aoti_torch_empty_strided",
        "aoti_torch_mps_dispatch_array_with_group_size",
    ] {
        let backend = fake::backend(Mistake::Refuses(call), false);
        let mut answer = None;
        let mut engine = |spec: &Spec, tensors: Tensors<'_>| {
            let done = run(&backend, Some(Kernel::Decode), spec, &tensors);
            answer.get_or_insert(done.clone());
            done
        };
        let _ = replay(&mut engine, &Case::plain(DType::F32, [1, 2, 1, 8], 5));
        match answer {
            Some(Err(Error::DeviceFailed { device: GPU, why })) => assert!(why.starts_with(call), "{call}: {why}"),
            other => panic!("{call}: {other:?}"),
        }
        assert_eq!(state(|state| state.alive), 0, "{call}: every tensor is given back");
    }
}
