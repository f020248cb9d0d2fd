//! Every input of the checked-in corpus, and mutations of it, through its target: the stable compiler's share of fuzzing.
#![allow(missing_docs)]

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use rapt_fuzz::{TARGETS, Target, mutate};

/// Mutations per input.
const MUTATIONS: usize = 250;
/// The same where each loads a program: a hundred of them take as long as ten thousand of the others.
const MUTATIONS_OF_PROGRAMS: usize = 30;
/// The same where each is up to 24 steps.
const MUTATIONS_OF_STEPS: usize = 60;

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut inputs: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("a corpus file").path())
        .map(|path| (path.display().to_string(), std::fs::read(&path).expect("a corpus file")))
        .collect();
    inputs.sort();
    inputs
}

fn replay(name: &str, target: Target) {
    let start = Instant::now();
    let inputs = corpus(name);
    assert!(inputs.len() >= 20, "{name}: {} inputs", inputs.len());
    let mutations = match name {
        "c_model" => MUTATIONS_OF_PROGRAMS,
        "sequences" => MUTATIONS_OF_STEPS,
        _ => MUTATIONS,
    };
    let (mut state, mut ran, mut accepted) = (0x7a97, 0, 0);
    for (path, data) in &inputs {
        // A panic names no input by itself.
        let run = |data: &[u8]| match std::panic::catch_unwind(|| target(data)) {
            Ok(accepted) => usize::from(accepted),
            Err(panic) => {
                eprintln!("{name}: {path}, as {data:?}");
                std::panic::resume_unwind(panic)
            }
        };
        accepted += run(data);
        ran += 1 + mutations;
        for _ in 0..mutations {
            accepted += run(&mutate(data, &mut state));
        }
    }
    // Past the capture of the test harness: the count is part of what a run says.
    let (inputs, seconds) = (inputs.len(), start.elapsed().as_secs_f64());
    let _ = writeln!(std::io::stderr(), "{name}: {inputs} inputs, {ran} problems, {accepted} accepted, {seconds:.1} s");
    assert!(accepted * 10 > ran, "{name}: only {accepted} of {ran} were accepted: the generator lost its way");
}

#[test]
fn the_corpus_of_every_target_is_replayed() {
    for (name, target) in TARGETS {
        replay(name, target);
    }
}

#[test]
fn the_empty_input_is_no_panic() {
    for (_, target) in TARGETS {
        target(&[]);
    }
}
