//! Wheels for every platform, and the package of sources: each checked, and imported wherever programs of the platform run here.
//!
//! ```text
//! zig, by maturin ─► target/dist/PLATFORM/*.whl ─► names, contents, needs ─► import, by one of
//!   this machine's Python          manylinux x86_64
//!   Debian's for arm64 by qemu     manylinux aarch64, and calls on arrays of numpy
//!   musl's loader alone            musllinux: the module, with stand-ins for what Python's names mean
//!   Python for Windows by wine     Windows
//! maturin sdist ─► target/dist/sources/*.tar.gz ─► pip wheel
//! ```
//! Deliberately absent: an import on macOS, whose programs nothing here runs.

use std::path::{Path, PathBuf};

use crate::args::Args;
use crate::binary;
use crate::cross::{self, Folders};
use crate::cubins::{self, Kernels};
use crate::metadata::{Workspace, root};
use crate::platforms::{self, Platform};
use crate::python::{BUILD_REQUIREMENTS, RAPT, Venv};
use crate::shell::{Failure, Outcome, capture, command, remove_folder, say, show, step, write};
use crate::{debian, targets, wheel};

/// Below the target folder.
const FOLDER: &str = "dist";
/// The name of the package of sources among those of platforms.
const SOURCES: &str = "sources";
/// Python for Windows.
const WINDOWS_PYTHON: &str = "xtask/requirements/windows-python.txt";

pub(crate) const HELP: &str = "\
cargo xtask wheel [--vulkan | --all [--only NAME]]

Builds the wheel into target/wheels and checks what it asks of the system that loads it.

  --all      instead those of every platform that one is shipped for, and the package of sources, into target/dist; each is imported where
             something runs programs of the platform here (qemu, wine, musl's loader, out of Debian's packages). Linux alone; half an hour
  --only NAME
             of these one: the end of its tag, such as manylinux_2_28_aarch64 or win_amd64, or `sources`
  --vulkan   instead that of rapt-attention-vulkan, the backend for GPUs that Vulkan reaches, into target/wheels-vulkan

Kernels for NVIDIA GPUs are compiled into it with the NVRTC of xtask/requirements/nvrtc.txt, more of them than `cargo xtask
test` compiles: minutes the first time. Where it cannot be fetched a notice says so, and the wheel compiles them when they are
needed.
Checked: at most 24 MB (8 MB that of Vulkan), the abi3 tag, that of the platform or of an older system (manylinux_2_28, musllinux_1_2, macOS 11.0 or
10.12) and no symbol newer than it has, one library, which needs none but the system's (no libtorch, no libpython, no libvulkan), the licences and those of third parties inside, stubs and py.typed inside.";

/// Imports, and computes every kernel's self-test; without numpy.
const IMPORT: &str = "\
import sys
sys.path.insert(0, sys.argv[1])
import rapt
tests = [line for line in str(rapt.doctor()).splitlines() if 'self-test' in line]
assert len(tests) == 8 and all('ok, ' in line for line in tests), tests
assert 'numpy' not in sys.modules
print(sys.version.split()[0], sys.platform, 'imports rapt', rapt.__version__, 'and', len(tests), 'self-tests hold')
";

