//! What is called for a request, byte for byte, as rapt-shader's launch says it.

use std::ffi::CStr;

use rapt_core::{Causal, DType, Error, Extent, Operands, Options, Spec, Tensors, View, ViewMut};
use rapt_metal::{Backend, Functions, MetalError, Placed};
use rapt_shader::{Caps, PARTIALS, Params, ShaderLaunch, select};

use crate::GPU;
use crate::fake::{self, Call, Mistake, state};

/// A tensor whose element 0 lies `offset` elements behind the begin of a storage, which nobody reads.
struct Tensor {
    storage: usize,
    len_bytes: usize,
    offset: usize,
    dtype: DType,
    shape: [usize; 4],
    strides: [isize; 4],
}

impl Tensor {
    fn place(&self, backend: &Backend) -> Placed {
        let Tensor { storage, len_bytes, offset, dtype, .. } = *self;
        let handle = fake::tensor(storage, len_bytes, offset, dtype.size_bytes());
        // SAFETY: a handle of the fake, which nobody else gives back, and what it says.
        unsafe { backend.place(handle, storage, len_bytes, offset * dtype.size_bytes(), dtype) }.expect("a number")
    }

    fn extent(&self, placed: &Placed) -> Extent {
        Extent::Proven { address: placed.storage_address(), len_bytes: self.len_bytes }
    }

