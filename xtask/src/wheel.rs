//! The wheel: one for every Python, torch and CUDA of a platform, and proof of it.

use std::path::{Path, PathBuf};

use crate::binary::{self, Needs};
use crate::cubins::{self, Kernels};
use crate::metadata::Workspace;
use crate::platforms::{self, Platform};
use crate::python::{BUILD_REQUIREMENTS, Distribution, RAPT, VULKAN, Venv};
use crate::shell::{Failure, Outcome, remove_folder, say, show, step};

/// Most bytes of the wheel, kernels for GPUs included (20.6 MB, 587 kernels, 2026-12), and of that of Vulkan.
const MOST_BYTES: u64 = 24_000_000;
const MOST_BYTES_VULKAN: u64 = 8_000_000;

/// Ends of names that must be in a wheel.
const LICENCES: [&str; 3] = ["/LICENSE-MIT", "/LICENSE-APACHE", "/THIRD-PARTY-LICENSES.md"];
/// And in that of Rapt itself.
const CONTENTS: [&str; 3] = ["rapt/py.typed", "rapt/__init__.pyi", "rapt/bench/cuda.toml"];

/// Builds and checks the wheel of this platform, or that of Vulkan, and says where it is.
pub(crate) fn here(is_vulkan: bool) -> Outcome {
    let venv = Venv::at(".venv")?;
    venv.require(&[BUILD_REQUIREMENTS], None)?;
    let target = Workspace::load()?.target;
    let (of, wheel) = match is_vulkan {
        true => (&VULKAN, venv.pack(&VULKAN, &target, false)?),
        false => (&RAPT, build(&venv, &target, Kernels::Whole, false)?),
    };
    check(&venv, of, platforms::here(), &wheel, Kernels::Whole)?;
    say(format_args!("{}", wheel.display()));
    Ok(())
}

/// Builds the wheel with these kernels for GPUs, where they can be compiled, and gives its path.
pub(crate) fn build(venv: &Venv, target: &Path, kernels: Kernels, offline: bool) -> Result<PathBuf, Failure> {
    let _ = cubins::ship(venv, target, kernels, offline, cubins::compiler)?;
    venv.pack(&RAPT, target, offline)
}

/// Checks a wheel that is shipped: its name, size and contents, and what its library needs.
pub(crate) fn check(venv: &Venv, of: &Distribution, platform: &Platform, wheel: &Path, kernels: Kernels) -> Outcome {
    step("check the wheel", || {
        let mut wrong = wrong_tags(of.name, platform, &name(wheel));
        wrong.extend(wrong_size(wheel, if of.name == RAPT.name { MOST_BYTES } else { MOST_BYTES_VULKAN })?);
        wrong.extend(wrong_contents(venv, of, platform, wheel, (kernels, Platform::wrong_needs))?);
        verdict(wheel, &wrong)
    })
}

/// Checks a wheel of Rapt for this machine alone: its contents, and which libraries it needs.
pub(crate) fn check_here(venv: &Venv, wheel: &Path, kernels: Kernels) -> Outcome {
    step("check the wheel", || {
        verdict(wheel, &wrong_contents(venv, &RAPT, platforms::here(), wheel, (kernels, Platform::foreign))?)
    })
}

fn name(wheel: &Path) -> String {
    wheel.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn verdict(wheel: &Path, wrong: &[String]) -> Outcome {
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Failure::Check(format!("{}:\n  {}", name(wheel), wrong.join("\n  "))))
}

/// Judges what the library of this name asks for.
type Judge = fn(&Platform, &str, Option<&Needs>) -> Vec<String>;

/// What is wrong with what lies in a wheel, which is unpacked beside itself.
fn wrong_contents(
    venv: &Venv,
    of: &Distribution,
    platform: &Platform,
    wheel: &Path,
    (kernels, judge): (Kernels, Judge),
) -> Result<Vec<String>, Failure> {
    let is_rapt = of.name == RAPT.name;
    let folder = wheel.with_extension("unpacked");
    remove_folder(&folder)?;
    show(venv.python(["-m", "zipfile", "-e"]).arg(wheel).arg(&folder))?;
    let mut names = Vec::new();
    list(&folder, &folder, &mut names).map_err(Failure::file(&folder))?;
    let mut wrong = missing(&names, is_rapt);
    if is_rapt && platform.has_cuda {
        wrong.extend(cubins::wrong(&names, &Workspace::load()?.target, kernels));
    }
    let is_library = |name: &&String| [".so", ".pyd", ".dll", ".dylib"].iter().any(|end| name.ends_with(end));
    let libraries: Vec<&String> = names.iter().filter(is_library).collect();
    if libraries.len() != 1 {
        wrong.push(format!("holds {} libraries, not one", libraries.len()));
    }
    for name in libraries {
        let path = folder.join(name);
        let bytes = std::fs::read(&path).map_err(Failure::file(&path))?;
        let needs = binary::needs(&bytes);
        wrong.extend(judge(platform, name, needs.as_ref()));
        if let Some(needs) = needs {
            let oldest = needs.glibc().map(|(major, minor)| format!(", glibc {major}.{minor}"));
            let oldest = oldest.or_else(|| needs.macos().map(|(major, minor)| format!(", macOS {major}.{minor}")));
            let libraries: Vec<&str> = needs.libraries.iter().map(String::as_str).collect();
            let (len, oldest) = (bytes.len(), oldest.unwrap_or_default());
            say(format_args!("{name}: {len} bytes{oldest}; needs {}", libraries.join(", ")));
        }
    }
    remove_folder(&folder)?;
    Ok(wrong)
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
fn wrong_tags(wanted: &str, platform: &Platform, file: &str) -> Vec<String> {
    let parts: Vec<&str> = file.trim_end_matches(".whl").split('-').collect();
    let [name, _, python, abi, platforms] = parts.as_slice() else {
        return vec!["the name is not that of a wheel".to_owned()];
    };
    let mut wrong = Vec::new();
    if (*name, *python, *abi) != (wanted, "cp310", "abi3") {
        wrong.push(format!("is {name}-{python}-{abi}, not {wanted}-cp310-abi3"));
    }
    if !platform.is_tagged(platforms) {
        wrong.push(format!("platform {platforms} is not {} or older", platform.name));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platforms::PLATFORMS;

    #[test]
    fn tags() {
        let linux = &PLATFORMS[0];
        let wrong = |file: &str| wrong_tags(RAPT.name, linux, file).len();
        assert_eq!(wrong("rapt_attention-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"), 0);
        assert_eq!(wrong("rapt_attention-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"), 1);
        assert_eq!(wrong("rapt_attention_vulkan-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"), 1);
        assert_eq!(wrong("rapt-0.1.0.whl"), 1);
        assert_eq!(wrong("rapt_attention-0.1.0-cp310-abi3-manylinux_2_34_x86_64.whl"), 1);
        assert_eq!(wrong("rapt_attention-0.1.0-cp310-abi3-win_amd64.whl"), 1);
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
