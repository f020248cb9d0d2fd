//! What gradients with softcap find of a weight again: the device's arithmetic, compiled for the host. Needs a C++ compiler (`CXX`, else `c++`), as
//! Unix has it.
#![cfg(unix)]

use std::path::Path;
use std::process::Command;

/// Lines of cap, score, lse, p and what the score rises by.
fn printed() -> Vec<[f64; 5]> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("exponents");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas"]).arg("-I").arg(own.join("kernels"));
    command.arg(format!("-DSTORAGE={}", rapt_core::DType::BF16.code()));
    command.args(["-DMASK=0", "-DMASK_DTYPE=0", "-DNATURAL=1"]);
    let output = command.arg(own.join("tests/host/exponents.cpp")).arg("-o").arg(&program).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", compiler.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers = |line: &str| line.split(' ').map(|number| number.parse().unwrap()).collect::<Vec<f64>>();
    text.lines().map(|line| numbers(line).try_into().unwrap()).collect()
}

#[test]
fn a_score_rises_by_what_softcap_lets_through() {
    let lines = printed();
    assert_eq!(lines.len(), 5 * 8 * 5);
    for [cap, score, lse, p, rises] in lines {
        let at = format!("cap {cap}, score {score}, lse {lse}: p {p}, rises by {rises}");
        // Times it a weight of 0 stays 0: of rows behind the last, and of those that attend nothing, lse is infinite.
        assert!(rises.is_finite(), "{at}");
        if p == 0.0 {
            continue;
        }
        let t = (score / cap).tanh();
        // Of a logarithm, of lse and of their sum in float32, in units of the cap.
        let off = 4e-7 * (1.0 + lse.abs() + p.log2().abs()) / cap + 1e-6;
        assert!((rises - (1.0 - t * t)).abs() <= 2.0 * off, "{at}, not {}", 1.0 - t * t);
    }
}
