//! Python: finding one, virtual environments, what is installed in them, and building the wheel.
//!
//! An environment remembers what it holds: beside it lies one stamp for each requirements file, with that file's text.
//! A stamp that equals its file means that nothing need be installed. uv installs what it can, since it takes a quarter of pip's
//! time; where it cannot be had or fails, pip does, which reads settings that uv does not know.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::licenses;
use crate::metadata::{Workspace, root};
use crate::platforms::{self, Platform};
use crate::shell::{Failure, Outcome, capture, command, copy, read, remove_folder, say, show, step, write};

/// The oldest Python that the wheel supports: `abi3-py310`.
const OLDEST: (u32, u32) = (3, 10);

/// Names under which a Python may be found, in the order in which they are tried.
const CANDIDATES: [&str; 7] =
    ["python3", "python", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10"];

/// Where the wheel's crate lies, below the root.
pub(crate) const BINDING: &str = "bindings/python";

/// A wheel: what it is made of and where, below the target folder.
pub(crate) struct Distribution {
    /// As its file's name begins.
    pub(crate) name: &'static str,
    /// Where its crate lies, below the root.
    binding: &'static str,
    stage: &'static str,
    wheels: &'static str,
}

/// `rapt-attention`.
pub(crate) const RAPT: Distribution =
    Distribution { name: "rapt_attention", binding: BINDING, stage: "package", wheels: "wheels" };

/// `rapt-attention-vulkan`, which the extra `vulkan` of the other asks for.
pub(crate) const VULKAN: Distribution = Distribution {
    name: "rapt_attention_vulkan",
    binding: "bindings/python-vulkan",
    stage: "package-vulkan",
    wheels: "wheels-vulkan",
};

/// Kernels for GPUs that the wheel ships, below the target folder: [`Venv::pack`] puts them beside its modules.
pub(crate) const SHIPPED: &str = "tmp/shipped";

/// The installer.
const UV: &str = "xtask/requirements/uv.txt";

/// What it leaves out of what others ask for.
const LEFT_OUT: &str = "xtask/requirements/left-out.txt";

/// What builds the wheel: pinned, because its output is checked.
pub(crate) const BUILD_REQUIREMENTS: &str = "xtask/requirements/build.txt";

/// The first Python on the path that is new enough and can make a virtual environment.
pub(crate) fn find() -> Result<(&'static str, (u32, u32)), Failure> {
    const PROBE: &str = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])";
    let mut tried = Vec::new();
    for name in CANDIDATES {
        match Command::new(name).args(["-c", PROBE]).output() {
            Ok(output) if output.status.success() => match version(&String::from_utf8_lossy(&output.stdout)) {
                Some(found) if found >= OLDEST => return Ok((name, found)),
                Some((major, minor)) => tried.push(format!("{name} is {major}.{minor}")),
                None => tried.push(format!("{name} names no version")),
            },
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                tried.push(format!("{name}: {}", text.lines().last().unwrap_or("ended with a failure")));
            }
            Err(_) => tried.push(format!("{name} is not there")),
        }
    }
    let (major, minor) = OLDEST;
    Err(Failure::NoPython(format!(
        "no Python ≥ {major}.{minor} with venv and pip ({}). On Debian and Ubuntu: apt-get install python3-venv",
        tried.join("; ")
    )))
}

fn version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A virtual environment: below the root, or in the target folder where that lies elsewhere (`CARGO_TARGET_DIR`), so that nothing
/// is written into a source tree that is built from afar, such as a read-only one.
pub(crate) struct Venv {
    folder: PathBuf,
}

impl Venv {
    pub(crate) fn named(name: &str) -> Result<Self, Failure> {
        let target = Workspace::load()?.target;
        let near = if target.starts_with(root()) { root() } else { target };
        Ok(Venv { folder: near.join(name) })
    }

