//! A recorded fake of PyTorch's functions for Metal: it keeps every call byte for byte, and runs each dispatch by the host of
//! rapt-shader's tests, on the memory that tensors say is theirs.
//!
//! State is of the thread: tests run side by side. A tensor's data pointer is here the address of its storage's memory, which nobody but the fake
//! reads.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use rapt_metal::{Backend, Functions};
use rapt_shader::{KernelVariant, PARTIALS, Params, matrix_variants, variants};

use crate::host::{self, Arithmetic, Bound};

/// A call, as it came.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    Library(String),
    Function(String),
    Open,
    Start,
    Bytes(u32, Vec<u8>),
    /// A slot, and the storage and byte that are bound there.
    Tensor(u32, usize, i64),
    Dispatch([u64; 3], [u64; 3]),
    Empty(i64),
    Close,
}

/// What goes wrong between backend and device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mistake {
    None,
    /// A tensor of this slot is bound one element late.
    Offset(u32),
    /// Bytes of this field of the parameters are one more.
    Param(&'static str),
    /// A workgroup is missing.
    Grid,
    /// This function answers 1.
    Refuses(&'static str),
}

/// An `at::Tensor`.
struct Tensor {
    storage: usize,
    len_bytes: i64,
    offset: i64,
    element_bytes: i64,
    /// The memory of a tensor that was made here.
    _own: Option<Vec<u128>>,
}

struct Kernel {
    variant: KernelVariant,
    text: String,
}

pub(crate) struct State {
    pub(crate) calls: Vec<Call>,
    pub(crate) mistake: Mistake,
    /// Whether dispatches are run.
    pub(crate) runs: bool,
    /// Tensors that are not given back.
    pub(crate) alive: usize,
    /// Why a dispatch was not run to its end.
    pub(crate) failure: Option<String>,
    bound: Vec<(u32, usize, i64, i64)>,
    params: Vec<u8>,
}

thread_local! {
    static STATE: RefCell<State> = const {
        RefCell::new(State {
            calls: Vec::new(), mistake: Mistake::None, runs: true, alive: 0, failure: None, bound: Vec::new(), params: Vec::new(),
        })
    };
}

pub(crate) fn state<T>(of: impl FnOnce(&mut State) -> T) -> T {
    STATE.with(|state| of(&mut state.borrow_mut()))
}

/// Keeps a call; 1 where it is to fail.
fn record(name: &'static str, call: Option<Call>) -> c_int {
    state(|state| {
        state.calls.extend(call);
        c_int::from(state.mistake == Mistake::Refuses(name))
    })
}

fn text(at: *const c_char) -> String {
    // SAFETY: the backend hands over strings that end in NUL.
    unsafe { CStr::from_ptr(at) }.to_str().expect("UTF-8").to_owned()
}

unsafe extern "C" fn create_library(source: *const c_char, library: *mut *mut c_void) -> c_int {
    let text = text(source);
    let is_named = |variant: &KernelVariant| text.contains(&format!("// {variant}\n"));
    let variant = variants().into_iter().chain(matrix_variants()).find(is_named).expect("a variant of rapt-shader");
    assert_eq!(variant.msl(), text, "its text, and not a byte else");
    // SAFETY: room for a handle. A library lives as long as the process.
    unsafe { *library = Box::into_raw(Box::new(Kernel { variant, text: text.clone() })).cast() };
    record("aoti_torch_mps_create_shader_library", Some(Call::Library(text)))
}

unsafe extern "C" fn get_function(library: *mut c_void, name: *const c_char, function: *mut *mut c_void) -> c_int {
    // SAFETY: room for a handle.
    unsafe { *function = library };
    record("aoti_torch_mps_get_kernel_function", Some(Call::Function(text(name))))
}

unsafe extern "C" fn run_command_block(
    function: *mut c_void,
    callback: unsafe extern "C" fn(*mut c_void, *mut c_void),
    data: *mut c_void,
) -> c_int {
    let status = record("aoti_torch_mps_run_command_block", Some(Call::Open));
    if status == 0 {
        // SAFETY: as the backend asks.
        unsafe { callback(function, data) };
    }
    state(|state| state.calls.push(Call::Close));
    status
}

unsafe extern "C" fn start_encoding(_function: *mut c_void) -> c_int {
    state(|state| {
        state.bound.clear();
        state.params.clear();
    });
    record("aoti_torch_mps_start_encoding", Some(Call::Start))
}

unsafe extern "C" fn set_arg_tensor(_function: *mut c_void, slot: c_uint, tensor: *mut c_void) -> c_int {
    // SAFETY: a handle that is kept.
    let tensor = unsafe { &*tensor.cast::<Tensor>() };
    let begin = tensor.offset * tensor.element_bytes;
    state(|state| {
        let late = if state.mistake == Mistake::Offset(slot) { tensor.element_bytes } else { 0 };
        state.bound.push((slot, tensor.storage, begin + late, tensor.len_bytes));
    });
    record("aoti_torch_mps_set_arg_tensor", Some(Call::Tensor(slot, tensor.storage, begin)))
}

unsafe extern "C" fn set_arg_bytes(_function: *mut c_void, slot: c_uint, at: *const c_void, size: u64) -> c_int {
    // SAFETY: that many bytes.
    let mut bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), size as usize) }.to_vec();
    let call = Call::Bytes(slot, bytes.clone());
    state(|state| {
        if let Mistake::Param(name) = state.mistake {
            let at = Params::offsets().iter().find(|(field, _)| *field == name).expect("a field").1;
            // A vector of strides: of the row.
            let at = if name.ends_with("_stride") { at + 8 } else { at };
            bytes[at] += 1;
        }
        state.params = bytes;
    });
    record("torch_mps_set_arg_bytes", Some(call))
}

