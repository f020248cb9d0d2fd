//! New keys become the codes and factors that rapt-quant makes of them: the device's arithmetic, compiled for the host, on groups of
//! numbers of every size. Needs a C++ compiler (`CXX`, else `c++`), as
//! Unix has it.
#![cfg(unix)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use rapt_core::{DType, Format, Granularity, ScaleLayout, View};
use rapt_quant::{Quantized, Scheme, quantize, quantize_with_global};

/// kernels/common/encode.cuh, compiled for this machine, once for all tests. No sum is fused with its product, as none that is rounded
/// follows one there.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("encode");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas"]).arg("-I").arg(own.join("kernels"));
    command.arg(format!("-DSTORAGE={}", DType::F32.code())).args(["-DMASK=0", "-DMASK_DTYPE=0"]);
    let output = command.arg(own.join("tests/host/encode.cpp")).arg("-o").arg(&program).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", compiler.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
});

/// What a device makes of a group.
#[derive(Debug, PartialEq)]
struct Encoded {
    factor: u32,
    zero_point: u32,
    codes: Vec<u32>,
}

fn encoded(format: Format, global: f32, groups: &[Vec<f64>]) -> Vec<Encoded> {
    // CodeKind, as kernels/common/codes.cuh numbers it.
    let kind: i32 = match format {
        Format::Int8 => 1,
        Format::Uint8 => 2,
        Format::Int4 => 3,
        Format::E4m3fn | Format::Mxfp8 => 4,
        Format::E5m2 => 5,
        Format::Mxfp4 | Format::Nvfp4 => 6,
    };
    let mut bytes = Vec::new();
    for group in groups {
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(i32::from(format.scale_dtype().code()).to_ne_bytes());
        bytes.extend(global.to_ne_bytes());
        bytes.extend((group.len() as i32).to_ne_bytes());
        group.iter().for_each(|x| bytes.extend(x.to_ne_bytes()));
    }
    let mut child = Command::new(&*PROGRAM).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let of = |line: &str| {
        let mut numbers = line.split(' ').map(|number| number.parse().unwrap());
        let (factor, zero_point) = (numbers.next().unwrap(), numbers.next().unwrap());
        Encoded { factor, zero_point, codes: numbers.collect() }
    };
    text.lines().map(of).collect()
}

/// What rapt-quant makes of it; `None` where it refuses.
fn expected(format: Format, global: f32, group: &[f64]) -> Option<Encoded> {
    let granularity = format.own_block_size().map_or(Granularity::Token, Granularity::Block);
    let scheme = Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap();
    let x = View::contiguous("x", group, [1, group.len()].into()).unwrap();
    let made: Quantized =
        if format.has_global_scale() { quantize_with_global(&x, scheme, global) } else { quantize(&x, scheme, None) }
            .ok()?;
    let factor = made.scale_f32().map_or_else(|| u32::from(made.scale_bytes().unwrap()[0]), |scale| scale[0].to_bits());
    let per_byte = format.codes_per_byte();
    let code = |d: usize| match per_byte {
        1 => u32::from(made.codes()[d]),
        _ => u32::from(made.codes()[d / 2] >> (d % 2 * 4) & 0xf),
    };
    Some(Encoded {
        factor,
        zero_point: made.zero_point().map_or(0, |zero_point| u32::from(zero_point[0])),
        codes: (0..group.len()).map(code).collect(),
    })
}

/// Groups of numbers of every size and of both signs, those that tie, and those that are all zero.
fn groups(format: Format) -> Vec<Vec<f64>> {
    let len = format.own_block_size().unwrap_or(24);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut groups = vec![vec![0.0; len], vec![-0.0; len]];
    for n in 0..4000 {
        // From the least subnormal number of float32 to its largest, by groups; within a group over 2^12.
        let top = n % 275 - 148;
        let group = (0..len).map(|_| {
            let bits = random();
            let mantissa = 1.0 + (bits >> 40) as f64 / f64::from(1 << 24);
            let size = mantissa * 2f64.powi((top - (bits >> 8 & 0xff) as i32 % 12).max(-149));
            // As a number of 24 bits, which new keys are; now and then a whole one, at which codes tie.
            let x = f64::from(if bits & 0x70 == 0 { (size * 8.0 / 2f64.powi(top)).round() * 0.5 } else { size } as f32);
            if bits & 1 == 0 { -x } else { x }
        });
        groups.push(group.collect());
    }
    groups
}

#[test]
fn every_group_has_the_codes_and_the_factor_of_rapt_quant() {
    for format in Format::ALL {
        let groups = groups(format);
        for global in if format.has_global_scale() { vec![1.0, 3e-5, 7e30, 1e-38] } else { vec![1.0] } {
            let found = encoded(format, global, &groups);
            assert_eq!(found.len(), groups.len());
            let mut refused = 0;
            for (found, group) in found.iter().zip(&groups) {
                match expected(format, global, group) {
                    Some(expected) => assert_eq!(*found, expected, "{format} {global:e} of {group:?}"),
                    None => {
                        refused += 1;
                        assert!(is_nan(format, found.factor), "{format} {global:e} of {group:?}: {found:?}");
                    }
                }
            }
            // A factor of the tensor bounds what may lie beside it.
            let most = if format.has_global_scale() { groups.len() - 100 } else { 0 };
            assert!(refused <= most, "{format} {global:e}: {refused} were refused");
        }
    }
}

fn is_nan(format: Format, factor: u32) -> bool {
    match format.scale_dtype() {
        DType::F32 => f32::from_bits(factor).is_nan(),
        DType::F8E8M0FNU => factor == 255,
        _ => factor == 0x7f,
    }
}

#[test]
fn what_is_not_finite_has_its_code_or_a_factor_that_is_nan() {
    for format in Format::ALL {
        let len = format.own_block_size().unwrap_or(24);
        for odd in [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut group = vec![1.5; len];
            group[7] = odd;
            let found = &encoded(format, 1.0, &[group.clone()])[0];
            match expected(format, 1.0, &group) {
                Some(expected) => assert_eq!(*found, expected, "{format} {odd}"),
                None => assert!(is_nan(format, found.factor), "{format} {odd}: {found:?}"),
            }
            assert_eq!(is_nan(format, found.factor), !format.has_nan(), "{format} {odd}");
        }
    }
}
