//! The backend for Vulkan, tested on Mesa's lavapipe, a driver that computes on the processor.
//!
//! ```text
//! debian.rs                       ─► target/vulkan/root ─► VK_ICD_FILENAMES, LD_LIBRARY_PATH
//! cargo test                      ─► the backend, the engine, the command line and the C library
//! cargo build --example           ─► target/vulkan/python/rapt_vulkan.abi3.so ─► PYTHONPATH of pytest, beside the installed wheel of rapt
//! ```
//! Nothing is installed: the loader is told where the driver lies. Deliberately absent: other systems than Debian and Ubuntu; there the
//! machine's own driver is tested (`--installed`).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::args::Args;
use crate::debian;
use crate::metadata::{Workspace, root};
use crate::python::{BINDING, Venv};
use crate::shell::{Failure, Outcome, capture, cargo, read, say, show, step, write};

pub(crate) const HELP: &str = "\
cargo xtask vulkan [--installed] [--whole]

Tests the backend for Vulkan on Mesa's lavapipe, unpacked below target/vulkan; a step of `cargo xtask test`. With the wheel that
`cargo xtask test` installs also the package for Python.

  --installed   on the first adapter of the drivers that this machine has
  --whole       with the tests that take minutes on a processor";

/// The driver and the loader; what they need besides comes with them where the machine lacks it.
const PACKAGES: [&str; 2] = ["mesa-vulkan-drivers", "libvulkan1"];
/// What the loader reads of the driver.
const MANIFEST: &str = "lvp_icd";
const DRIVER: &str = "libvulkan_lvp.so";
/// What `RAPT_REQUIRE` calls a Vulkan driver.
const NAME: &str = "vulkan";

/// A driver that is not installed: what programs are told to find it.
struct Unpacked {
    manifest: PathBuf,
    libraries: PathBuf,
    cache: PathBuf,
}

pub(crate) fn run(mut args: Args) -> Outcome {
    let (is_installed, is_whole) = (args.flag("--installed"), args.flag("--whole"));
    args.finish(HELP)?;
    if is_installed { tests(None, is_whole) } else { check_with(is_whole) }
}

/// The step of `cargo xtask test`.
pub(crate) fn check() -> Outcome {
    check_with(false)
}

/// A part of `cargo xtask test --gpu`: all of it on lavapipe, then on the first adapter of the machine's own drivers.
pub(crate) fn whole() -> Outcome {
    check_with(true)?;
    if is_installed() {
        return tests(None, true);
    }
    say(format_args!("skipped: the machine's own adapter, for want of a driver"));
    Ok(())
}

/// Where drivers put what the loader reads of them.
const MANIFESTS: [&str; 3] = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];

/// Whether the machine has a driver of its own, or is told of one.
fn is_installed() -> bool {
    let is_told = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].iter().any(|name| std::env::var_os(name).is_some());
    let has_manifest = |folder: &&str| std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    is_told || MANIFESTS.iter().any(has_manifest)
}

fn check_with(is_whole: bool) -> Outcome {
    let folder = Workspace::load()?.target.join(NAME);
    if let Some(missing) = debian::missing() {
        let what = format!("the tests of the backend for Vulkan, for want of {missing}");
        let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
        if required.split(',').any(|name| name == NAME) {
            return Err(Failure::Check(format!("RAPT_REQUIRE asks for {NAME}: {what}")));
        }
        say(format_args!("skipped: {what}"));
        return Ok(());
    }
    let driver = step("unpack lavapipe", || unpack(&folder))?;
    tests(Some(&driver), is_whole)
}

/// What `RAPT_REQUIRE` asks of tests that are not told where lavapipe lies.
pub(crate) fn required_of_others() -> String {
    let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
    required.split(',').filter(|name| *name != NAME).collect::<Vec<_>>().join(",")
}

/// What has the backend as a feature of its own: the command line, the C library, the module for Python.
const FEATURES: &str = "rapt-attention/vulkan,rapt-cli/vulkan,rapt-c/vulkan,rapt-python-vulkan/vulkan";
/// That module's target.
const MODULE: &str = "rapt_vulkan";

