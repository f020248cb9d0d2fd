//! Many threads at once, and executors that fail: the same bits, typed errors, no deadlock, and an engine that lives on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Barrier, mpsc};
use std::time::Duration;

use rapt::{Engine, Error, Executor, Operands, Options, Pool, Queue, Result, Spec, Tensors, View, ViewMut};

const SHAPE: [usize; 4] = [2, 3, 140, 24];
const LEN: usize = 2 * 3 * 140 * 24;

fn values() -> Vec<f32> {
    (0..LEN).map(|n| ((n * 37) % 101) as f32 / 50.0 - 1.0).collect()
}

fn tensors<'a>(q: &View<'a>, out: &'a mut [f32], shape: [usize; 4]) -> Tensors<'a> {
    let out = ViewMut::contiguous("out", out, shape.into()).unwrap();
    Tensors::new(*q, *q, *q, out)
}

/// Runs `work` and fails, rather than hangs, if it takes too long.
fn in_time(work: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let ended = catch_unwind(AssertUnwindSafe(work));
        let _ = done.send(());
        ended
    });
    wait.recv_timeout(Duration::from_secs(120)).expect("no deadlock");
    if let Err(panic) = thread.join().expect("caught inside") {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn sixteen_threads_on_shared_inputs_get_the_bits_of_one() {
    in_time(|| {
        let data = values();
        let q = View::contiguous("q", &data, SHAPE.into()).unwrap();
        let expected = rapt::attention(&q, &q, &q, &Options::default()).unwrap().to_vec::<f32>().unwrap();
        // One engine, one pool, one cache of plans; and the default engine beside it.
        let (engine, start) = (Engine::new(Some(3)).unwrap(), Barrier::new(16));
        std::thread::scope(|scope| {
            for n in 0..16usize {
                let (engine, start, expected) = (&engine, &start, &expected);
                scope.spawn(move || {
                    start.wait();
                    for round in 0..12usize {
                        let mut out = vec![f32::NAN; LEN];
                        if (n + round).is_multiple_of(3) {
                            out = rapt::attention(&q, &q, &q, &Options::default()).unwrap().to_vec::<f32>().unwrap();
                        } else {
                            engine.attention_into(tensors(&q, &mut out, SHAPE), &Options::default()).unwrap();
                        }
                        assert!(out == *expected, "thread {n}, round {round}");
                    }
                });
            }
        });
    });
}

#[test]
fn the_cache_of_plans_turns_over_while_others_read_it() {
    in_time(|| {
        let (data, engine, start) = (values(), Engine::new(Some(2)).unwrap(), Barrier::new(16));
        std::thread::scope(|scope| {
            for n in 0..16usize {
                let (data, engine, start) = (&data, &engine, &start);
                scope.spawn(move || {
                    start.wait();
                    for round in 0..150 {
                        // 2,400 requests that differ in their scale alone; the cache holds 1,024.
                        let shape = [1, 1, 4, 8];
                        let q = View::contiguous("q", &data[..32], shape.into()).unwrap();
                        let options = Options::default().with_softmax_scale((n * 150 + round) as f64 / 1e3);
                        let (mut once, mut twice) = (vec![0f32; 32], vec![1f32; 32]);
                        engine.attention_into(tensors(&q, &mut once, shape), &options).unwrap();
                        engine.attention_into(tensors(&q, &mut twice, shape), &options).unwrap();
                        assert_eq!(once, twice);
                    }
                });
            }
        });
    });
}

/// What an executor does with the work that it is given.
type Deal = fn(&Pool, usize, &(dyn Fn(usize) + Sync)) -> Result<()>;

struct Faulty {
    pool: Pool,
    deal: Deal,
}

impl Executor for Faulty {
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        (self.deal)(&self.pool, chunks, work)
    }
}

/// Runs on `engine` with an executor that deals work by `deal`; the operands are sound either way.
fn run_with(engine: &Engine, threads: usize, deal: Deal) -> Result<Vec<f32>> {
    let (data, mut out) = (values(), vec![f32::NAN; LEN]);
    let q = View::contiguous("q", &data, SHAPE.into())?;
    let spec = Spec::builder(&q, &q, &q, &Options::default()).build()?;
    let plan = engine.plan_for(&spec, threads)?;
    let executor = Faulty { pool: Pool::new(threads), deal };
    engine.run_on(&plan, &mut Operands::check(tensors(&q, &mut out, SHAPE), &spec)?, &Queue::Host(&executor))?;
    Ok(out)
}

#[test]
fn executors_that_fail_are_errors_and_the_engine_lives_on() {
    in_time(|| {
        let engine = Engine::new(Some(2)).unwrap();
        let honest: Deal = |pool, chunks, work| pool.parallel_for(chunks, work);
        let expected = run_with(&engine, 2, honest).unwrap();
        for threads in [1, 2, 5] {
            // A worker panics after its work, before it, and only one of them.
            let panics: [(&str, Deal); 3] = [
                ("after the work", |pool, chunks, work| {
                    pool.parallel_for(chunks, &|n| {
                        work(n);
                        panic!("after the work");
                    })
                }),
                ("instead of it", |pool, chunks, _| pool.parallel_for(chunks, &|_| panic!("instead of it"))),
                ("the last chunk", |pool, chunks, work| {
                    pool.parallel_for(chunks, &|n| {
                        assert!(n + 1 < chunks, "the last chunk");
                        work(n);
                    })
                }),
            ];
            for (says, deal) in panics {
                let error = run_with(&engine, threads, deal).unwrap_err();
                assert_eq!(error, Error::WorkerPanicked { message: says.into() });
                assert!(run_with(&engine, threads, honest).unwrap() == expected, "the next call is served");
            }
            // It runs nothing and says that it is done.
            match run_with(&engine, threads, |_, _, _| Ok(())) {
                Err(Error::WorkLeftUndone { done: 0, items }) => assert!(items > 0),
                other => panic!("{other:?}"),
            }
            // Its own error comes through.
            let out_of = |_: &Pool, _: usize, _: &(dyn Fn(usize) + Sync)| Err(Error::OutOfMemory { bytes: 1 });
            assert_eq!(run_with(&engine, threads, out_of).unwrap_err(), Error::OutOfMemory { bytes: 1 });
            // One worker for all, and each chunk twice: unusual, and the answer is right.
            let alone: Deal = |_, _, work| {
                work(0);
                Ok(())
            };
            let twice: Deal = |pool, chunks, work| pool.parallel_for(2 * chunks, &|n| work(n % chunks));
            for deal in [alone, twice] {
                assert!(run_with(&engine, threads, deal).unwrap() == expected);
            }
            // A panic of the executor itself unwinds through the engine, to its caller and no further.
            let unwinds: Deal = |_, _, _| panic!("the executor itself");
            assert!(catch_unwind(AssertUnwindSafe(|| run_with(&engine, threads, unwinds))).is_err());
            assert!(run_with(&engine, threads, honest).unwrap() == expected);
        }
    });
}