unsafe extern "C" fn dispatch(
    function: *mut c_void,
    threads: *const u64,
    n: usize,
    group: *const u64,
    m: usize,
) -> c_int {
    assert_eq!((n, m), (3, 3));
    // SAFETY: three numbers each, and a library of `create_library`.
    let (threads, group, kernel) =
        unsafe { (*threads.cast::<[u64; 3]>(), *group.cast::<[u64; 3]>(), &*function.cast::<Kernel>()) };
    let (mistake, runs) = state(|state| (state.mistake, state.runs));
    if runs && let Err(why) = run(kernel, threads, group, mistake) {
        state(|state| state.failure = Some(format!("{}: {why}", kernel.variant)));
        return 1;
    }
    record("aoti_torch_mps_dispatch_array_with_group_size", Some(Call::Dispatch(threads, group)))
}

/// What Metal does with a dispatch: threads in workgroups, each tensor bound from its first byte to the end of its storage.
fn run(kernel: &Kernel, threads: [u64; 3], group: [u64; 3], mistake: Mistake) -> Result<(), String> {
    let Kernel { variant, text } = kernel;
    assert!(threads[0].is_multiple_of(group[0]) && group[1..] == [1, 1] && threads[2] == 1, "whole workgroups");
    let mut groups = ((threads[0] / group[0]) as u32, threads[1] as u32);
    if mistake == Mistake::Grid {
        groups.0 -= 1;
    }
    let (bound, params) = state(|state| (state.bound.clone(), state.params.clone()));
    assert_eq!(group[0] as usize, variant.threads());
    let mut slots: Vec<u32> = bound.iter().map(|(slot, ..)| *slot).collect();
    slots.sort_unstable();
    let declared: Vec<u32> = variant.bindings().iter().map(|binding| binding.index).collect();
    assert_eq!(slots, declared, "each slot of the kernel once, and no other");
    let mut ranges: Vec<Bound> = Vec::new();
    for binding in variant.bindings() {
        let (_, storage, begin, len_bytes) = *bound.iter().find(|(slot, ..)| *slot == binding.index).expect("bound");
        let at = std::ptr::with_exposed_provenance_mut::<u8>(storage).wrapping_offset(begin as isize);
        // What stands for a tensor that the request does not have is neither read nor written.
        let is_another = ranges.iter().any(|range| range.begin == at) && binding.index != PARTIALS;
        let len_bytes = if is_another { 0 } else { (len_bytes - begin) as usize };
        ranges.push(Bound {
            index: binding.index,
            name: binding.tensor,
            begin: at,
            len_bytes,
            is_output: binding.is_output,
        });
    }
    host::compile(text, variant, Arithmetic::Fast)?.run_bytes(variant.threads(), groups, &params, &ranges)
}