    /// The environment in `name`, which must be there.
    pub(crate) fn existing(name: &str) -> Result<Self, Failure> {
        let venv = Venv::named(name)?;
        if venv.works() {
            return Ok(venv);
        }
        Err(Failure::Check(format!(
            "there is no {name} that works: run `cargo xtask test` or `cargo xtask demo` once with a network"
        )))
    }

    /// The environment in `name`, made if it is not there.
    pub(crate) fn at(name: &str) -> Result<Self, Failure> {
        let venv = Venv::named(name)?;
        if venv.works() {
            say(format_args!("── {name} is there"));
            return Ok(venv);
        }
        let (python, (major, minor)) = find()?;
        step(&format!("make {name} with {python} ({major}.{minor})"), || {
            // --clear: what is there does not work, such as an environment whose Python was removed.
            show(command(python, ["-m", "venv", "--clear"]).arg(&venv.folder))
        })?;
        Ok(venv)
    }

    fn works(&self) -> bool {
        capture_quietly(self.python(["-c", "import pip"])).is_some()
    }

    pub(crate) fn programs(&self) -> PathBuf {
        self.folder.join(if cfg!(windows) { "Scripts" } else { "bin" })
    }

    /// A command of this environment's Python. The environment's programs come first on its path, and no source tree
    /// does: `PYTHONPATH` is removed.
    pub(crate) fn python<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = command(self.programs().join("python"), args);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(self.programs()).chain(std::env::split_paths(&path));
        // A path that cannot be joined (a folder with a separator in its name) stays as it was.
        command.env("PATH", std::env::join_paths(folders).unwrap_or_else(|_| OsString::from(&path)));
        command.env("VIRTUAL_ENV", &self.folder).env_remove("PYTHONPATH").env_remove("PYTHONHOME");
        // Compiled once, not in each of the hundred processes that import torch: whatever the caller's Python keeps, and
        // without a file in a source tree.
        command
            .env_remove("PYTHONDONTWRITEBYTECODE")
            .env("PYTHONPYCACHEPREFIX", self.folder.with_file_name(".venv-pycache"));
        command
    }

    fn stamp(&self, file: &str) -> PathBuf {
        self.folder.join(format!("{}.installed", file.replace('/', "-")))
    }

    /// Installs requirements files (paths below the root), if one of them has changed since.
    /// `more` is a requirement of the command line.
    pub(crate) fn require(&self, files: &[&str], more: Option<&str>) -> Outcome {
        let mut wanted: Vec<(PathBuf, String)> = Vec::new();
        for file in files {
            wanted.push((self.stamp(file), read(&root().join(file))?));
        }
        if let Some(more) = more {
            wanted.push((self.stamp("more"), more.to_owned()));
        }
        let is_current =
            |(stamp, text): &(PathBuf, String)| std::fs::read_to_string(stamp).is_ok_and(|was| was == *text);
        if wanted.iter().all(is_current) {
            say(format_args!("── requirements unchanged: nothing to install"));
            return Ok(());
        }
        step(&format!("install {}", files.join(" ")), || {
            for (stamp, _) in &wanted {
                // Gone before pip runs: an installation that is cut short must not look complete.
                match std::fs::remove_file(stamp) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(Failure::file(stamp)(error));
                    }
                    _ => {}
                }
            }
            let mut words: Vec<OsString> = Vec::new();
            for file in files {
                words.extend(["-r".into(), root().join(file).into()]);
            }
            words.extend(more.map(OsString::from));
            if let Err(failure) = self.install_by_uv(&words) {
                say(format_args!("── NOTE: uv could not install ({failure}): pip does"));
                show(self.pip().args(words))?;
            }
            Ok(())
        })?;
        wanted.iter().try_for_each(|(stamp, text)| write(stamp, text))
    }

    /// A `pip install` that is to be completed.
    pub(crate) fn pip(&self) -> Command {
        self.python(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
    }

    /// Installs by uv, which pip installs first.
    fn install_by_uv(&self, words: &[OsString]) -> Outcome {
        show(self.pip().arg("-r").arg(root().join(UV)))?;
        let mut uv = self.python(["-m", "uv", "pip", "install", "--quiet"]);
        // Its cache inside the environment, which then holds links to it and no second copy, and is all that is written.
        uv.env("UV_CACHE_DIR", self.folder.join("uv-cache"));
        show(uv.arg("--override").arg(root().join(LEFT_OUT)).args(words))
    }

    /// Refuses if one of the requirements files was never installed; says so if one has changed since.
    pub(crate) fn assume(&self, files: &[&str]) -> Outcome {
        for file in files {
            match std::fs::read_to_string(self.stamp(file)) {
                Ok(text) if text == read(&root().join(file))? => {}
                Ok(_) => say(format_args!("── note: {file} has changed since it was installed")),
                Err(_) => {
                    return Err(Failure::Check(format!(
                        "--offline: {} does not hold {file}: run the same command once with a network, without --offline",
                        self.folder.display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Builds the wheel for the platform that it runs on into a folder of its own and gives its path.
    pub(crate) fn pack(&self, of: &Distribution, target: &Path, offline: bool) -> Result<PathBuf, Failure> {
        self.pack_for(of, platforms::here(), &target.join(of.wheels), target, offline)
    }

    /// Builds the wheel (release, with the kernels for GPUs that lie in the package) for a platform into `folder`, where no other is left, and gives its
    /// path.
    ///
    /// Built from a copy of the package, because kernels or a list of licences stand in it that no source tree holds.
    /// On Linux with zig as the linker: Rust's standard library binds to the newest symbols that the C library at hand
    /// offers, so that a wheel built on Debian 12 asks for glibc 2.34; zig carries the symbol lists of older ones, and what other
    /// systems' libraries offer.
    pub(crate) fn pack_for(
        &self,
        of: &Distribution,
        platform: &Platform,
        folder: &Path,
        target: &Path,
        offline: bool,
    ) -> Result<PathBuf, Failure> {
        step(&format!("build the wheel {} for {}", of.name, platform.name), || {
            for old in wheels(folder) {
                std::fs::remove_file(&old).map_err(Failure::file(&old))?;
            }
            let mut maturin = self.python(["-m", "maturin", "build", "--release", "--out"]);
            let stage = stage(of, target, platform.has_cuda)?;
            maturin.arg(folder).current_dir(stage).env("CARGO_TARGET_DIR", target);
            if cfg!(target_os = "linux") {
                maturin.args(["--zig", "--target", platform.triple]);
            }
            if let Some(compatibility) = platform.compatibility {
                maturin.args(["--compatibility", compatibility]);
            }
            if offline {
                maturin.env("CARGO_NET_OFFLINE", "true");
            }
            show(&mut maturin)
        })?;
        only_wheel(folder)
    }

    /// Packs the wheel of Rapt around a library that is built already, for this machine alone, and gives its path. maturin writes what the wheel
    /// says of itself.
    pub(crate) fn pack_built(&self, library: &Path, target: &Path) -> Result<PathBuf, Failure> {
        step("pack the wheel around the library of the tests", || {
            let (content, folder) = (target.join("package-content"), target.join("wheels-tested"));
            remove_folder(&content)?;
            remove_folder(&folder)?;
            std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
            let stage = stage(&RAPT, target, true)?;
            copy(&stage.join("python"), &content)?;
            let module = content.join("rapt/_native.abi3.so");
            std::fs::copy(library, module).map_err(Failure::file(library))?;
            let mut maturin = self.python(["-m", "maturin", "pep517", "write-dist-info", "--metadata-directory"]);
            // What it prints is the folder's name.
            capture(maturin.arg(&content).env("CARGO_TARGET_DIR", target).current_dir(stage))?;
            show(self.python(["-m", "wheel", "pack", "--dest-dir"]).arg(&folder).arg(&content))?;
            only_wheel(&folder)
        })
    }

    /// Builds the package of sources, from which pip and cargo build the wheel, into `folder` and gives its path.
    pub(crate) fn pack_sources(&self, folder: &Path) -> Result<PathBuf, Failure> {
        step("build the package of sources", || {
            let mut maturin = self.python(["-m", "maturin", "sdist", "--out"]);
            show(maturin.arg(folder).current_dir(root().join(BINDING)))
        })?;
        let is_sources = |path: &PathBuf| path.to_string_lossy().ends_with(".tar.gz");
        match listed(folder).into_iter().filter(is_sources).collect::<Vec<_>>().as_slice() {
            [sources] => Ok(sources.clone()),
            found => Err(Failure::Check(format!("{} holds {} packages, not one", folder.display(), found.len()))),
        }
    }

    /// Installs the wheel over whatever version is there, and makes sure that it is what `import rapt` finds.
    pub(crate) fn install(&self, wheel: &Path) -> Outcome {
        step("install the wheel", || {
            show(self.pip().args(["--no-index", "--force-reinstall", "--no-deps"]).arg(wheel))?;
            let print = "import rapt; print(rapt.__file__)";
            let found = capture(self.python(["-c", print]).current_dir(&self.folder))?;
            // Both resolved: the folder may have been reached through a link.
            let inside = |path: &Path| std::fs::canonicalize(path).map_err(Failure::file(path));
            if inside(Path::new(found.trim()))?.starts_with(inside(&self.folder)?) {
                return Ok(());
            }
            Err(Failure::Check(format!("`import rapt` finds {}, not the installed wheel", found.trim())))
        })
    }
}

/// The package as maturin takes it: with the kernels in [`SHIPPED`], if it has any, or a list of licences.
fn stage(of: &Distribution, target: &Path, has_kernels: bool) -> Result<PathBuf, Failure> {
    let (source, stage) = (root().join(of.binding), target.join(of.stage));
    remove_folder(&stage)?;
    std::fs::create_dir_all(&stage).map_err(Failure::file(&stage))?;
    if of.name == RAPT.name {
        copy(&source.join("python"), &stage.join("python"))?;
        if has_kernels {
            copy(&target.join(SHIPPED), &stage.join("python/rapt/cubins"))?;
        }
    } else {
        let workspace = Workspace::load_with("rapt-python-vulkan/vulkan")?;
        let text = licenses::of_wheel(&workspace, "rapt-python-vulkan", "rapt-attention-vulkan")?;
        write(&stage.join(licenses::FILE), &text)?;
    }
    for name in ["README.md", "LICENSE-APACHE", "LICENSE-MIT", licenses::FILE] {
        if !stage.join(name).exists() {
            std::fs::copy(source.join(name), stage.join(name)).map_err(Failure::file(&source.join(name)))?;
        }
    }
    let table = "[tool.maturin]\n";
    let manifest = format!("{table}manifest-path = {:?}\n", source.join("Cargo.toml"));
    let project = read(&source.join("pyproject.toml"))?;
    if !project.contains(table) {
        return Err(Failure::Check(format!("pyproject.toml has no {table}")));
    }
    write(&stage.join("pyproject.toml"), &project.replace(table, &manifest))?;
    Ok(stage)
}

fn listed(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn only_wheel(folder: &Path) -> Result<PathBuf, Failure> {
    match wheels(folder).as_slice() {
        [wheel] => Ok(wheel.clone()),
        found => Err(Failure::Check(format!("{} holds {} wheels, not one", folder.display(), found.len()))),
    }
}

fn wheels(folder: &Path) -> Vec<PathBuf> {
    listed(folder).into_iter().filter(|path| path.extension().is_some_and(|end| end == "whl")).collect()
}

fn capture_quietly(mut command: Command) -> Option<()> {
    command.output().ok().filter(|output| output.status.success()).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(version("3.10\n"), Some((3, 10)));
        assert!(version("3.9").unwrap() < OLDEST);
        assert_eq!(version("three"), None);
    }

    #[test]
    fn offline_without_an_environment_is_refused_and_says_what_to_run() {
        let Err(failure) = Venv::existing("no-such-environment") else { panic!("must be refused") };
        assert!(failure.to_string().contains("cargo xtask demo"), "{failure}");
    }
}
