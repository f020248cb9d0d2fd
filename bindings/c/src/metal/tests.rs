//! Descriptors of tensors in buffers, on a fake of Metal's objects which keeps what is submitted; and the functions where Metal is not.

use std::cell::RefCell;
use std::ffi::CStr;
use std::ptr::null;

use engine::metal::{BufferDispatch, MetalError};

use super::*;
use crate::abi::{rapt_dtype, rapt_given};
use crate::rapt_last_error;

/// An MTLBuffer: its length lies where its pointer leads.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fake(*const usize);

impl Buffer for Fake {
    fn len_bytes(&self) -> usize {
        // SAFETY: buffers of these tests are numbers that live as long as the call.
        unsafe { self.0.read() }
    }
    fn is(&self, other: &Self) -> bool {
        self == other
    }
}

/// Slots with buffers and places, and workgroups with their threads.
type Dispatched = (Vec<(u32, usize, usize)>, [usize; 2], usize);

#[derive(Debug, Default)]
struct Queue(RefCell<Vec<Dispatched>>);

impl Metal for &Queue {
    type Buffer = Fake;
    type Pipeline = ();
    fn compile(&self, text: &str, name: &str) -> Result<(), MetalError> {
        assert!(text.contains("[[kernel") && name == "attention");
        Ok(())
    }
    fn buffer(&self, _: usize) -> Result<Fake, MetalError> {
        Err(MetalError::Failed { call: "newBufferWithLength", why: "no memory".to_owned() })
    }
    fn submit(&self, dispatches: &[BufferDispatch<Self>]) -> Result<(), MetalError> {
        let of = |dispatch: &BufferDispatch<Self>| {
            assert_eq!(dispatch.params.len(), 256);
            let bound = dispatch.bound.iter().map(|(slot, buffer, begin)| (*slot, buffer.0.addr(), *begin));
            (bound.collect(), dispatch.groups, dispatch.threads)
        };
        self.0.borrow_mut().extend(dispatches.iter().map(of));
        Ok(())
    }
}

/// 40 queries and 70 keys of 2 heads and 8 columns of float16, behind each other in one buffer; out in another.
struct Problem {
    shapes: [[i64; 4]; 4],
    strides: [i64; 4],
    lengths: [usize; 2],
    tensors: [rapt_tensor; 4],
}

const Q_BYTES: usize = 2 * 40 * 8 * 2;
const K_BYTES: usize = 2 * 70 * 8 * 2;

impl Problem {
    fn new() -> Box<Self> {
        let shapes = [[1, 2, 40, 8], [1, 2, 70, 8], [1, 2, 70, 8], [1, 2, 40, 8]];
        let none = rapt_tensor {
            data: std::ptr::null_mut(),
            dtype: rapt_dtype::RAPT_DTYPE_F16 as i32,
            device: rapt_device::RAPT_DEVICE_METAL as i32,
            device_index: 0,
            ndim: 4,
            shape: null(),
            strides: null(),
            storage_bytes: 0,
            storage: null(),
        };
        let lengths = [2 + Q_BYTES + 2 * K_BYTES, Q_BYTES];
        // Rows of both heads beside each other: [batch, len, heads, columns] seen as [batch, heads, len, columns].
        let mut made = Box::new(Problem { shapes, strides: [0, 8, 16, 1], lengths, tensors: [none; 4] });
        let offsets = [2, 2 + Q_BYTES, 2 + Q_BYTES + K_BYTES, 0];
        for (at, offset) in offsets.into_iter().enumerate() {
            let storage = (&raw const made.lengths[usize::from(at == 3)]).cast();
            let (shape, strides) = (made.shapes[at].as_ptr(), made.strides.as_ptr());
            let data = std::ptr::without_provenance_mut(offset);
            made.tensors[at] = rapt_tensor { data, shape, strides, storage, ..none };
        }
        made
    }

    fn call(&self, options: *const rapt_options) -> Call {
        let [q, k, v, out] = self.tensors.each_ref().map(std::ptr::from_ref);
        Call { q, k, v, out, options }
    }

    fn run(&self, queue: &Queue, options: *const rapt_options) -> (rapt_error, String) {
        let buffers = Buffers::new(queue);
        let buffer = |storage: *const c_void| Some(Fake(storage.cast()));
        // SAFETY: descriptors that are what they say.
        let code = guard(|| unsafe { attend(&buffers, &self.call(options), &buffer) });
        (code, said())
    }
}

fn said() -> String {
    // SAFETY: a string of this thread's, until its next call.
    unsafe { CStr::from_ptr(rapt_last_error()) }.to_str().unwrap().to_owned()
}

