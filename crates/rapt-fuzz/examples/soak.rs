//! Runs a target on mutations of its corpus until enough of them were accepted: `soak TARGET ACCEPTED [SEED]`.
//!
//! The stable compiler's fuzzing: no feedback from coverage, and a hundred times the speed. Inputs are mutated, crossed and
//! extended; the seed names the run.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use rapt_fuzz::{TARGETS, mutate, next};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let found = words.first().and_then(|name| TARGETS.iter().find(|(known, _)| known == name));
    let (Some(&(name, target)), Some(Ok(goal))) = (found, words.get(1).map(|n| n.parse::<u64>())) else {
        let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
        eprintln!("soak TARGET ACCEPTED [SEED]; the targets are {}", names.join(", "));
        return ExitCode::from(2);
    };
    let mut state = words.get(2).and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut inputs: Vec<Vec<u8>> = files.filter_map(|file| std::fs::read(file.path()).ok()).collect();
    inputs.sort();
    inputs.push(Vec::new());
    let (start, mut ran, mut accepted) = (Instant::now(), 0u64, 0u64);
    while accepted < goal {
        let pick = |state: &mut u64| &inputs[(next(state) % inputs.len() as u64) as usize];
        let mut data = pick(&mut state).clone();
        if next(&mut state).is_multiple_of(4) {
            let other = pick(&mut state);
            data.truncate((next(&mut state) % (data.len() as u64 + 1)) as usize);
            data.extend_from_slice(&other[(next(&mut state) % (other.len() as u64 + 1)) as usize..]);
        }
        let data = mutate(&data, &mut state);
        match std::panic::catch_unwind(|| target(&data)) {
            Ok(yes) => accepted += u64::from(yes),
            Err(_) => {
                eprintln!("{name}: problem {ran} breaks a promise: {data:?}");
                return ExitCode::FAILURE;
            }
        }
        ran += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{name}: {ran} problems, {accepted} accepted, {seconds:.0} s");
    ExitCode::SUCCESS
}
