//! Handles that are given back when they are dropped, and tensors with memory of their own.

use std::ffi::{CString, c_void};

use engine::DType;
use rapt_c::rapt_error::{self, *};
use rapt_c::{
    rapt_bound, rapt_bound_destroy, rapt_bound_output, rapt_dtype, rapt_model, rapt_model_bind, rapt_model_destroy,
    rapt_model_from_bytes, rapt_model_input, rapt_model_open, rapt_model_output, rapt_port, rapt_session,
    rapt_session_create, rapt_session_destroy, rapt_session_held_bytes, rapt_session_run, rapt_tensor,
};

use crate::programs::Program;
use crate::support::{Owned, last_error, tensor};

/// What places hold before a call.
pub(crate) const PATTERN: u8 = 0x5a;

/// A model that is given back when it is dropped.
pub(crate) struct Model(pub(crate) *mut rapt_model);

impl Model {
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Model, (rapt_error, String)> {
        Model::on(0, bytes)
    }

    /// On an engine of so many threads, which is given back before the model is used.
    pub(crate) fn on(threads: i32, bytes: &[u8]) -> Result<Model, (rapt_error, String)> {
        let (engine, mut model) = (Owned::new(threads), std::ptr::null_mut());
        // SAFETY: an engine that is alive, a slice, and a pointer of this frame.
        match unsafe { rapt_model_from_bytes(engine.0, bytes.as_ptr().cast(), bytes.len(), &raw mut model) } {
            RAPT_OK => Ok(Model(model)),
            code => {
                assert!(model.is_null(), "written on refusal");
                Err((code, last_error()))
            }
        }
    }

    pub(crate) fn of(program: &Program) -> Model {
        Model::from_bytes(&program.archive()).unwrap_or_else(|error| panic!("{error:?}"))
    }

    /// An archive that torch wrote.
    pub(crate) fn of_torch(name: &str) -> Model {
        let path = format!("{}/../../crates/rapt-pt2/tests/fixtures/torch-2.15/{name}.pt2", env!("CARGO_MANIFEST_DIR"));
        let (engine, path, mut model) = (Owned::new(0), CString::new(path).unwrap(), std::ptr::null_mut());
        // SAFETY: an engine that is alive, a string, and a pointer of this frame.
        assert_eq!(unsafe { rapt_model_open(engine.0, path.as_ptr(), &raw mut model) }, RAPT_OK, "{}", last_error());
        Model(model)
    }

    pub(crate) fn input(&self, place: usize) -> rapt_port {
        let mut port = empty_port();
        // SAFETY: alive, and a struct of this frame.
        assert_eq!(unsafe { rapt_model_input(self.0, place, &raw mut port) }, RAPT_OK, "{}", last_error());
        port
    }

    pub(crate) fn output(&self, place: usize) -> rapt_port {
        let mut port = empty_port();
        // SAFETY: alive, and a struct of this frame.
        assert_eq!(unsafe { rapt_model_output(self.0, place, &raw mut port) }, RAPT_OK, "{}", last_error());
        port
    }

    /// What the results of these inputs will be.
    pub(crate) fn bind(&self, inputs: &[&Memory]) -> Result<Bound, (rapt_error, String)> {
        let (inputs, mut bound) = (tensors(inputs), std::ptr::null_mut());
        // SAFETY: alive, and as many tensors as told.
        match unsafe { rapt_model_bind(self.0, inputs.as_ptr(), inputs.len(), &raw mut bound) } {
            RAPT_OK => Ok(Bound(bound)),
            code => {
                assert!(bound.is_null(), "written on refusal");
                Err((code, last_error()))
            }
        }
    }

    pub(crate) fn session(&self) -> Session {
        let mut session = std::ptr::null_mut();
        // SAFETY: alive, and a pointer of this frame.
        assert_eq!(unsafe { rapt_session_create(self.0, &raw mut session) }, RAPT_OK, "{}", last_error());
        Session(session)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: made once, and used no more.
        unsafe { rapt_model_destroy(self.0) };
    }
}

