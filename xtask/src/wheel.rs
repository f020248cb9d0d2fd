//! The wheel: one for every Python, torch and CUDA, and proof of it.

use std::path::{Path, PathBuf};

use crate::args::Args;
use crate::cubins::{self, Kernels};
use crate::elf;
use crate::metadata::Workspace;
use crate::python::{BUILD_REQUIREMENTS, Distribution, RAPT, VULKAN, Venv};
use crate::shell::{Failure, Outcome, say, show, step};

pub(crate) const HELP: &str = "\
cargo xtask wheel [--vulkan]

Builds the wheel into target/wheels and checks what it asks of the system that loads it.

  --vulkan   instead that of rapt-attention-vulkan, the backend for GPUs that Vulkan reaches, into target/wheels-vulkan

Kernels for NVIDIA GPUs are compiled into it with the NVRTC of xtask/requirements/nvrtc.txt, more of them than `cargo xtask
test` compiles: minutes the first time. Where it cannot be fetched a notice says so, and the wheel compiles them when they are
needed.
Checked: at most 19 MB (8 MB that of Vulkan), the abi3 tag, manylinux_2_28 or older and no symbol newer than glibc 2.28, no library needed but the C
library's (no libtorch, no libpython, no libvulkan), the licences and those of third parties inside, stubs and py.typed inside.";

/// The newest glibc that the wheel may ask for: Debian 10, RHEL 8, Ubuntu 18.10.
const NEWEST_GLIBC: (u32, u32) = (2, 28);

/// Most bytes of the wheel, kernels for GPUs included (6.0 and 12.1 MB, 513 kernels, 2026-11), and of that of Vulkan.
const MOST_BYTES: u64 = 19_000_000;
const MOST_BYTES_VULKAN: u64 = 8_000_000;

/// Libraries that every glibc system has under these names.
const SYSTEM: [&str; 8] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

/// Ends of names that must be in a wheel.
const LICENCES: [&str; 3] = ["/LICENSE-MIT", "/LICENSE-APACHE", "/THIRD-PARTY-LICENSES.md"];
/// And in that of Rapt itself.
const CONTENTS: [&str; 3] = ["rapt/py.typed", "rapt/__init__.pyi", "rapt/bench/cuda.toml"];

pub(crate) fn run(mut args: Args) -> Outcome {
    let is_vulkan = args.flag("--vulkan");
    args.finish(HELP)?;
    let venv = Venv::at(".venv")?;
    venv.require(&[BUILD_REQUIREMENTS], None)?;
    let target = Workspace::load()?.target;
    let (of, wheel) = match is_vulkan {
        true => (&VULKAN, venv.pack(&VULKAN, &target, false)?),
        false => (&RAPT, build(&venv, &target, Kernels::Whole, false)?),
    };
    check(&venv, of, &wheel, Kernels::Whole)?;
    say(format_args!("{}", wheel.display()));
    Ok(())
}

/// Builds the wheel with these kernels for GPUs, where they can be compiled, and gives its path.
pub(crate) fn build(venv: &Venv, target: &Path, kernels: Kernels, offline: bool) -> Result<PathBuf, Failure> {
    let _ = cubins::ship(venv, target, kernels, offline, cubins::compiler)?;
    venv.pack(&RAPT, target, offline)
}

/// Unpacks a wheel beside itself and checks name, contents and needs.
pub(crate) fn check(venv: &Venv, of: &Distribution, wheel: &Path, kernels: Kernels) -> Outcome {
    step("check the wheel", || {
        let folder = wheel.with_extension("unpacked");
        if folder.exists() {
            std::fs::remove_dir_all(&folder).map_err(Failure::file(&folder))?;
        }
        show(venv.python(["-m", "zipfile", "-e"]).arg(wheel).arg(&folder))?;
        let mut names = Vec::new();
        list(&folder, &folder, &mut names).map_err(Failure::file(&folder))?;
        let file = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_rapt = of.name == RAPT.name;
        let mut wrong = wrong_tags(of.name, &file);
        wrong.extend(missing(&names, is_rapt));
        wrong.extend(wrong_size(wheel, if is_rapt { MOST_BYTES } else { MOST_BYTES_VULKAN })?);
        // The wheel lies in target/wheels.
        let cubins = |target: &Path| if is_rapt { cubins::wrong(&names, target, kernels) } else { Vec::new() };
        wrong.extend(wheel.ancestors().nth(2).map(cubins).unwrap_or_default());
        for name in names.iter().filter(|name| name.ends_with(".so")) {
            let path = folder.join(name);
            let bytes = std::fs::read(&path).map_err(Failure::file(&path))?;
            let needs = elf::needs(&bytes);
            wrong.extend(wrong_needs(name, needs.as_ref()));
            if let Some((major, minor)) = needs.as_ref().and_then(elf::Needs::glibc) {
                say(format_args!("{name}: {} bytes, glibc {major}.{minor}", bytes.len()));
            }
        }
        std::fs::remove_dir_all(&folder).map_err(Failure::file(&folder))?;
        if wrong.is_empty() { Ok(()) } else { Err(Failure::Check(format!("{file}:\n  {}", wrong.join("\n  ")))) }
    })
}

