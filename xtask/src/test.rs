//! Everything that must hold before a change is taken.
//!
//! ```text
//! fmt ─┬─► build what compiles kernels ─► clippy ─► build the tests ─► tidy ─► cargo test ──────────────────────────────┬─► pytest
//!      └─► uv ─► kernels by NVRTC ───────────────────────────┴─► wheel ─► the kernels that tests ask for ─► docs ─► C ─► Vulkan ─┘
//! ```
//! Two sides at once, because NVRTC and installers each keep one core busy at most. The lower one builds in `target/debug`, which cargo
//! locks, only when the tests are built; from then on it has what else takes one core, so that both end at about the same time. pytest
//! runs alone, as some of its tests take the time, and from a wheel around the library of the tests' build: with its assertions, and
//! without a second compilation of every kernel, which took a tenth of all (2026-12). `cargo xtask wheel` and the demo build a release's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::args::Args;
use crate::cubins::{self, Kernels};
use crate::metadata::{Workspace, root};
use crate::python::{BINDING, BUILD_REQUIREMENTS, RAPT, Venv};
use crate::shell::{Failure, Outcome, cargo, say, show, side_by_side, step};
use crate::{built, c, cross, docs, mlx, platforms, targets, tidy, vulkan, web, wheel};

pub(crate) const HELP: &str = "\
cargo xtask test [--gpu | --torch VERSION | --archives VERSION | --target PLATFORM [PACKAGE]...]

Formatting, lints, tidy, the documentation, the Rust tests, C programs against the C library, the backend for Vulkan on
lavapipe, and pytest from an installed wheel, which is checked.

  --gpu             only what takes too long for every change: kernels for CUDA in every size; kernels for Metal, every
                    variant, compiled as C++ and run; the backend for Vulkan with its whole suite, on lavapipe and on the
                    first adapter of the machine's own drivers if it has any; the package for browsers with its whole
                    suite; and exported programs in every form (RAPT_WHOLE=1). All of them run, and what failed is listed
                    at the end. Hours on two cores
  --torch VERSION   only pytest, against that torch (such as 2.6 or 2.6.0), in an environment of its own
                    (.venv-torch-VERSION)
  --archives VERSION
                    only archives: that torch exports the program zoo, and the wheel that `cargo xtask test` installed runs it
                    beside its own torch
  --target PLATFORM [PACKAGE]...
                    only the Rust tests, the C programs and the command line, compiled for x86_64-pc-windows-gnu and run by
                    wine, or for aarch64-unknown-linux-gnu and run by qemu, out of Debian's packages below target/cross; or
                    only those of these packages, such as rapt-cpu. An hour on two cores";

const NUMPY: &str = "demo/requirements-numpy.txt";
const TORCH: &str = "demo/requirements-torch.txt";
const TEST: &str = "xtask/requirements/test.txt";
/// What the suite needs beside an older torch: without pins, because the newest need not work with it.
const OLDER: &str = "xtask/requirements/test-older-torch.txt";

/// What the tests of rapt-cuda that compile kernels have in their names.
const COMPILE_TESTS: &str = "compile_and_the_hot_ones_do_not_spill";

/// Processes of pytest, at most: each holds a torch of its own. One more than cores, as many tests wait for a process of theirs.
const MOST_WORKERS: usize = 4;

/// Where the side that is not in view writes, below the target folder.
const LOG: &str = "tmp/beside.log";

pub(crate) fn run(mut args: Args) -> Outcome {
    let (is_gpu, torch, archives) = (args.flag("--gpu"), args.value("--torch")?, args.value("--archives")?);
    if let Some(triple) = args.value("--target")? {
        return cross::run(&triple, args);
    }
    args.finish(HELP)?;
    match (is_gpu, torch, archives) {
        (true, None, None) => return whole(),
        (false, Some(torch), None) => return pytest_with(&torch),
        (false, None, Some(torch)) => return archives_of(&torch),
        (false, None, None) => {}
        _ => return Err(Failure::Usage("one of --gpu, --torch and --archives".to_owned())),
    }
    step_of("cargo fmt --check", cargo(["fmt", "--all", "--check"]))?;
    let (venv, target) = (&Venv::at(".venv")?, &Workspace::load()?.target);
    let ((has_compiler, compiler), (has_fetched, fetched), (has_tests, tests)) = (channel(), channel(), channel());
    side_by_side(
        &target.join(LOG),
        // Moved in, so that a side that ends drops its ends of the channels and the other does not wait for ever.
        move || rust(&has_compiler, &fetched, &has_tests),
        move || package(venv, target, &compiler, &has_fetched, &tests),
    )?;
    pytest(venv)
}

