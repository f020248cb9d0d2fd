//! Every kernel of every instruction set of this machine against the definition, and against itself on other threads.
//!
//! `RAPT_REQUIRE=avx512` makes a missing instruction set a failure; otherwise it is counted and printed.

use rapt_core::{Arch, Caps, Executor, Operands, Result, SerialExecutor, Spec, Tensors, Workspace};
use rapt_testkit::{Config, Engine, conformance};

/// Two threads by `std::thread`, so that this crate needs no pool.
struct TwoThreads;

impl Executor for TwoThreads {
    fn threads(&self) -> usize {
        2
    }
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        std::thread::scope(|scope| {
            for chunk in 0..chunks {
                scope.spawn(move || work(chunk));
            }
        });
        Ok(())
    }
}

fn engine(arch: Arch, executor: &dyn Executor) -> Box<Engine<'_>> {
    let mut workspace = Workspace::new();
    Box::new(move |spec: &Spec, tensors: Tensors<'_>| {
        let plan = rapt_cpu::select(spec, &Caps { arch, threads: executor.threads(), clock_hz: None })?;
        workspace.ensure(plan.workspace_bytes())?;
        rapt_cpu::run(&plan, &mut Operands::check(tensors, spec)?, &mut workspace, executor)
    })
}

/// What `RAPT_REQUIRE` may name besides instruction sets: the C step of `cargo xtask test` looks for these,
/// and those of GPUs for their compiler, a device and a driver.
const TOOLS: [&str; 8] = ["cc", "c++", "pkg-config", "valgrind", "asan", "nvrtc", "cuda", "vulkan"];

#[test]
fn every_instruction_set_conforms() {
    rapt_cpu::tile_every_request();
    for name in std::env::var("RAPT_REQUIRE").unwrap_or_default().split(',').filter(|name| !name.is_empty()) {
        let found = rapt_cpu::available().iter().any(|arch| arch.name() == name);
        let is_of_others = name.starts_with("sm") || TOOLS.contains(&name);
        assert!(found || is_of_others, "RAPT_REQUIRE asks for {name}, which this machine lacks");
    }
    let available = rapt_cpu::available();
    let mut engines: Vec<_> = available.iter().map(|&arch| engine(arch, &SerialExecutor)).collect();
    let report = conformance(
        &mut engines,
        &Config { problems: 1500, dropout: 400, quantized: 500, int8: 1000, ..Config::default() },
    )
    .unwrap_or_else(|failure| panic!("{}: {failure}", available[failure.engine].name()));
    println!("{available:?}: {report:?}");
    assert!(report.count("random") >= 1500 * available.len());
    assert_eq!((report.count("quantized"), report.count("unsupported")), (500 * available.len(), 0));
    assert_eq!(report.count("int8"), 1000 * available.len());
    assert_eq!(report.count("dropout"), 400 * available.len());
}

#[test]
fn two_threads_conform() {
    rapt_cpu::tile_every_request();
    let arch = *rapt_cpu::available().last().expect("the scalar path is always there");
    let config =
        Config { seed: 99, problems: 250, dropout: 50, max_work: 20_000_000, fixed: false, ..Config::default() };
    conformance(&mut [engine(arch, &TwoThreads)], &config).unwrap_or_else(|failure| panic!("{failure}"));
}
