//! The proof at the boundary, for every instruction set of this machine: at least 100,000 problems, counted and printed.

use std::io::Write;
use std::time::Instant;

use rapt_core::{Arch, Caps, Operands, SerialExecutor, Workspace};
use rapt_testkit::{Engine, Proof, proof};

const LEAST: usize = 100_000;

fn engine(arch: Arch) -> Box<Engine<'static>> {
    let mut workspace = Workspace::new();
    Box::new(move |spec, tensors| {
        let plan = rapt_cpu::select(spec, &Caps { arch, threads: 1, clock_hz: None })?;
        workspace.ensure(plan.workspace_bytes())?;
        let mut operands = Operands::check(tensors, spec)?;
        plan.certificate(&operands)?;
        rapt_cpu::run(&plan, &mut operands, &mut workspace, &SerialExecutor)
    })
}

#[test]
fn a_hundred_thousand_problems_between_pages() {
    rapt_cpu::tile_every_request();
    let start = Instant::now();
    let engines = || rapt_cpu::available().iter().map(|&arch| engine(arch)).collect();
    let all = proof(&engines, &Proof { quantized: 500, int8: 500, ..Proof::default() })
        .unwrap_or_else(|failure| panic!("{}: {failure}", rapt_cpu::available()[failure.engine].name()));
    assert_eq!(all.count("unsupported"), 0);
    let names: Vec<&str> = rapt_cpu::available().iter().map(|arch| arch.name()).collect();
    // Past the capture of the test harness: the count is part of what a run says.
    let seconds = start.elapsed().as_secs();
    let _ = writeln!(std::io::stderr(), "proof on {}: {all}; {seconds} s", names.join(" and "));
    assert!(all.count("problems") >= LEAST && all.count("quantized") > 0 && all.count("int8") > 0, "{all}");
    assert_eq!(all.count("guard page"), all.count("problems"));
}