fn step_of(what: &str, mut command: Command) -> Outcome {
    step(what, || show(command.current_dir(root())))
}

/// What tests read that was fetched, where it is there.
struct Fetched {
    /// The folder of NVRTC.
    nvrtc: Option<PathBuf>,
    /// The headers of MLX.
    mlx: Option<PathBuf>,
}

/// The Rust side. It sends what compiles kernels, and `has_tests` when the tests are built; `fetched` says when the kernels of the wheel
/// are compiled. Where the other side has failed nobody listens and nothing comes: its failure is told in the end.
fn rust(has_compiler: &Sender<PathBuf>, fetched: &Receiver<Fetched>, has_tests: &Sender<()>) -> Outcome {
    let _ = has_compiler.send(step("build what compiles the GPU kernels", cubins::compiler)?);
    step_of("cargo clippy", cargo(docs::LINT))?;
    check_for_macos("rapt-metal", "objc")?;
    step_of("build the tests", cargo(["test", "--workspace", "--no-run"]))?;
    // After the build: one of its rules asks `rapt`.
    step("tidy", tidy::check)?;
    let _ = has_tests.send(());
    let mut test = cargo(["test", "--workspace"]);
    test.env("RAPT_REQUIRE", vulkan::required_of_others());
    if let Ok(Fetched { nvrtc, mlx }) = fetched.recv() {
        test.envs(mlx.map(|headers| ("RAPT_MLX", headers)));
        if let Some(library) = nvrtc {
            // The other side runs those: at the same time here, the two would compile each kernel twice.
            test.env("RAPT_NVRTC", library).args(["--", "--skip", COMPILE_TESTS]);
        }
    }
    step_of("cargo test", test)
}

/// A Mac.
const MACOS: &str = "aarch64-apple-darwin";

/// What only a Mac has, which nothing here runs, as far as a compiler checks it: where Rust's library for one is installed.
fn check_for_macos(package: &str, feature: &str) -> Outcome {
    if !targets::has(MACOS)? {
        say(format_args!("── NOTE: Metal's own objects are not checked: `rustup target add {MACOS}`"));
        return Ok(());
    }
    let check = cargo(["check", "--package", package, "--features", feature, "--target", MACOS]);
    step_of(&format!("check {package} for macOS"), check)
}

/// The Python side: the environment, the wheel's kernels and the wheel, checked and installed. Then, when the tests are built, the
/// compile test of rapt-cuda, alone and ahead of the others, which find its machine code in the cache; the documentation; C; the backend for
/// Vulkan.
fn package(
    venv: &Venv,
    target: &Path,
    compiler: &Receiver<PathBuf>,
    has_fetched: &Sender<Fetched>,
    tests: &Receiver<()>,
) -> Outcome {
    venv.require(&[BUILD_REQUIREMENTS, NUMPY, TORCH, TEST, docs::REQUIREMENTS], None)?;
    let Ok(compiler) = compiler.recv() else { return Ok(()) };
    let library = cubins::ship(venv, target, Kernels::Core, false, || Ok(compiler))?;
    let _ = has_fetched.send(Fetched { nvrtc: library.clone(), mlx: mlx::headers(venv, target)? });
    let Ok(()) = tests.recv() else { return Ok(()) };
    install_built(venv, target)?;
    if let Some(library) = library {
        let mut compile = cargo(["test", "--workspace", "--test", "compile"]);
        compile.env("RAPT_NVRTC", library);
        step_of("compile the GPU kernels that tests ask for", compile)?;
    }
    docs::check(venv, docs::Metadata::Clippy)?;
    c::check()?;
    vulkan::check()
}

