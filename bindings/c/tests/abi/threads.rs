//! One engine, many threads: results are those of one thread, to the bit, and errors stay with their thread.

use std::sync::Barrier;

use crate::support::{Call, Owned, last_error};
use rapt_c::rapt_error;

const THREADS: u32 = 16;

fn bits(call: &Call) -> Vec<u32> {
    call.outputs().into_iter().flatten().map(|x| x.to_bits()).collect()
}

fn alone(seed: u32) -> Vec<u32> {
    let engine = Owned::new(1);
    let call = Call::new(&engine, seed);
    assert_eq!(call.run(), rapt_error::RAPT_OK, "{}", last_error());
    bits(&call)
}

#[test]
fn sixteen_threads_share_an_engine() {
    let engine = Owned::new(2);
    let start = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for seed in 0..THREADS {
            let (engine, start) = (&engine, &start);
            scope.spawn(move || {
                let expected = alone(seed);
                let call = Call::new(engine, seed);
                let mut bad = Call::new(engine, seed);
                bad.options.causal = 100 + seed as i32;
                start.wait();
                for _ in 0..200 {
                    assert_eq!(call.run(), rapt_error::RAPT_OK, "{}", last_error());
                    assert_eq!(bits(&call), expected);
                    assert_eq!(bad.run(), rapt_error::RAPT_ERROR_OPTION);
                    assert!(last_error().contains(&format!("causal = {}", 100 + seed)), "{}", last_error());
                }
            });
        }
    });
}

/// Inputs may be shared; only outputs are anyone's own.
#[test]
fn sixteen_threads_read_the_same_inputs() {
    let engine = Owned::new(2);
    let inputs = Call::new(&engine, 7);
    let expected = alone(7);
    let addresses = inputs.tensors.map(|tensor| tensor.data.expose_provenance());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let (engine, expected) = (&engine, &expected);
            scope.spawn(move || {
                let mut call = Call::new(engine, 8);
                for at in [
                    crate::support::Q,
                    crate::support::K,
                    crate::support::V,
                    crate::support::MASK,
                    crate::support::SINKS,
                    crate::support::SLOPES,
                ] {
                    call.tensors[at].data = std::ptr::with_exposed_provenance_mut(addresses[at]);
                }
                for _ in 0..200 {
                    assert_eq!(call.run(), rapt_error::RAPT_OK, "{}", last_error());
                    assert_eq!(&bits(&call), expected);
                }
            });
        }
    });
}

/// Engines come and go while others work: what one remembers is its own.
#[test]
fn engines_come_and_go() {
    let expected = alone(9);
    std::thread::scope(|scope| {
        for threads in 1..=4 {
            let expected = &expected;
            scope.spawn(move || {
                for _ in 0..20 {
                    let engine = Owned::new(threads);
                    let call = Call::new(&engine, 9);
                    assert_eq!(call.run(), rapt_error::RAPT_OK, "{}", last_error());
                    assert_eq!(&bits(&call), expected);
                }
            });
        }
    });
}