unsafe extern "C" fn device_type() -> i32 {
    13
}

unsafe extern "C" fn dtype_bytes() -> i32 {
    0
}

unsafe extern "C" fn empty_strided(
    rank: i64,
    sizes: *const i64,
    _strides: *const i64,
    dtype: i32,
    device: i32,
    _index: i32,
    made: *mut *mut c_void,
) -> c_int {
    assert_eq!((rank, dtype, device), (1, 0, 13));
    // SAFETY: one size, and room for a handle.
    let bytes = unsafe { *sizes };
    if record("aoti_torch_empty_strided", Some(Call::Empty(bytes))) != 0 {
        return 1;
    }
    let mut own = vec![u128::MAX; if state(|state| state.runs) { bytes as usize / 16 } else { 0 }];
    let storage = own.as_mut_ptr().expose_provenance();
    let tensor = Tensor { storage, len_bytes: bytes, offset: 0, element_bytes: 1, _own: Some(own) };
    // SAFETY: as above.
    unsafe { *made = handle(tensor) };
    0
}

unsafe extern "C" fn reinterpret(
    tensor: *mut c_void,
    rank: i64,
    _sizes: *const i64,
    _strides: *const i64,
    increment: i64,
    made: *mut *mut c_void,
) -> c_int {
    assert_eq!(rank, 1);
    // SAFETY: a handle that is kept, and room for another.
    unsafe {
        let of = &*tensor.cast::<Tensor>();
        *made = handle(Tensor { offset: of.offset + increment, _own: None, ..*of });
    }
    record("aoti_torch__reinterpret_tensor", None)
}

unsafe extern "C" fn delete(tensor: *mut c_void) -> c_int {
    // SAFETY: a handle, given back once.
    drop(unsafe { Box::from_raw(tensor.cast::<Tensor>()) });
    state(|state| state.alive -= 1);
    0
}

fn handle(tensor: Tensor) -> *mut c_void {
    state(|state| state.alive += 1);
    Box::into_raw(Box::new(tensor)).cast()
}

/// A tensor in a storage at `storage`.
pub(crate) fn tensor(storage: usize, len_bytes: usize, offset: usize, element_bytes: usize) -> *mut c_void {
    handle(Tensor {
        storage,
        len_bytes: len_bytes as i64,
        offset: offset as i64,
        element_bytes: element_bytes as i64,
        _own: None,
    })
}

/// The function of this name.
pub(crate) fn symbol(name: &CStr) -> *mut c_void {
    match name.to_str().expect("a name") {
        "aoti_torch_mps_create_shader_library" => create_library as *mut c_void,
        "aoti_torch_mps_get_kernel_function" => get_function as *mut c_void,
        "aoti_torch_mps_run_command_block" => run_command_block as *mut c_void,
        "aoti_torch_mps_start_encoding" => start_encoding as *mut c_void,
        "aoti_torch_mps_set_arg_tensor" => set_arg_tensor as *mut c_void,
        "aoti_torch_mps_dispatch_array_with_group_size" => dispatch as *mut c_void,
        "torch_mps_set_arg_bytes" => set_arg_bytes as *mut c_void,
        "aoti_torch_device_type_mps" => device_type as *mut c_void,
        "aoti_torch_dtype_uint8" => dtype_bytes as *mut c_void,
        "aoti_torch_empty_strided" => empty_strided as *mut c_void,
        "aoti_torch__reinterpret_tensor" => reinterpret as *mut c_void,
        "aoti_torch_delete_tensor_object" => delete as *mut c_void,
        _ => std::ptr::null_mut(),
    }
}

/// A backend of the fake, with nothing recorded, and this mistake.
pub(crate) fn backend(mistake: Mistake, runs: bool) -> Backend {
    state(|state| {
        (state.calls, state.mistake, state.runs, state.failure) = (Vec::new(), mistake, runs, None);
    });
    // SAFETY: the functions above have the types of PyTorch's.
    Backend::new(unsafe { Functions::find(symbol) }.expect("all of them"))
}