/// What takes too long for every change. Each part runs, whatever became of the one before it.
fn whole() -> Outcome {
    let metal = || {
        let mut msl = cargo(["test", "--package", "rapt-shader", "--test", "msl", "--", "--include-ignored"]);
        let headers = mlx::headers(&Venv::existing(".venv")?, &Workspace::load()?.target)?;
        msl.envs(headers.map(|headers| ("RAPT_MLX", headers)));
        step_of("test kernels for Metal, every variant", msl)
    };
    let programs = || {
        let venv = Venv::existing(".venv")?;
        let mut pytest =
            venv.python(["-m", "pytest", "-ra", "-p", "no:cacheprovider", "--dist", "loadfile", "-n", "2"]);
        pytest.args(["-k", "pt2", "."]).env("RAPT_WHOLE", "1").current_dir(root().join(BINDING).join("tests"));
        step("test exported programs in every form", || show(&mut pytest))
    };
    let of_c = || check_for_macos("rapt-c", "metal");
    let cuda = || {
        let library = cubins::nvrtc(&Venv::existing(".venv")?, &Workspace::load()?.target, false)?;
        let mut compile = cargo(["test", "--workspace", "--test", "compile"]);
        compile.env("RAPT_WHOLE", "1").envs(library.map(|library| ("RAPT_NVRTC", library)));
        step_of("compile kernels for CUDA, every size", compile)
    };
    let parts: [(&str, &dyn Fn() -> Outcome); 6] = [
        ("kernels for CUDA", &cuda),
        ("kernels for Metal", &metal),
        ("buffers of Metal in C", &of_c),
        ("the backend for Vulkan", &vulkan::whole),
        ("the package for browsers", &web::whole),
        ("exported programs", &programs),
    ];
    let mut failed = Vec::new();
    for (what, part) in parts {
        if let Err(failure) = part() {
            say(format_args!("FAILED: {what}: {failure}"));
            failed.push(what);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Failure::Check(format!("failed: {}", failed.join(", ")))) }
}

fn pytest_with(torch: &str) -> Outcome {
    let venv = Venv::at(&format!(".venv-torch-{torch}"))?;
    venv.require(&[BUILD_REQUIREMENTS, OLDER], Some(&requirement(torch)?))?;
    install(&venv, &wheel::build(&venv, &Workspace::load()?.target, Kernels::Core, false)?)?;
    pytest(&venv)
}

/// The program zoo in archives of a torch, run by the installed wheel beside its own torch.
fn archives_of(torch: &str) -> Outcome {
    let installed = Venv::existing(".venv")?;
    let exporter = Venv::at(&format!(".venv-torch-{torch}"))?;
    exporter.require(&[OLDER], Some(&requirement(torch)?))?;
    let folder = Workspace::load()?.target.join("tmp/archives").join(torch);
    let tests = root().join(BINDING).join("tests");
    step("export the program zoo", || show(exporter.python(["-m", "zoo"]).arg(&folder).current_dir(&tests)))?;
    step("run its archives", || show(installed.python(["-m", "zoo", "--check"]).arg(&folder).current_dir(&tests)))
}

/// `2.6` means any 2.6.x; `2.6.1` means that one.
fn requirement(torch: &str) -> Result<String, Failure> {
    let parts: Vec<&str> = torch.split('.').collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    match parts.as_slice() {
        [_, _] if parts.iter().all(is_number) => Ok(format!("torch=={torch}.*")),
        [_, _, _] if parts.iter().all(is_number) => Ok(format!("torch=={torch}")),
        _ => Err(Failure::Usage(format!("--torch takes a version such as 2.6 or 2.6.0, not `{torch}`"))),
    }
}

fn install(venv: &Venv, built: &Path) -> Outcome {
    wheel::check(venv, &RAPT, platforms::here(), built, Kernels::Core)?;
    venv.install(built)
}

/// Installs a wheel around the library of the tests' build. Elsewhere than on Linux a library for Python is linked otherwise than others are,
/// as maturin knows.
fn install_built(venv: &Venv, target: &Path) -> Outcome {
    if cfg!(not(target_os = "linux")) {
        return install(venv, &venv.pack(&RAPT, target, false)?);
    }
    let library = built::debug(&["--lib"])?.join("lib_native.so");
    let wheel = venv.pack_built(&library, target)?;
    wheel::check_here(venv, &wheel, Kernels::Core)?;
    venv.install(&wheel)
}

fn pytest(venv: &Venv) -> Outcome {
    step("pytest", || {
        // In the tests' own folder, so that no source tree shadows the installed wheel. A file's tests stay in one process:
        // some share what costs.
        let mut pytest = venv.python(["-m", "pytest", "-ra", "-p", "no:cacheprovider", "--dist", "loadfile"]);
        // Else files of few tests come last, which are those that compile.
        pytest.args(["--no-loadscope-reorder", "--durations", "20"]);
        let workers = std::thread::available_parallelism().map_or(1, |cores| cores.get() + 1).min(MOST_WORKERS);
        pytest.args(["-n", &workers.to_string(), "."]);
        show(pytest.current_dir(root().join(BINDING).join("tests")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torch_version_becomes_a_requirement() {
        assert_eq!(requirement("2.6").unwrap(), "torch==2.6.*");
        assert_eq!(requirement("2.6.1").unwrap(), "torch==2.6.1");
        for wrong in ["", "2", "2.x", "2.6.", "../2.6", "2.6 numpy"] {
            assert!(requirement(wrong).is_err(), "{wrong}");
        }
    }
}