#[test]
fn a_call_is_one_dispatch_with_each_tensor_at_its_byte() {
    let (problem, queue) = (Problem::new(), Queue::default());
    assert_eq!(problem.run(&queue, null()).0, rapt_error::RAPT_OK, "{}", said());
    let [many, out] = [0, 1].map(|at: usize| (&raw const problem.lengths[at]).addr());
    let dispatched = queue.0.borrow();
    let [(bound, groups, threads)] = &dispatched[..] else { panic!("{dispatched:?}") };
    // 2 heads, one block of 64 rows each.
    assert_eq!((groups, *threads), (&[2, 1], 256));
    let expected = [(1, many, 2), (2, many, 2 + Q_BYTES), (3, many, 2 + Q_BYTES + K_BYTES), (7, out, 0)];
    for slot in expected {
        assert!(bound.contains(&slot), "{slot:?} in {bound:?}");
    }
}

#[test]
fn options_and_their_tensors_are_read() {
    let (mut problem, queue) = (Problem::new(), Queue::default());
    // SAFETY: zero and NULL are values of every field.
    let mut options: rapt_options = unsafe { std::mem::zeroed() };
    options.size = size_of::<rapt_options>();
    options.given = rapt_given::RAPT_GIVEN_WINDOW_LEFT as u32;
    options.window_left = 9;
    let heads = [2i64];
    let one = [1i64];
    let data = std::ptr::without_provenance_mut(4);
    let sinks = rapt_tensor { ndim: 1, shape: heads.as_ptr(), strides: one.as_ptr(), data, ..problem.tensors[0] };
    options.sinks = &raw const sinks;
    assert_eq!(problem.run(&queue, &raw const options).0, rapt_error::RAPT_OK, "{}", said());
    let many = (&raw const problem.lengths[0]).addr();
    assert!(queue.0.borrow()[0].0.contains(&(5, many, 4)));
    problem.lengths[1] *= 2;
    problem.tensors[3].dtype = rapt_dtype::RAPT_DTYPE_F32 as i32;
    let (code, said) = problem.run(&queue, &raw const options);
    assert!(code == rapt_error::RAPT_ERROR_DTYPE_MISMATCH && said.contains("out"), "{code:?} {said}");
}

#[test]
fn what_is_wrong_is_refused_before_anything_is_submitted() {
    let queue = Queue::default();
    type Break = fn(&mut Problem);
    let cases: [(Break, rapt_error, &str); 7] = [
        (|of| of.tensors[0].storage = null(), rapt_error::RAPT_ERROR_POINTER, "q->storage is NULL"),
        (|of| of.tensors[1].device = 1, rapt_error::RAPT_ERROR_DEVICE, "which rapt_metal_attention() takes"),
        (|of| of.tensors[2].device_index = 1, rapt_error::RAPT_ERROR_DEVICE, "v is no tensor"),
        (|of| of.tensors[0].storage_bytes = 7, rapt_error::RAPT_ERROR_LAYOUT, "storage_bytes 7"),
        (|of| of.lengths[0] -= 2, rapt_error::RAPT_ERROR_LAYOUT, "v"),
        (|of| of.tensors[0].data = std::ptr::without_provenance_mut(3), rapt_error::RAPT_ERROR_LAYOUT, "q"),
        (|of| of.tensors[3].storage = of.tensors[0].storage, rapt_error::RAPT_ERROR_LAYOUT, "out"),
    ];
    for (change, expected, words) in cases {
        let mut problem = Problem::new();
        change(&mut problem);
        let (code, said) = problem.run(&queue, null());
        assert!(code == expected && said.contains(words), "{code:?}, not {expected:?}: {said}");
    }
    let problem = Problem::new();
    // SAFETY: as above.
    let mut options: rapt_options = unsafe { std::mem::zeroed() };
    options.size = size_of::<rapt_options>();
    // It is refused before it is read.
    options.k_codes = std::ptr::dangling();
    let (code, said) = problem.run(&queue, &raw const options);
    assert!(code == rapt_error::RAPT_ERROR_UNSUPPORTED && said.contains("codes"), "{code:?}: {said}");
    assert!(queue.0.borrow().is_empty());
}

#[test]
#[cfg(not(all(target_os = "macos", feature = "metal")))]
fn without_metal_nothing_is_made_and_the_error_says_why() {
    let mut metal = std::ptr::null_mut();
    let mut queue = 0u64;
    // SAFETY: nothing is asked of the queue here.
    let code = unsafe { rapt_metal_create((&raw mut queue).cast(), &raw mut metal) };
    assert!(
        code == rapt_error::RAPT_ERROR_DEVICE && metal.is_null() && said().contains("feature `metal`"),
        "{}",
        said()
    );
    // SAFETY: NULL is safe everywhere.
    unsafe {
        assert_eq!(rapt_metal_create(std::ptr::null_mut(), &raw mut metal), rapt_error::RAPT_ERROR_POINTER);
        assert_eq!(rapt_metal_create((&raw mut queue).cast(), std::ptr::null_mut()), rapt_error::RAPT_ERROR_POINTER);
        let none = null();
        assert_eq!(rapt_metal_attention(null(), none, none, none, none, null()), rapt_error::RAPT_ERROR_POINTER);
        assert!(said().contains("metal is NULL"));
        rapt_metal_destroy(std::ptr::null_mut());
    }
}