fn wrong_size(wheel: &Path, most: u64) -> Result<Option<String>, Failure> {
    let bytes = std::fs::metadata(wheel).map_err(Failure::file(wheel))?.len();
    say(format_args!("the wheel has {bytes} bytes"));
    Ok((bytes > most).then(|| format!("has {bytes} bytes, more than {most}")))
}

fn list(folder: &Path, below: &Path, names: &mut Vec<String>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path: PathBuf = entry?.path();
        if path.is_dir() {
            list(&path, below, names)?;
        } else if let Ok(name) = path.strip_prefix(below) {
            names.push(name.to_string_lossy().replace('\\', "/"));
        }
    }
    Ok(())
}

/// A wheel's name is `distribution-version-python-abi-platform.whl`; platforms may be several, parted by dots.
fn wrong_tags(wanted: &str, file: &str) -> Vec<String> {
    let parts: Vec<&str> = file.trim_end_matches(".whl").split('-').collect();
    let [name, _, python, abi, platforms] = parts.as_slice() else {
        return vec!["the name is not that of a wheel".to_owned()];
    };
    let mut wrong = Vec::new();
    if (*name, *python, *abi) != (wanted, "cp310", "abi3") {
        wrong.push(format!("is {name}-{python}-{abi}, not {wanted}-cp310-abi3"));
    }
    if cfg!(target_os = "linux") {
        let glibc = |tag: &str| {
            let mut numbers = tag.strip_prefix("manylinux_")?.split('_');
            Some((numbers.next()?.parse::<u32>().ok()?, numbers.next()?.parse::<u32>().ok()?))
        };
        // The dot parts compressed tag sets such as manylinux_2_17_x86_64.manylinux2014_x86_64; the first is the new form.
        let newest = platforms.split('.').filter_map(glibc).max();
        if newest.is_none_or(|newest| newest > NEWEST_GLIBC) {
            wrong.push(format!("platform {platforms} is not manylinux_2_28 or older"));
        }
    }
    wrong
}

fn missing(names: &[String], is_rapt: bool) -> Vec<String> {
    let (contents, module) =
        if is_rapt { (&CONTENTS[..], "rapt/_native") } else { (&[][..], "rapt_vulkan/rapt_vulkan") };
    let is_missing = |end: &&&str| !names.iter().any(|name| name.ends_with(**end));
    let mut wrong: Vec<String> = LICENCES
        .iter()
        .chain(contents)
        .filter(is_missing)
        .map(|end| format!("holds no {}", end.trim_start_matches('/')))
        .collect();
    if !names.iter().any(|name| name.starts_with(module)) {
        wrong.push(format!("holds no {module}"));
    }
    wrong
}

fn wrong_needs(name: &str, needs: Option<&elf::Needs>) -> Vec<String> {
    let Some(needs) = needs else { return vec![format!("{name} is not a 64-bit ELF file")] };
    let foreign = needs.libraries.iter().filter(|library| !SYSTEM.contains(&library.as_str()));
    let mut wrong: Vec<String> = foreign.map(|library| format!("{name} needs {library}")).collect();
    if let Some((major, minor)) = needs.glibc().filter(|newest| *newest > NEWEST_GLIBC) {
        wrong.push(format!("{name} needs glibc {major}.{minor}, newer than 2.28"));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags() {
        let wrong = |file: &str| wrong_tags(RAPT.name, file).len();
        assert_eq!(wrong("rapt_attention-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"), 0);
        assert_eq!(wrong("rapt_attention-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"), 1);
        assert_eq!(wrong("rapt_attention_vulkan-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"), 1);
        assert_eq!(wrong("rapt-0.1.0.whl"), 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn platforms() {
        let wheel =
            |platform: &str| wrong_tags(RAPT.name, &format!("rapt_attention-0.1.0-cp310-abi3-{platform}.whl")).len();
        assert_eq!(wheel("manylinux_2_17_x86_64.manylinux2014_x86_64"), 0);
        assert_eq!(wheel("manylinux_2_34_x86_64"), 1);
        assert_eq!(wheel("linux_x86_64"), 1);
    }

    #[test]
    fn needs_beyond_the_c_library_are_named() {
        let needs = elf::Needs {
            libraries: ["libc.so.6", "libtorch_cpu.so", "libpython3.11.so.1.0"].map(str::to_owned).into(),
            versions: ["GLIBC_2.34".to_owned()].into(),
            ..elf::Needs::default()
        };
        let wrong = wrong_needs("rapt/_native.abi3.so", Some(&needs)).join("\n");
        assert!(wrong.contains("libtorch_cpu.so") && wrong.contains("libpython3.11") && wrong.contains("glibc 2.34"));
        assert_eq!(wrong.lines().count(), 3);
        assert_eq!(wrong_needs("x.so", None).len(), 1);
    }

    #[test]
    fn contents_that_are_missing_are_named() {
        let names = ["rapt/__init__.pyi".to_owned(), "x.dist-info/licenses/LICENSE-MIT".to_owned()];
        let wrong = missing(&names, true);
        assert_eq!(wrong.len(), LICENCES.len() + CONTENTS.len() - 2 + 1, "{wrong:?}");
        let wrong = missing(&names, false);
        assert_eq!(wrong.len(), LICENCES.len() - 1 + 1, "{wrong:?}");
    }
}
