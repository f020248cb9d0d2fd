//! An exported program as C runs it: an archive with some numbers and texts altered, its ports, a binding, and two runs.
//!
//! Data layout: which program; edits of its graph and of the table of its weights (three bytes each: which scalar, and what it
//! becomes); then, for each input, choices that give it sizes, strides, and now and then another dtype. Inputs and places for
//! results have exactly the memory that they say, so that a sanitizer sees every access beside them, and a border of known
//! bytes for those that run without. Deliberately absent: pointers to nothing, which C cannot tell.

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use arbitrary::{Result as Parsed, Unstructured};
use c::rapt_error::{self, RAPT_ERROR_INTERNAL, RAPT_OK};
use c::{
    rapt_bound, rapt_bound_destroy, rapt_bound_output, rapt_device, rapt_last_error, rapt_last_error_code, rapt_model,
    rapt_model_bind, rapt_model_destroy, rapt_model_explain, rapt_model_from_bytes, rapt_model_input,
    rapt_model_num_inputs, rapt_model_num_outputs, rapt_port, rapt_session, rapt_session_create, rapt_session_destroy,
    rapt_session_reset, rapt_session_run, rapt_string_free, rapt_tensor,
};
use rapt::DType;

use crate::arbitrary::once_in;
use crate::c::engine;
use crate::pt2::{edited, zip};

/// Each program with the table of its weights; `programs/make.py` writes them.
const PROGRAMS: [[&str; 2]; 5] = [
    [include_str!("../programs/text.json"), include_str!("../programs/text.weights.json")],
    [include_str!("../programs/attend.json"), include_str!("../programs/attend.weights.json")],
    [include_str!("../programs/cache.json"), include_str!("../programs/cache.weights.json")],
    [include_str!("../programs/image.json"), include_str!("../programs/image.weights.json")],
    [include_str!("../programs/numbers.json"), include_str!("../programs/numbers.weights.json")],
];

/// The bytes of each payload: more than any weight of the programs needs.
const PAYLOAD: usize = 1024;
/// Bytes on both sides of each tensor, which no call writes.
const BORDER: usize = 64;
/// What borders and places hold.
const PATTERN: u8 = 0x5a;
/// The most elements of an input or a result that are given memory.
const MOST: i64 = 1 << 12;

/// Whether the bytes describe a program that is loaded and a call of it that is served.
///
/// # Panics
/// If a refusal says nothing or writes, a call writes beside its results, or the same call answers otherwise.
#[must_use]
pub fn c_model(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    call(&mut u).unwrap_or(false)
}

fn call(u: &mut Unstructured<'_>) -> Parsed<bool> {
    let archive = archive(u)?;
    let mut model = null_mut();
    // SAFETY: a slice, and a pointer of this frame.
    let answer = unsafe { rapt_model_from_bytes(engine(), archive.as_ptr().cast(), archive.len(), &raw mut model) };
    if !is_served(answer) {
        assert!(model.is_null());
        return Ok(false);
    }
    let model = Owned(model, rapt_model_destroy);
    let mut text = null_mut();
    // SAFETY: alive, and a pointer of this frame; the text is given back once.
    unsafe {
        assert_eq!(rapt_model_explain(model.0, &raw mut text), RAPT_OK);
        rapt_string_free(text);
    }
    let Some(inputs) = inputs(u, model.0)? else { return Ok(false) };
    Ok(run(&model, &inputs))
}

/// A program with edits, in an archive that is whole otherwise.
fn archive(u: &mut Unstructured<'_>) -> Parsed<Vec<u8>> {
    let [program, table] = PROGRAMS[u.choose_index(PROGRAMS.len())?];
    let edits = |u: &mut Unstructured<'_>, odds: u8| -> Parsed<Vec<u8>> {
        let count = if once_in(u, odds)? { 1 + u.choose_index(3)? } else { 0 };
        Ok(u.bytes(3 * count)?.to_vec())
    };
    let (graph, weights) = (edits(u, 2)?, edits(u, 8)?);
    let (program, table) = (edited(program, &graph), edited(table, &weights));
    let payload: Vec<u8> =
        [0.5f32, -0.25, 1.0, 0.125].iter().flat_map(|x| x.to_le_bytes()).cycle().take(PAYLOAD).collect();
    let names: Vec<String> = (0..16).map(|n| format!("m/data/weights/weight_{n}")).collect();
    let mut entries: Vec<(&str, &[u8])> = vec![
        ("m/data/weights/model_weights_config.json", table.as_bytes()),
        ("m/data/constants/model_constants_config.json", br#"{"config": {}}"#),
        ("m/models/model.json", program.as_bytes()),
        ("m/archive_format", b"pt2"),
        ("m/archive_version", b"0"),
        ("m/byteorder", b"little"),
    ];
    entries.extend(names.iter().map(|name| (name.as_str(), payload.as_slice())));
    Ok(zip(&entries))
}

