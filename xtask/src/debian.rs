//! Programs and drivers out of Debian's packages, unpacked below the target folder: nothing is installed, and no right is needed.
//!
//! ```text
//! apt-get install --download-only ─► FOLDER/packages ─► dpkg-deb -x ─► FOLDER/root
//! ```
//! Deliberately absent: other systems than Debian and Ubuntu.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{Failure, Outcome, capture, command, write};

/// The program that is needed for it and missing here, if there is one.
pub(crate) fn missing() -> Option<&'static str> {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    ["apt-get", "dpkg-deb"].into_iter().find(|program| !has(program))
}

/// `packages`, with what they need besides and this machine lacks, unpacked below `folder`; once.
pub(crate) fn unpacked(folder: &Path, packages: &[&str]) -> Result<PathBuf, Failure> {
    unpack(folder, packages, &[])
}

/// `packages` of another architecture, with all that they need: a tree that a program of it finds its libraries in.
pub(crate) fn unpacked_for(architecture: &str, folder: &Path, packages: &[&str]) -> Result<PathBuf, Failure> {
    let state = folder.join("state");
    let lists = state.join("lists/partial");
    std::fs::create_dir_all(&lists).map_err(Failure::file(&lists))?;
    let status = state.join("status");
    write(&status, "")?;
    let options = [
        format!("APT::Architecture={architecture}"),
        format!("APT::Architectures::={architecture}"),
        format!("Dir::State={}", state.display()),
        // Nothing of that architecture is here.
        format!("Dir::State::status={}", status.display()),
        "Dir::Cache::pkgcache=".to_owned(),
        "Dir::Cache::srcpkgcache=".to_owned(),
    ];
    unpack(folder, packages, &options)
}

fn unpack(folder: &Path, packages: &[&str], options: &[String]) -> Result<PathBuf, Failure> {
    let (archives, tree, done) = (folder.join("packages"), folder.join("root"), folder.join("done"));
    if !done.is_file() {
        download(&archives, packages, options)?;
        for package in files(&archives)?.iter().filter(|path| path.extension().is_some_and(|end| end == "deb")) {
            capture(command("dpkg-deb", ["-x"]).arg(package).arg(&tree))?;
        }
        write(&done, "")?;
    }
    Ok(tree)
}

/// A machine that has never asked Debian for its lists asks now.
fn download(archives: &Path, packages: &[&str], options: &[String]) -> Outcome {
    let partial = archives.join("partial");
    std::fs::create_dir_all(&partial).map_err(Failure::file(&partial))?;
    let archives = format!("Dir::Cache::archives={}", archives.display());
    let apt = |words: &[&str]| {
        let mut apt = command("apt-get", words);
        apt.args(options.iter().flat_map(|option| ["-o", option])).args([
            "-o",
            &archives,
            "-o",
            "Debug::NoLocking=1",
            "-o",
            "APT::Sandbox::User=root",
        ]);
        apt
    };
    let fetch = || {
        let mut apt = apt(&["install", "--yes", "--download-only", "--no-install-recommends", "--reinstall"]);
        apt.args(packages);
        apt
    };
    if fetch().output().is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    capture(&mut apt(&["update"]))?;
    capture(&mut fetch()).map(drop)
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

/// The first file below `folder` whose name fits.
pub(crate) fn find(folder: &Path, fits: impl Fn(&str) -> bool + Copy) -> Result<PathBuf, Failure> {
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for path in files(&folder)? {
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            } else if path.file_name().and_then(|name| name.to_str()).is_some_and(fits) {
                return Ok(path);
            }
        }
    }
    Err(Failure::Check(format!("{}: what is looked for is not in the packages", folder.display())))
}

/// `LD_LIBRARY_PATH` of a program with these folders ahead of what is there already.
pub(crate) fn library_path(folders: impl IntoIterator<Item = PathBuf>) -> Result<std::ffi::OsString, Failure> {
    let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let paths = folders.into_iter().chain(std::env::split_paths(&others).filter(|path| path.is_absolute()));
    std::env::join_paths(paths).map_err(|error| Failure::Check(error.to_string()))
}