/// Calls on arrays, of which one is a permuted view, beside the formula in float64.
const CALL: &str = "\
import sys
sys.path[:0] = sys.argv[1:]
import numpy as np, rapt
draw = np.random.default_rng(0).standard_normal
for dtype, bound in (('float32', 1e-6), ('float16', 2.0 ** -11), ('float64', 1e-14)):
    q = draw((2, 77, 4, 64)).astype(dtype).transpose(0, 2, 1, 3)
    k, v = (draw((2, 2, 77, 64)).astype(dtype) for _ in range(2))
    wide_q, wide_k, wide_v = (x.astype('float64') for x in (q, k.repeat(2, 1), v.repeat(2, 1)))
    for causal in (None, 'top_left'):
        s = wide_q @ wide_k.swapaxes(2, 3) / 8
        s = s if causal is None else np.where(np.tril(np.ones((77, 77))) > 0, s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        exact = p / p.sum(-1, keepdims=True) @ wide_v
        got = rapt.attention(q, k, v) if causal is None else rapt.attention(q, k, v, causal=causal)
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert got.dtype == dtype and error <= bound, (dtype, causal, error)
print('6 calls on arrays of numpy', np.__version__, 'agree with the formula')
";

pub(crate) fn run(mut args: Args) -> Outcome {
    let (is_vulkan, is_all, only) = (args.flag("--vulkan"), args.flag("--all"), args.value("--only")?);
    args.finish(HELP)?;
    match (is_vulkan, is_all, only) {
        (false, true, only) => all(only.as_deref()),
        (_, false, None) => wheel::here(is_vulkan),
        _ => Err(Failure::Usage(format!("--vulkan or --all, and --only beside --all\n\n{HELP}"))),
    }
}

/// All of them, or the one of this name.
fn all(only: Option<&str>) -> Outcome {
    if cfg!(not(target_os = "linux")) {
        return Err(Failure::Usage(
            "`--all` needs Linux: elsewhere `cargo xtask wheel` builds this platform's".to_owned(),
        ));
    }
    let chosen = platforms::named(only, &[SOURCES])?;
    let has_sources = only.is_none_or(|name| name == SOURCES);
    targets::require(&chosen.iter().map(|platform| platform.triple).collect::<Vec<_>>())?;
    let venv = Venv::at(".venv")?;
    venv.require(&[BUILD_REQUIREMENTS], None)?;
    let target = Workspace::load()?.target;
    if chosen.iter().any(|platform| platform.has_cuda) {
        let _ = cubins::ship(&venv, &target, Kernels::Whole, false, cubins::compiler)?;
    }
    for platform in chosen {
        let folder = target.join(FOLDER).join(platform.name);
        let built = venv.pack_for(&RAPT, platform, &folder, &target, false)?;
        wheel::check(&venv, &RAPT, platform, &built, Kernels::Whole)?;
        let unpacked = folder.join("unpacked");
        remove_folder(&unpacked)?;
        show(venv.python(["-m", "zipfile", "-e"]).arg(&built).arg(&unpacked))?;
        step(&format!("import the wheel on {}", platform.name), || imported(&venv, platform, &unpacked, &target))?;
        remove_folder(&unpacked)?;
        say(format_args!("{}", built.display()));
    }
    if has_sources { sources(&venv, &target) } else { Ok(()) }
}

/// Imports the unpacked wheel where something here runs programs of its platform.
fn imported(venv: &Venv, platform: &Platform, unpacked: &Path, target: &Path) -> Outcome {
    let run = |mut python: std::process::Command| {
        capture(python.args(["-c", IMPORT]).arg(unpacked)).map(|told| say(told.trim_end()))
    };
    match platform.triple {
        "x86_64-unknown-linux-gnu" if cfg!(target_arch = "x86_64") => run(venv.python(["-I"])),
        "aarch64-unknown-linux-gnu" => {
            let folders = cross::folders(platform.triple)?;
            let tree = debian::unpacked_for("arm64", &folders.kept.join("numpy"), &["python3", "python3-numpy"])?;
            let program = debian::find(&tree.join("usr/bin"), |name| name.starts_with("python3."))?;
            let python = || {
                let mut python = command(folders.program("qemu"), ["-L"]);
                // What update-alternatives would link, were the packages installed.
                python
                    .arg(&tree)
                    .args(["-E", "LD_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu/blas:/usr/lib/aarch64-linux-gnu/lapack"]);
                python.arg(&program).env_remove("LD_LIBRARY_PATH").env_remove("PYTHONPATH");
                python
            };
            run(python())?;
            let mut call = python();
            call.args(["-c", CALL]).arg(unpacked).arg(tree.join("usr/lib/python3/dist-packages"));
            capture(&mut call).map(|told| say(told.trim_end()))
        }
        "x86_64-pc-windows-gnu" => {
            let folders = cross::folders(platform.triple)?;
            let python = windows_python(venv, &folders)?;
            run(command(folders.program("run"), [python]))
        }
        "x86_64-unknown-linux-musl" => in_musl(venv, unpacked, target),
        _ => {
            say(format_args!("not imported: nothing here runs programs of {}", platform.name));
            Ok(())
        }
    }
}

/// Python for Windows, out of a package that unpacks it where it is installed; once.
fn windows_python(venv: &Venv, folders: &Folders) -> Result<PathBuf, Failure> {
    let folder = folders.kept.join("python");
    if !folder.join("python.exe").is_file() {
        let mut pip = venv.pip();
        pip.args(["--no-deps", "--no-compile", "--target"]).arg(&folder).arg("-r").arg(root().join(WINDOWS_PYTHON));
        show(&mut pip)?;
    }
    debian::find(&folder, |name| name == "python.exe")
}

/// Loads the module by musl's own loader, in a program that has a place for each of Python's names: whatever else it asks for must be musl's.
fn in_musl(venv: &Venv, unpacked: &Path, target: &Path) -> Outcome {
    let folder = target.join("cross/x86_64-unknown-linux-musl");
    let tree = debian::unpacked(&folder, &["musl"])?;
    let module = debian::find(unpacked, |name| name.ends_with(".so"))?;
    let bytes = std::fs::read(&module).map_err(Failure::file(&module))?;
    let open = binary::needs(&bytes).map(|needs| needs.open).unwrap_or_default();
    let of_python: Vec<&String> =
        open.iter().filter(|name| name.starts_with("Py") || name.starts_with("_Py")).collect();
    let (source, program) = (folder.join("load.c"), folder.join("load"));
    let mut text = "#include <dlfcn.h>\n#include <stdio.h>\n".to_owned();
    of_python.iter().for_each(|name| text.push_str(&format!("long {name}[64];\n")));
    text.push_str(
        "int main(int count, char **words) {\n  void *module = count == 2 ? dlopen(words[1], RTLD_NOW) : NULL;\n  \
         if (module && dlsym(module, \"PyInit__native\"))\n    return 0;\n  puts(dlerror());\n  return 1;\n}\n",
    );
    write(&source, &text)?;
    let mut zig = venv.python(["-m", "ziglang", "cc", "-target", "x86_64-linux-musl", "-dynamic", "-rdynamic"]);
    // Its own checks ask for functions that musl of Debian 12 does not have.
    zig.arg("-fno-sanitize=undefined");
    show(zig.arg("-o").arg(&program).arg(&source))?;
    let loader = debian::find(&tree, |name| name == "libc.so")?;
    capture(command(loader, [&program, &module]).env_remove("LD_LIBRARY_PATH"))?;
    say(format_args!("musl's loader takes the module, with {} names of Python's", of_python.len()));
    Ok(())
}

/// The package of sources, and the wheel that pip builds of it with nothing but cargo.
fn sources(venv: &Venv, target: &Path) -> Outcome {
    let folder = target.join(FOLDER).join(SOURCES);
    remove_folder(&folder)?;
    let sources = venv.pack_sources(&folder)?;
    step("build a wheel of the package of sources with pip", || {
        let built = folder.join("built");
        let mut pip = venv.python(["-m", "pip", "wheel", "--quiet", "--no-deps", "--disable-pip-version-check", "-w"]);
        // The profile of the tests takes a fifth of the time of a release's, and leaves nothing out.
        pip.arg(&built)
            .arg(&sources)
            .env("MATURIN_PEP517_ARGS", "--profile dev")
            .env("CARGO_TARGET_DIR", folder.join("target"));
        show(pip.current_dir(&folder))?;
        let wheel = debian::find(&built, |name| name.ends_with(".whl"))?;
        let unpacked = folder.join("unpacked");
        show(venv.python(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))?;
        let told = capture(venv.python(["-I", "-c", IMPORT]).arg(&unpacked))?;
        say(told.trim_end());
        ["built", "unpacked", "target"].into_iter().try_for_each(|name| remove_folder(&folder.join(name)))
    })?;
    say(format_args!("{}", sources.display()));
    Ok(())
}