/// Whether an answer is none of a refusal, which must say something.
fn is_served(answer: rapt_error) -> bool {
    if answer == RAPT_OK {
        return true;
    }
    // SAFETY: the message of this thread.
    let message = unsafe { CStr::from_ptr(rapt_last_error()) };
    assert!(message.count_bytes() > 8 && rapt_last_error_code() == answer, "{answer:?} says {message:?}");
    assert_ne!(answer, RAPT_ERROR_INTERNAL, "{message:?}");
    false
}

/// A handle that is given back.
struct Owned<T>(*mut T, unsafe extern "C" fn(*mut T));

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made once, and used no more.
        unsafe { (self.1)(self.0) };
    }
}

/// A tensor with its memory.
struct Given {
    memory: Vec<u64>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: i32,
    /// Bytes from the memory's start to the first element, and bytes between the borders.
    first: usize,
    bytes: usize,
}

impl Given {
    /// A tensor with these strides, whose elements are `fill`'s bytes again and again.
    fn new(dtype: i32, shape: Vec<i64>, strides: Vec<i64>, fill: &[u8]) -> Option<Given> {
        let size = DType::from_code(u8::try_from(dtype).ok()?).ok()?.size_bytes();
        let (mut low, mut high) = (0i64, 0i64);
        for (&n, &stride) in shape.iter().zip(&strides) {
            let last = (n - 1).max(0) * stride;
            (low, high) = (low + last.min(0), high + last.max(0));
        }
        let elements = if shape.contains(&0) { 0 } else { (high - low + 1) as usize };
        let bytes = elements * size;
        let mut memory = vec![u64::from_le_bytes([PATTERN; 8]); (2 * BORDER + bytes).div_ceil(8)];
        // SAFETY: the border and these bytes lie in the memory.
        let content = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<u8>().add(BORDER), bytes) };
        content.iter_mut().zip(fill.iter().cycle()).for_each(|(to, from)| *to = *from);
        let first = BORDER + low.unsigned_abs() as usize * size;
        Some(Given { memory, shape, strides, dtype, first, bytes })
    }

    fn tensor(&self) -> rapt_tensor {
        let start = self.memory.as_ptr().cast::<u8>().cast_mut();
        rapt_tensor {
            data: start.wrapping_add(self.first).cast::<c_void>(),
            dtype: self.dtype,
            device: rapt_device::RAPT_DEVICE_CPU as i32,
            device_index: 0,
            ndim: self.shape.len() as i32,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            storage_bytes: -1,
            storage: null(),
        }
    }

    /// All bytes, borders too.
    fn content(&self) -> Vec<u8> {
        // SAFETY: as long as the memory.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.memory.len() * 8) }.to_vec()
    }

    fn border_is_whole(&self) -> bool {
        let content = self.content();
        content[..BORDER].iter().chain(&content[BORDER + self.bytes..]).all(|&byte| byte == PATTERN)
    }
}

/// Inputs as the ports ask for them, most of them right; `None` for some that are too large to be tried.
fn inputs(u: &mut Unstructured<'_>, model: *mut rapt_model) -> Parsed<Option<Vec<Given>>> {
    let mut inputs = Vec::new();
    // SAFETY: alive.
    for place in 0..unsafe { rapt_model_num_inputs(model) } {
        let mut port = rapt_port {
            size: size_of::<rapt_port>(),
            name: null(),
            dtype: 0,
            ndim: 0,
            is_written: 0,
            is_dynamic: 0,
            shape: null(),
            sizes: null(),
        };
        // SAFETY: alive, and a struct of this frame.
        assert_eq!(unsafe { rapt_model_input(model, place, &raw mut port) }, RAPT_OK);
        let sizes = match port.ndim {
            0 => &[],
            // SAFETY: a port has as many sizes as dimensions.
            ndim => unsafe { std::slice::from_raw_parts(port.shape, ndim as usize) },
        };
        let mut shape = Vec::new();
        for &size in sizes {
            let any = [2, 3, 5, 4, 9, 17, 1, 0][u.choose_index(8)?];
            shape.push(if size < 0 || once_in(u, 40)? { any } else { size });
        }
        let count = shape.iter().try_fold(1i64, |count, &n| count.checked_mul(n));
        if count.is_none_or(|count| count > MOST) || port.dtype == 0 {
            return Ok(None);
        }
        let dtype = if once_in(u, 40)? { i32::from(u.choose(DType::ALL)?.code()) } else { port.dtype };
        let strides = strides(u, &shape)?;
        // Small numbers of every dtype, or any bytes.
        let fill = if once_in(u, 4)? { u.bytes(8)?.to_vec() } else { one(dtype) };
        let Some(given) = Given::new(dtype, shape, strides, &fill) else { return Ok(None) };
        inputs.push(given);
    }
    Ok(Some(inputs))
}

