//! Memory that cannot be had: a typed error before anything is written, and an engine that serves the next call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use rapt::{Engine, Error, ErrorKind, Options, Tensors, View, ViewMut};

/// Refuses what is larger than [`LIMIT`].
struct Scarce;

static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

// SAFETY: the system's allocator, or null.
unsafe impl GlobalAlloc for Scarce {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LIMIT.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LIMIT.load(Ordering::Relaxed) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Scarce = Scarce;

/// What `run` answers while no allocation of more than `bytes` succeeds.
fn scarce<T>(bytes: usize, run: impl FnOnce() -> T) -> T {
    LIMIT.store(bytes, Ordering::Relaxed);
    let answer = run();
    LIMIT.store(usize::MAX, Ordering::Relaxed);
    answer
}

// One test: the limit is the whole process's.
#[test]
fn what_cannot_be_allocated_is_an_error_and_the_engine_lives_on() {
    let shape = [1, 4, 130, 64];
    let q: Vec<f32> = (0..4 * 130 * 64).map(|n| (n % 17) as f32 / 17.0).collect();
    let q = View::contiguous("q", &q, shape.into()).unwrap();
    let engine = Engine::new(Some(2)).unwrap();
    let attend = |out: &mut Vec<f32>| {
        let out = ViewMut::contiguous("out", out, shape.into()).unwrap();
        let tensors = Tensors::new(q, q, q, out);
        engine.attention_into(tensors, &Options::default())
    };
    let mut out = vec![7f32; 4 * 130 * 64];

    // The workspace of the engine.
    match scarce(1 << 13, || attend(&mut out)) {
        Err(error @ Error::OutOfMemory { bytes }) => {
            assert!(bytes > 1 << 13 && error.kind() == ErrorKind::Device);
            assert!(error.to_string().contains(&bytes.to_string()), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert!(out.iter().all(|x| *x == 7.0), "nothing is written before memory is had");

    // The result of the free function.
    let refused = scarce(1 << 13, || rapt::attention(&q, &q, &q, &Options::default()));
    assert_eq!(refused.unwrap_err(), Error::OutOfMemory { bytes: 4 * 4 * 130 * 64 });

    // With memory again, the same engine serves the same request.
    attend(&mut out).unwrap();
    let expected = rapt::attention(&q, &q, &q, &Options::default()).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(out, expected);
    // And once it has its workspace it needs no more of it: a run allocates nothing that large.
    out.fill(7.0);
    scarce(1 << 13, || attend(&mut out)).unwrap();
    assert_eq!(out, expected);

    // Asked for what no machine has: a window over keys that strides of 0 repeat.
    let element = [0.5f32; 64];
    let kv = View::strided("k", &element, 0, [1, 4, 1 << 55, 64].into(), [0, 0, 0, 1].into()).unwrap();
    let mut one = vec![7f32; 4 * 64];
    let q = View::strided("q", &element, 0, [1, 4, 1, 64].into(), [0, 0, 0, 1].into()).unwrap();
    let out = ViewMut::contiguous("out", &mut one, [1, 4, 1, 64].into()).unwrap();
    let tensors = Tensors::new(q, kv, kv, out);
    assert!(matches!(engine.attention_into(tensors, &Options::default()), Err(Error::OutOfMemory { .. })));
    assert!(one.iter().all(|x| *x == 7.0));
}