    fn view(&self, name: &'static str, placed: &Placed) -> rapt_core::Result<View<'static>> {
        let (at, shape, strides) = (placed.address(), self.shape.into(), self.strides.into());
        // SAFETY: an address of the backend's, of which nothing is read.
        unsafe {
            View::from_raw_parts(
                name,
                std::ptr::without_provenance(at),
                self.dtype,
                shape,
                strides,
                GPU,
                self.extent(placed),
            )
        }
    }

    fn view_mut(&self, name: &'static str, placed: &Placed) -> rapt_core::Result<ViewMut<'static>> {
        let (at, shape, strides) = (placed.address(), self.shape.into(), self.strides.into());
        // SAFETY: as above.
        unsafe {
            let at = std::ptr::without_provenance_mut(at);
            ViewMut::from_raw_parts(name, at, self.dtype, shape, strides, GPU, self.extent(placed))
        }
    }
}

/// Storages by names that look like PyTorch's: addresses of objects, a few bytes apart.
const FUSED: usize = 0x6000_0c10;
const OUT: usize = 0x6000_0c60;

/// q, k and v in one fused [batch, len, 3, heads, head_dim] of float16, and out.
fn fused(batch: usize, heads: usize, q_len: usize, kv_len: usize, dim: usize) -> ([Tensor; 3], Tensor) {
    let row = 3 * heads * dim;
    let of = |part: usize, len: usize| Tensor {
        storage: FUSED,
        len_bytes: batch * kv_len * row * 2,
        offset: part * heads * dim,
        dtype: DType::F16,
        shape: [batch, heads, len, dim],
        strides: [(kv_len * row) as isize, dim as isize, row as isize, 1],
    };
    let (len, dim_strides) = (batch * heads * q_len * dim * 2, [heads * q_len * dim, q_len * dim, dim, 1]);
    let out = Tensor {
        storage: OUT,
        len_bytes: len,
        offset: 0,
        dtype: DType::F16,
        shape: [batch, heads, q_len, dim],
        strides: dim_strides.map(|stride| stride as isize),
    };
    ([of(0, q_len), of(1, kv_len), of(2, kv_len)], out)
}

/// Plans and runs it on a fake that records, and answers the calls and the spec.
fn recorded(
    backend: &Backend,
    qkv: &[Tensor; 3],
    out: &Tensor,
    options: &Options,
) -> rapt_core::Result<(Vec<Call>, Spec)> {
    let placed = [&qkv[0], &qkv[1], &qkv[2], out].map(|tensor| tensor.place(backend));
    let [q, k, v] = [("q", 0), ("k", 1), ("v", 2)].map(|(name, at): (_, usize)| qkv[at].view(name, &placed[at]));
    let out = out.view_mut("out", &placed[3])?;
    let tensors = Tensors::new(q?, k?, v?, out);
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options).out(&tensors.out).build()?;
    let plan = backend.plan(&spec)?;
    backend.run(&plan, &mut Operands::check(tensors, plan.spec())?)?;
    Ok((state(|state| std::mem::take(&mut state.calls)), spec))
}

#[test]
fn a_request_is_one_dispatch_of_the_text_with_these_bytes() {
    let backend = fake::backend(Mistake::None, false);
    let (qkv, out) = fused(2, 4, 70, 70, 64);
    let options = Options { causal: Some(Causal::TopLeft), ..Options::default() };
    let (calls, spec) = recorded(&backend, &qkv, &out, &options).unwrap();
    let plan = select(&spec, &Caps::METAL).unwrap();
    let launch = plan.launch_plan::<ShaderLaunch>().unwrap();
    let variant = launch.variant.unwrap();
    // Each tensor is bound at its own offset, so that its element 0 is the first.
    let params = Params::new(&spec, launch, &launch.windows[0], [0; 8]);
    let part = 4 * 64 * 2;
    let expected = vec![
        Call::Library(variant.msl()),
        Call::Function("attention".to_owned()),
        Call::Open,
        Call::Start,
        Call::Bytes(0, params.bytes()),
        Call::Tensor(1, FUSED, 0),
        Call::Tensor(2, FUSED, part),
        Call::Tensor(3, FUSED, 2 * part),
        Call::Tensor(7, OUT, 0),
        // No mask, no sinks, no slopes, no lse: q stands there.
        Call::Tensor(4, FUSED, 0),
        Call::Tensor(5, FUSED, 0),
        Call::Tensor(6, FUSED, 0),
        Call::Tensor(8, FUSED, 0),
        // 2 · 4 heads, two blocks of 64 rows, 256 threads each.
        Call::Dispatch([16 * 256, 1, 1], [256, 1, 1]),
        Call::Close,
    ];
    assert_eq!(calls, expected);
    assert_eq!(params.bytes().len(), Params::BYTES);
    assert!(
        calls[0] == Call::Library(variant.msl()) && variant.to_string().starts_with("matrices 8x8 by 32"),
        "{variant}"
    );
    // The same once more: nothing is compiled.
    let (again, _) = recorded(&backend, &qkv, &out, &options).unwrap();
    assert_eq!(again, expected[2..]);
    assert_eq!(state(|state| state.alive), 0);
}

#[test]
fn few_queries_are_two_dispatches_with_memory_between_them() {
    let backend = fake::backend(Mistake::None, false);
    let (qkv, out) = fused(1, 2, 1, 600, 32);
    let (calls, spec) = recorded(&backend, &qkv, &out, &Options::default()).unwrap();
    let plan = select(&spec, &Caps::METAL).unwrap();
    let launch = plan.launch_plan::<ShaderLaunch>().unwrap();
    let names: Vec<String> = calls
        .iter()
        .filter_map(|call| match call {
            Call::Library(text) => text.lines().find(|line| line.starts_with("// ")).map(ToOwned::to_owned),
            _ => None,
        })
        .collect();
    assert!(
        names[0].starts_with("// decode of 16 rows on matrices") && names[1].starts_with("// combine"),
        "{names:?}"
    );
    let partials = Call::Empty(launch.partial_bytes_of(&launch.windows[0]) as i64);
    assert_eq!(calls.iter().filter(|call| **call == partials).count(), 1);
    let dispatches: Vec<&Call> = calls.iter().filter(|call| matches!(call, Call::Dispatch(..))).collect();
    // Two heads, three splits of 256 keys; then two heads of four rows, 8 of 32 columns each.
    assert_eq!(
        dispatches,
        [&Call::Dispatch([6 * 128, 1, 1], [128, 1, 1]), &Call::Dispatch([8 * 128, 1, 1], [128, 1, 1])]
    );
    let bound: Vec<u32> = calls
        .iter()
        .filter_map(|call| match call {
            Call::Tensor(slot, ..) => Some(*slot),
            _ => None,
        })
        .collect();
    assert_eq!(bound, [1, 2, 3, 4, 6, PARTIALS, 7, 5, 8, PARTIALS]);
}

/// More than 2^31 bytes between the first and the last: a window begins at its own byte, so that 31 bits count its elements.
#[test]
fn windows_are_bound_where_they_begin() {
    let backend = fake::backend(Mistake::None, false);
    let (mut qkv, out) = fused(2, 1, 3, 5, 16);
    let apart = 3isize << 30;
    for tensor in &mut qkv {
        tensor.strides[0] = apart;
        tensor.len_bytes = (apart * 2 + 4096) as usize;
    }
    let (calls, spec) = recorded(&backend, &qkv, &out, &Options::default()).unwrap();
    let plan = select(&spec, &Caps::METAL).unwrap();
    assert_eq!(plan.launch_plan::<ShaderLaunch>().unwrap().windows.len(), 2);
    let q: Vec<i64> = calls
        .iter()
        .filter_map(|call| match call {
            Call::Tensor(1, _, begin) => Some(*begin),
            _ => None,
        })
        .collect();
    // `decode` binds q; `combine` does not.
    assert_eq!(q, [0, apart as i64 * 2]);
    let first = Params::new(
        &spec,
        plan.launch_plan::<ShaderLaunch>().unwrap(),
        &plan.launch_plan::<ShaderLaunch>().unwrap().windows[1],
        [0; 8],
    );
    assert!(calls.contains(&Call::Bytes(0, first_of(&spec, &first))), "element 0 lies before what is bound");
    assert_eq!(state(|state| state.alive), 0);
}

/// The parameters of the second window, where element 0 of q, k, v and out lies one batch before the first byte that is bound.
fn first_of(spec: &Spec, params: &Params) -> Vec<u8> {
    let mut bytes = params.bytes();
    let out = spec.out.strides[0];
    for (name, before) in [("q_base", 3isize << 30), ("k_base", 3 << 30), ("v_base", 3 << 30), ("out_base", out)] {
        let at = Params::offsets().iter().find(|(field, _)| *field == name).unwrap().1;
        bytes[at..at + 4].copy_from_slice(&(-(before as i64) as u32).to_le_bytes());
    }
    bytes
}

#[test]
fn a_storage_has_one_address_while_it_is_held() {
    let backend = fake::backend(Mistake::None, false);
    let ([q, k, _], out) = fused(1, 2, 4, 4, 8);
    let (of_q, of_k, of_out) = (q.place(&backend), k.place(&backend), out.place(&backend));
    assert_eq!(of_q.storage_address(), of_k.storage_address(), "one storage");
    assert_ne!(of_q.storage_address(), of_out.storage_address());
    assert_eq!(of_k.address() - of_q.address(), 2 * 8 * 2);
    let was = of_q.storage_address();
    drop(of_q);
    let another = Tensor { storage: 0x6000_0fff, ..fused(1, 2, 4, 4, 8).1 };
    assert_ne!(another.place(&backend).storage_address(), was, "k holds it still");
    drop(of_k);
    assert_eq!(another.place(&backend).storage_address(), was, "free again");
    drop(of_out);
    assert_eq!(state(|state| state.alive), 0);
}

#[test]
fn an_output_in_the_storage_of_an_input_is_told_apart_by_its_bytes() {
    let backend = fake::backend(Mistake::None, false);
    let (qkv, out) = fused(1, 2, 4, 4, 8);
    // Where q lies.
    let over = Tensor { storage: FUSED, len_bytes: qkv[0].len_bytes, strides: qkv[0].strides, ..out };
    let error = recorded(&backend, &qkv, &over, &Options::default()).unwrap_err();
    assert_eq!(error, Error::OutputOverlaps { tensor: "out", other: "q" });
    // In place of q, which is read from another storage.
    let (apart, _) = fused(1, 2, 4, 4, 8);
    let [_, k, v] = qkv;
    let apart = [Tensor { storage: 0x7000_0000, ..apart.into_iter().next().unwrap() }, k, v];
    recorded(&backend, &apart, &over, &Options::default()).expect("no byte in common");
    assert_eq!(state(|state| state.alive), 0);
}

#[test]
fn a_view_that_leaves_its_storage_or_that_nobody_holds_is_refused() {
    let backend = fake::backend(Mistake::None, false);
    let ([mut q, k, v], out) = fused(1, 2, 4, 4, 8);
    q.len_bytes = 16;
    let error = recorded(&backend, &[q, k, v], &out, &Options::default()).unwrap_err();
    assert!(matches!(error, Error::OutOfExtent { tensor: "q", .. }), "{error}");

    let (qkv, out) = fused(1, 2, 4, 4, 8);
    let placed = [&qkv[0], &qkv[1], &qkv[2], &out].map(|tensor| tensor.place(&backend));
    let [q, k, v] =
        [("q", 0), ("k", 1), ("v", 2)].map(|(name, at): (_, usize)| qkv[at].view(name, &placed[at]).unwrap());
    let tensors = Tensors::new(q, k, v, out.view_mut("out", &placed[3]).unwrap());
    let spec =
        Spec::builder(&tensors.q, &tensors.k, &tensors.v, &Options::default()).out(&tensors.out).build().unwrap();
    let plan = backend.plan(&spec).unwrap();
    drop(placed);
    let error = backend.run(&plan, &mut Operands::check(tensors, plan.spec()).unwrap()).unwrap_err();
    let why = MetalError::NotHeld { tensor: "q" }.to_string();
    assert_eq!(error, Error::DeviceFailed { device: GPU, why });
}

#[test]
fn a_pytorch_without_one_of_the_functions_is_refused_by_its_name() {
    let missing = |name: &'static CStr| {
        // SAFETY: the fake's functions have the types of PyTorch's.
        unsafe { Functions::find(|asked| if asked == name { std::ptr::null_mut() } else { fake::symbol(asked) }) }.err()
    };
    for (name, function) in [
        (c"aoti_torch_mps_create_shader_library", "aoti_torch_mps_create_shader_library"),
        (c"torch_mps_set_arg_bytes", "torch_mps_set_arg_bytes"),
    ] {
        assert_eq!(missing(name), Some(MetalError::Missing { function, since: "2.14" }));
    }
    let error = MetalError::Missing { function: "torch_mps_set_arg_bytes", since: "2.14" }.on(GPU);
    assert!(
        matches!(&error, Error::DeviceUnavailable { device: GPU, why } if why.contains("older than 2.14")),
        "{error}"
    );
    assert!(matches!(Backend::get(), Err(MetalError::NotLoaded)));
}