/// The bytes of 1 in a dtype, and of 0.
fn one(dtype: i32) -> Vec<u8> {
    let dtype = u8::try_from(dtype).ok().and_then(|code| DType::from_code(code).ok());
    let mut bytes = match dtype {
        Some(DType::F64) => 1f64.to_le_bytes().to_vec(),
        Some(DType::F32) => 1f32.to_le_bytes().to_vec(),
        Some(DType::F16) => 0x3c00u16.to_le_bytes().to_vec(),
        Some(DType::BF16) => 0x3f80u16.to_le_bytes().to_vec(),
        Some(dtype) => 1u64.to_le_bytes()[..dtype.size_bytes().min(8)].to_vec(),
        None => vec![1],
    };
    bytes.extend(vec![0; bytes.len()]);
    bytes
}

/// Row-major strides, or in another order, with gaps, or backwards.
fn strides(u: &mut Unstructured<'_>, shape: &[i64]) -> Parsed<Vec<i64>> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    let kind = u.int_in_range(0..=7u8)?;
    if kind > 4 {
        order.reverse();
    }
    let mut strides = vec![0; shape.len()];
    let mut step = if kind == 6 { 2 } else { 1 };
    for &dim in order.iter().rev() {
        strides[dim] = if kind == 7 { -step } else { step };
        step *= shape[dim].max(1);
    }
    Ok(strides)
}

fn run(model: &Owned<rapt_model>, inputs: &[Given]) -> bool {
    let given: Vec<rapt_tensor> = inputs.iter().map(Given::tensor).collect();
    let mut bound: *mut rapt_bound = null_mut();
    // SAFETY: alive, and as many tensors as told.
    if !is_served(unsafe { rapt_model_bind(model.0, given.as_ptr(), given.len(), &raw mut bound) }) {
        assert!(bound.is_null());
        return false;
    }
    let bound = Owned(bound, rapt_bound_destroy);
    let mut outputs = Vec::new();
    // SAFETY: alive.
    for place in 0..unsafe { rapt_model_num_outputs(model.0) } {
        let mut form = Given::new(1, Vec::new(), Vec::new(), &[0]).expect("a byte").tensor();
        // SAFETY: alive, and a struct of this frame.
        assert_eq!(unsafe { rapt_bound_output(bound.0, place, &raw mut form) }, RAPT_OK);
        let list = |at: *const i64| match form.ndim {
            0 => Vec::new(),
            // SAFETY: arrays of the binding, as long as it has dimensions.
            ndim => unsafe { std::slice::from_raw_parts(at, ndim as usize) }.to_vec(),
        };
        if form.storage_bytes > MOST * 16 || form.dtype == 0 {
            return false;
        }
        let Some(output) = Given::new(form.dtype, list(form.shape), list(form.strides), &[PATTERN]) else {
            return false;
        };
        outputs.push(output);
    }
    let mut session: *mut rapt_session = null_mut();
    // SAFETY: alive, and a pointer of this frame.
    assert_eq!(unsafe { rapt_session_create(model.0, &raw mut session) }, RAPT_OK);
    let session = Owned(session, rapt_session_destroy);
    let places: Vec<rapt_tensor> = outputs.iter().map(Given::tensor).collect();
    let before: Vec<Vec<u8>> = inputs.iter().chain(&outputs).map(Given::content).collect();
    // SAFETY: alive, as many tensors as told, each with its memory.
    let once = || unsafe { rapt_session_run(session.0, given.as_ptr(), given.len(), places.as_ptr(), places.len()) };
    let answer = once();
    let after: Vec<Vec<u8>> = inputs.iter().chain(&outputs).map(Given::content).collect();
    assert!(inputs.iter().chain(&outputs).all(Given::border_is_whole), "a byte beside a tensor was written");
    if !is_served(answer) {
        assert!(before == after, "a refused call wrote");
        return false;
    }
    // The same inputs from the start give the same results, unless the first call wrote an input.
    // SAFETY: alive.
    assert_eq!(unsafe { rapt_session_reset(session.0) }, RAPT_OK);
    if before[..inputs.len()] == after[..inputs.len()] {
        assert_eq!(once(), RAPT_OK);
        let again: Vec<Vec<u8>> = inputs.iter().chain(&outputs).map(Given::content).collect();
        assert!(after == again, "the same call, other bits");
    }
    true
}