/// The tests that ask a GPU, of the workspace as its other tests are built, so that nothing is compiled twice.
fn tests(driver: Option<&Unpacked>, is_whole: bool) -> Outcome {
    let mut test = cargo(["test", "--workspace", "--features", FEATURES]);
    test.args(["--test", "vulkan", "--test", "vulkan_boundary"]).current_dir(root());
    ask(&mut test, driver)?;
    if is_whole {
        test.args(["--", "--include-ignored"]);
    }
    step("test the backend for Vulkan", || show(&mut test))?;
    pytest(driver)
}

/// The package for Python: its module of the debug build, beside the wheel that `cargo xtask test` has installed.
fn pytest(driver: Option<&Unpacked>) -> Outcome {
    let venv = match Venv::existing(".venv") {
        Ok(venv) if capture(&mut venv.python(["-c", "import pytest, rapt.vulkan"])).is_ok() => venv,
        _ => {
            say(format_args!(
                "skipped: the tests of rapt_vulkan, for want of the wheel that `cargo xtask test` installs"
            ));
            return Ok(());
        }
    };
    let target = Workspace::load()?.target;
    let folder = target.join(NAME).join("python");
    step("build the module for Python", || {
        let mut build = cargo(["build", "--workspace", "--features", FEATURES, "--example", MODULE]);
        show(build.current_dir(root()))?;
        std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
        let (dll, end) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        let built = target.join("debug/examples").join(format!("{dll}{MODULE}{end}"));
        std::fs::copy(&built, folder.join(format!("{MODULE}.abi3.so"))).map_err(Failure::file(&built)).map(drop)
    })?;
    let mut pytest = venv.python(["-m", "pytest", "-ra", "-p", "no:cacheprovider", "--durations", "5", "."]);
    ask(&mut pytest, driver)?;
    pytest.env("PYTHONPATH", &folder).current_dir(root().join(BINDING).join("tests_vulkan"));
    step("test the module for Python", || show(&mut pytest))
}

/// Tells a program of tests where the driver is, and that it must be there.
fn ask(program: &mut Command, driver: Option<&Unpacked>) -> Outcome {
    program.env("RAPT_REQUIRE", NAME);
    if let Some(Unpacked { manifest, libraries, cache }) = driver {
        let paths = debian::library_path([libraries.clone()])?;
        program.env("VK_ICD_FILENAMES", manifest).env("LD_LIBRARY_PATH", paths).env("MESA_SHADER_CACHE_DIR", cache);
        program.env("RAPT_CACHE_DIR", cache.join("rapt"));
    }
    Ok(())
}

/// The driver below `folder`, which is made once.
fn unpack(folder: &Path) -> Result<Unpacked, Failure> {
    let tree = debian::unpacked(folder, &PACKAGES)?;
    let (manifest, driver) = (folder.join("lavapipe.json"), debian::find(&tree, |name| name == DRIVER)?);
    if !manifest.is_file() {
        let text = read(&debian::find(&tree, |name| name.starts_with(MANIFEST) && name.ends_with(".json"))?)?;
        write(&manifest, &located(&text, &driver))?;
    }
    let libraries = driver.parent().unwrap_or(&tree).to_owned();
    Ok(Unpacked { manifest, libraries, cache: folder.join("cache") })
}

/// A manifest whose library is `driver`.
fn located(manifest: &str, driver: &Path) -> String {
    let is_path = |line: &&str| line.trim_start().starts_with("\"library_path\"");
    let Some(line) = manifest.lines().find(is_path) else { return manifest.to_owned() };
    let comma = if line.trim_end().ends_with(',') { "," } else { "" };
    let named = format!("        \"library_path\": {:?}{comma}", driver.display().to_string());
    manifest.replace(line, &named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_names_the_driver_where_it_lies() {
        let text = "{\n    \"ICD\": {\n        \"api_version\": \"1.1.230\",\n        \"library_path\": \"/usr/lib/libvulkan_lvp.so\"\n    }\n}\n";
        let located = located(text, Path::new("/elsewhere/a b/libvulkan_lvp.so"));
        assert!(located.contains("\"library_path\": \"/elsewhere/a b/libvulkan_lvp.so\"\n"), "{located}");
        assert!(located.contains("\"api_version\": \"1.1.230\",\n"), "{located}");
    }
}