pub(crate) struct Bound(pub(crate) *mut rapt_bound);

impl Bound {
    pub(crate) fn output(&self, place: usize) -> rapt_tensor {
        let mut output = tensor(std::ptr::null_mut(), rapt_dtype::RAPT_DTYPE_UNKNOWN);
        // SAFETY: alive, and a struct of this frame.
        assert_eq!(unsafe { rapt_bound_output(self.0, place, &raw mut output) }, RAPT_OK, "{}", last_error());
        output
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // SAFETY: made once, and used no more.
        unsafe { rapt_bound_destroy(self.0) };
    }
}

pub(crate) struct Session(pub(crate) *mut rapt_session);

impl Session {
    pub(crate) fn run(&self, inputs: &[&Memory], outputs: &[&Memory]) -> rapt_error {
        let (inputs, outputs) = (tensors(inputs), tensors(outputs));
        // SAFETY: alive, and as many tensors as told.
        unsafe { rapt_session_run(self.0, inputs.as_ptr(), inputs.len(), outputs.as_ptr(), outputs.len()) }
    }

    /// Runs what must be served.
    pub(crate) fn serves(&self, inputs: &[&Memory], outputs: &[&Memory]) {
        assert_eq!(self.run(inputs, outputs), RAPT_OK, "{}", last_error());
    }

    /// Runs what must be refused: nothing is written.
    pub(crate) fn refuses(&self, inputs: &[&Memory], outputs: &[&Memory], code: rapt_error, says: &str) {
        let before: Vec<Vec<u8>> = inputs.iter().chain(outputs).map(|memory| memory.bytes()).collect();
        let got = self.run(inputs, outputs);
        let message = last_error();
        assert!(got == code && message.contains(says), "{got:?}: {message}, not {code:?}: {says}");
        let after: Vec<Vec<u8>> = inputs.iter().chain(outputs).map(|memory| memory.bytes()).collect();
        assert_eq!(before, after, "{message}: something was written");
    }

    pub(crate) fn held_bytes(&self) -> usize {
        // SAFETY: alive.
        unsafe { rapt_session_held_bytes(self.0) }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: made once, and used no more.
        unsafe { rapt_session_destroy(self.0) };
    }
}

pub(crate) fn empty_port() -> rapt_port {
    rapt_port {
        size: size_of::<rapt_port>(),
        name: std::ptr::null(),
        dtype: -1,
        ndim: -1,
        is_written: -1,
        is_dynamic: -1,
        shape: std::ptr::null(),
        sizes: std::ptr::null(),
    }
}

/// A tensor with its memory, which is aligned for every dtype.
pub(crate) struct Memory {
    pub(crate) dtype: i32,
    pub(crate) device: i32,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    /// Elements before the first.
    pub(crate) offset: usize,
    size: usize,
    words: std::cell::RefCell<Vec<u128>>,
}

