//! What a call from C costs above the kernel: the same tiny problem through rapt_attention() and through the Rust library.
//!
//! ```text
//! kernel = run on an executor that works − run on one that does not
//! above  = rapt_attention − kernel
//! ```
//! The least of many rounds, each a mean over many calls: what is left is the code's own time, not the machine's.

use std::ffi::c_void;
use std::hint::black_box;
use std::time::Instant;

use engine::{Engine, Executor, Operands, Options, Queue, Result, Tensors, View, ViewMut};
use rapt_c::{
    rapt_attention, rapt_device, rapt_dtype, rapt_engine_create, rapt_engine_destroy, rapt_error, rapt_tensor,
};

const SHAPE: [i64; 4] = [1, 2, 1, 8];
const STRIDES: [i64; 4] = [16, 8, 8, 1];
const ROUNDS: usize = 200;
const CALLS: usize = 2_000;
/// Outputs in turn, for calls that were not seen before: far more than an engine remembers.
const OUTPUTS: usize = 10_000;

/// Calls the work, and nothing else.
struct Bare;
/// Calls nothing.
struct Idle;

impl Executor for Bare {
    fn threads(&self) -> usize {
        1
    }
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        (0..chunks).for_each(work);
        Ok(())
    }
}

impl Executor for Idle {
    fn threads(&self) -> usize {
        1
    }
    fn parallel_for(&self, _: usize, _: &(dyn Fn(usize) + Sync)) -> Result<()> {
        Ok(())
    }
}

/// Nanoseconds of one call: the least over rounds.
fn least_ns(mut call: impl FnMut()) -> f64 {
    let round = |_| {
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        start.elapsed().as_secs_f64() * 1e9 / CALLS as f64
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

fn tensor(data: *const f32) -> rapt_tensor {
    rapt_tensor {
        data: data.cast_mut().cast::<c_void>(),
        dtype: rapt_dtype::RAPT_DTYPE_F32 as i32,
        device: rapt_device::RAPT_DEVICE_CPU as i32,
        device_index: 0,
        ndim: 4,
        shape: SHAPE.as_ptr(),
        strides: STRIDES.as_ptr(),
        storage_bytes: 64,
        storage: std::ptr::null(),
    }
}

fn main() -> Result<()> {
    let shape = SHAPE.map(|n| n as usize).into();
    let input: Vec<f32> = (0..16).map(|n| n as f32 / 16.0).collect();
    let mut result = vec![0f32; 16 * OUTPUTS];

    let c_engine = rapt_engine_create(1);
    let q = tensor(input.as_ptr());
    let call = |out: &rapt_tensor| {
        // SAFETY: an engine that is alive, and tensors that are what they say.
        let answer = unsafe { rapt_attention(c_engine, &q, &q, &q, out, std::ptr::null()) };
        assert_eq!(black_box(answer), rapt_error::RAPT_OK);
    };
    let outputs: Vec<rapt_tensor> = result.chunks_exact_mut(16).map(|out| tensor(out.as_mut_ptr())).collect();
    let seen = least_ns(|| call(&outputs[0]));
    let mut turn = outputs.iter().cycle();
    let unseen = least_ns(|| turn.next().into_iter().for_each(call));
    // SAFETY: made above, and used no more.
    unsafe { rapt_engine_destroy(c_engine) };

    let engine = Engine::new(Some(1))?;
    let view = View::contiguous("q", &input, shape)?;
    let options = Options::default();
    let mut tensors = || -> Result<Tensors<'_>> {
        // SAFETY: written by nobody else while these live, one after the other.
        let out = unsafe { std::slice::from_raw_parts_mut(result.as_mut_ptr(), 16) };
        let out = ViewMut::contiguous("out", out, shape)?;
        Ok(Tensors::new(view, view, view, out))
    };
    let rust = least_ns(|| {
        let answer = tensors().and_then(|tensors| engine.attention_into(tensors, &options));
        assert!(black_box(answer).is_ok());
    });
    let plan = engine.plan(&engine::spec_of(&tensors()?, &options)?)?;
    let mut operands = Operands::check(tensors()?, plan.spec())?;
    let run = least_ns(|| assert!(black_box(engine.run(&plan, &mut operands)).is_ok()));
    // Work that an executor leaves undone is an error, after all but the kernel has run.
    let mut run_on = |executor: &dyn Executor, works: bool| {
        let mut run = || black_box(engine.run_on(&plan, &mut operands, &Queue::Host(executor))).is_ok();
        least_ns(|| assert_eq!(run(), works))
    };
    let kernel = run_on(&Bare, true) - run_on(&Idle, false);

    println!("[1, 2, 1, 8] float32, {} on {}, one thread", plan.key().kernel.name(), engine.caps().arch.name());
    println!("                                            ns     above the kernel");
    let print = |what: &str, ns: f64| println!("{what:38}  {ns:6.0}  {:6.0}", ns - kernel);
    print("kernel", kernel);
    print("Engine::run, planned and proven", run);
    print("rapt_attention, seen before", seen);
    print("rapt_attention, new addresses", unseen);
    print("Engine::attention_into", rust);
    Ok(())
}