impl Memory {
    /// A row-major tensor of these bytes.
    pub(crate) fn of(dtype: DType, shape: &[i64], bytes: &[u8]) -> Memory {
        let mut words = vec![0u128; bytes.len().div_ceil(16).max(1)];
        for (at, byte) in bytes.iter().enumerate() {
            words[at / 16] |= u128::from(*byte) << (at % 16 * 8);
        }
        let strides = (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect();
        Memory {
            dtype: dtype.code().into(),
            device: 1,
            shape: shape.to_vec(),
            strides,
            offset: 0,
            size: dtype.size_bytes(),
            words: words.into(),
        }
    }

    /// Small whole numbers, which every dtype holds.
    pub(crate) fn small(dtype: DType, shape: &[i64]) -> Memory {
        let count = shape.iter().product::<i64>() as usize;
        let bytes: Vec<u8> = (0..count).flat_map(|n| element(dtype, (n % 2) as f64)).collect();
        Memory::of(dtype, shape, &bytes)
    }

    /// A place for a result, which holds a pattern.
    pub(crate) fn place(dtype: DType, shape: &[i64]) -> Memory {
        let count = shape.iter().product::<i64>() as usize;
        Memory::of(dtype, shape, &vec![PATTERN; count * dtype.size_bytes()])
    }

    pub(crate) fn i64s(shape: &[i64], numbers: &[i64]) -> Memory {
        Memory::of(DType::I64, shape, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub(crate) fn f32s(shape: &[i64], numbers: &[f32]) -> Memory {
        Memory::of(DType::F32, shape, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub(crate) fn f64s(shape: &[i64], numbers: &[f64]) -> Memory {
        Memory::of(DType::F64, shape, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub(crate) fn i32s(shape: &[i64], numbers: &[i32]) -> Memory {
        Memory::of(DType::I32, shape, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Writes bytes, `at` bytes behind the first.
    pub(crate) fn set(&self, at: usize, bytes: &[u8]) {
        let mut words = self.words.borrow_mut();
        assert!(at + bytes.len() <= words.len() * 16);
        // SAFETY: the bytes lie in the words, as was just found.
        unsafe { words.as_mut_ptr().cast::<u8>().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn of_code(mut self, code: i32) -> Memory {
        self.dtype = code;
        self
    }

    pub(crate) fn tensor(&self) -> rapt_tensor {
        let start = self.words.borrow_mut().as_mut_ptr().cast::<u8>();
        let mut tensor =
            tensor(start.wrapping_add(self.offset * self.size).cast::<c_void>(), rapt_dtype::RAPT_DTYPE_F32);
        tensor.dtype = self.dtype;
        tensor.device = self.device;
        tensor.ndim = self.shape.len() as i32;
        (tensor.shape, tensor.strides) = (self.shape.as_ptr(), self.strides.as_ptr());
        tensor.storage = start.cast();
        tensor.storage_bytes = (self.words.borrow().len() * 16) as i64;
        tensor
    }

    /// All bytes, those between elements too.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.words.borrow().iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    pub(crate) fn read<const N: usize, T>(&self, number: fn([u8; N]) -> T) -> Vec<T> {
        let count = self.shape.iter().product::<i64>() as usize;
        self.bytes().chunks_exact(N).take(count).map(|x| number(x.try_into().unwrap())).collect()
    }

    pub(crate) fn to_i64s(&self) -> Vec<i64> {
        self.read(i64::from_le_bytes)
    }

    pub(crate) fn to_f32s(&self) -> Vec<f32> {
        self.read(f32::from_le_bytes)
    }
}

pub(crate) fn tensors(of: &[&Memory]) -> Vec<rapt_tensor> {
    of.iter().map(|memory| memory.tensor()).collect()
}

/// The bytes of a whole number in a dtype.
pub(crate) fn element(dtype: DType, x: f64) -> Vec<u8> {
    match dtype {
        DType::F64 => x.to_le_bytes().to_vec(),
        DType::F32 => (x as f32).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(x).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(x).to_le_bytes().to_vec(),
        DType::I64 => (x as i64).to_le_bytes().to_vec(),
        DType::I32 => (x as i32).to_le_bytes().to_vec(),
        DType::I16 => (x as i16).to_le_bytes().to_vec(),
        DType::I8 => (x as i8).to_le_bytes().to_vec(),
        DType::U8 => (x as u8).to_le_bytes().to_vec(),
        DType::Bool => vec![u8::from(x != 0.0)],
        other => vec![0; other.size_bytes()],
    }
}

/// The sizes of a tensor that lives.
pub(crate) fn shape(form: &rapt_tensor) -> &[i64] {
    // SAFETY: as many numbers as dimensions, which live as long as the binding.
    if form.ndim == 0 { &[] } else { unsafe { std::slice::from_raw_parts(form.shape, form.ndim as usize) } }
}
