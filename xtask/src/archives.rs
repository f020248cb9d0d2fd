//! The C library as archives, one for every platform that wheels are shipped for: each checked, linked with programs (with both libraries, but of musllinux and macOS with the shared one), and run wherever programs of the
//! platform run here.
//!
//! ```text
//! cargo, zig or MinGW ─► rapt-c-VERSION-PLATFORM/{include, lib, bin} ─► needs ─► examples/c, by one of ─► .tar.gz, for Windows .zip
//!   this machine's compiler            manylinux x86_64
//!   Debian's and qemu, or wine         manylinux aarch64, Windows
//!   zig and musl's loader              musllinux
//!   zig, linked alone                  macOS
//! ```
//! rapt.pc finds the library beside itself, so an archive may be unpacked anywhere. Deliberately absent: signatures.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::args::Args;
use crate::binary;
use crate::c::{self, PROGRAMS};
use crate::cross::{self, Library};
use crate::metadata::{Workspace, root};
use crate::platforms::{self, Platform};
use crate::python::{BUILD_REQUIREMENTS, Venv};
use crate::shell::{Failure, Outcome, capture, cargo, command, remove_folder, say, show, step, write};
use crate::{debian, targets};

/// Below the target folder.
const FOLDER: &str = "dist/c";
const ZIGBUILD: &str = "xtask/requirements/archives.txt";
const LICENSES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "THIRD-PARTY-LICENSES.md"];

/// What an archive has of a platform.
struct Form {
    /// What cargo leaves, and its place in the archive. The first is the shared library.
    files: [(&'static str, String); 2],
    /// What links to it: names in `lib`, and what they name.
    links: Vec<(String, String)>,
    /// What programs are linked with, in `lib`.
    linked: &'static str,
    /// What the static library leaves open, as `rustc --print native-static-libs` says.
    private: String,
}

impl Form {
    fn of(platform: &Platform) -> Self {
        let archive = |name: &'static str| (name, "lib/librapt.a".to_owned());
        if platform.triple.contains("windows") {
            return Form {
                // A program asks for it by this name.
                files: [("rapt_c.dll", "bin/rapt_c.dll".to_owned()), archive("librapt_c.a")],
                links: Vec::new(),
                linked: "librapt.dll.a",
                private: "-lkernel32 -lntdll -luserenv -lws2_32 -ldbghelp".to_owned(),
            };
        }
        if platform.triple.ends_with("apple-darwin") {
            return Form {
                files: [("librapt_c.dylib", "lib/librapt.dylib".to_owned()), archive("librapt_c.a")],
                links: Vec::new(),
                linked: "librapt.dylib",
                private: "-liconv -lSystem -lc -lm".to_owned(),
            };
        }
        let version = c::Version::here();
        Form {
            files: [("librapt_c.so", format!("lib/{}", version.file())), archive("librapt_c.a")],
            links: vec![(version.soname(), version.file()), ("librapt.so".to_owned(), version.soname())],
            linked: "librapt.so",
            private: c::NATIVE_LIBRARIES.join(" "),
        }
    }
}

pub(crate) fn run(mut args: Args) -> Outcome {
    match (args.flag("--all"), args.value("--only")?) {
        (false, None) => c::run(args),
        (false, Some(_)) => Err(Failure::Usage(format!("--only goes beside --all\n\n{}", c::HELP))),
        (true, only) => {
            args.finish(c::HELP)?;
            all(only.as_deref())
        }
    }
}

/// All of them, or the one of this name.
fn all(only: Option<&str>) -> Outcome {
    if cfg!(not(target_os = "linux")) {
        return Err(Failure::Usage("`--all` needs Linux: elsewhere use `cargo build --release -p rapt-c`".to_owned()));
    }
    let chosen = platforms::named(only, &[])?;
    targets::require(&chosen.iter().map(|platform| platform.triple).collect::<Vec<_>>())?;
    let venv = Venv::at(".venv")?;
    venv.require(&[BUILD_REQUIREMENTS, ZIGBUILD], None)?;
    let target = Workspace::load()?.target;
    chosen.into_iter().try_for_each(|platform| archive(&venv, &target, platform))
}

fn archive(venv: &Venv, target: &Path, platform: &Platform) -> Outcome {
    let (form, name) = (Form::of(platform), format!("rapt-c-{}-{}", env!("CARGO_PKG_VERSION"), platform.name));
    let folder = target.join(FOLDER);
    let tree = folder.join(&name);
    remove_folder(&tree)?;
    step(&format!("build the C library for {}", platform.name), || {
        let built = build(venv, target, platform)?;
        fill(&tree, &built, &form, platform)
    })?;
    let shared = tree.join(&form.files[0].1);
    let bytes = std::fs::read(&shared).map_err(Failure::file(&shared))?;
    let needs = binary::needs(&bytes);
    let mut wrong = platform.wrong_needs(&form.files[0].1, needs.as_ref());
    let offered = needs.iter().flat_map(|needs| &needs.offered);
    wrong.extend(
        offered.filter(|name| !name.starts_with("rapt_")).map(|name| format!("the library offers {name}")).take(5),
    );
    if !wrong.is_empty() {
        return Err(Failure::Check(wrong.join("\n")));
    }
    step(&format!("link with the C library for {}", platform.name), || used(venv, target, platform, &tree, &form))?;
    let (kind, end) = if platform.triple.contains("windows") { ("zipfile", "zip") } else { ("tarfile", "tar.gz") };
    let packed = folder.join(format!("{name}.{end}"));
    // Named from where it lies, so that what is unpacked is one folder.
    show(venv.python(["-m", kind, "-c"]).arg(&packed).arg(&name).current_dir(&folder))?;
    remove_folder(&tree)?;
    say(format_args!("{}", packed.display()));
    Ok(())
}

/// Compiles it, and gives the folder where cargo leaves it. Linked by zig, but for Windows, where zig offers every symbol.
fn build(venv: &Venv, target: &Path, platform: &Platform) -> Result<PathBuf, Failure> {
    if platform.triple == "x86_64-pc-windows-gnu" {
        return cross::build(platform.triple, &["--lib", "--package", c::PACKAGE]);
    }
    let mut build = cargo(["zigbuild", "--release", "--lib", "--package", c::PACKAGE, "--target"]);
    // zig has the symbol lists of older C libraries.
    let (major, minor) = platform.oldest_glibc().unwrap_or_default();
    let older = if major > 0 { format!("{}.{major}.{minor}", platform.triple) } else { platform.triple.to_owned() };
    build.arg(older).env("CARGO_TARGET_DIR", target).current_dir(root());
    if let Some((major, minor)) = platform.oldest_macos() {
        build.env("MACOSX_DEPLOYMENT_TARGET", format!("{major}.{minor}"));
    }
    // A library that programs load takes musl from where they run.
    build.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS", "-Ctarget-feature=-crt-static");
    with_programs_of(venv, &mut build)?;
    show(&mut build)?;
    Ok(target.join(platform.triple).join("release"))
}

/// cargo-zigbuild and its Python, which has zig, are found first.
fn with_programs_of(venv: &Venv, of: &mut Command) -> Outcome {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(venv.programs()).chain(std::env::split_paths(&path));
    let joined = std::env::join_paths(paths).map_err(|error| Failure::Check(error.to_string()))?;
    of.env("PATH", joined);
    Ok(())
}

fn fill(tree: &Path, built: &Path, form: &Form, platform: &Platform) -> Outcome {
    for part in ["include", "lib/pkgconfig", "bin"] {
        let folder = tree.join(part);
        let is_needed = part != "bin" || platform.triple.contains("windows");
        if is_needed {
            std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
        }
    }
    for header in c::HEADERS {
        c::copy(&root().join(c::BINDING).join("include").join(header), &tree.join("include").join(header))?;
    }
    for license in LICENSES {
        c::copy(&root().join(license), &tree.join(license))?;
    }
    for (from, to) in &form.files {
        c::copy(&built.join(from), &tree.join(to))?;
    }
    if platform.triple.contains("windows") {
        c::copy(&built.join("librapt_c.dll.a"), &tree.join("lib").join(form.linked))?;
    }
    for (at, to) in &form.links {
        c::link(&tree.join("lib").join(at), to)?;
    }
    write(&tree.join("lib/pkgconfig/rapt.pc"), &c::pc("${pcfiledir}/../..", &form.private))
}

/// Links the examples with what the archive will hold, and runs them where something here does.
fn used(venv: &Venv, target: &Path, platform: &Platform, tree: &Path, form: &Form) -> Outcome {
    let programs = target.join(FOLDER).join("programs");
    remove_folder(&programs)?;
    std::fs::create_dir_all(&programs).map_err(Failure::file(&programs))?;
    let library = Library {
        include: tree.join("include"),
        linked: tree.join("lib").join(form.linked),
        archive: tree.join("lib/librapt.a"),
        to: programs.clone(),
    };
    match platform.triple {
        "aarch64-unknown-linux-gnu" | "x86_64-pc-windows-gnu" => {
            // Beside the programs, under the name that they look for.
            let name = if platform.triple.contains("windows") { "rapt_c.dll".to_owned() } else { c::soname() };
            c::copy(&tree.join(&form.files[0].1), &programs.join(name))?;
            cross::link_and_run(platform.triple, &library)?;
        }
        triple => {
            let mut count = 0;
            // zig has its own library for what the static one leaves open.
            let statically: &[&str] = if is_here(triple) { &c::NATIVE_LIBRARIES } else { &[] };
            let forms = [(library.linked.as_path(), &["-lm"][..]), (library.archive.as_path(), statically)];
            for (linked, beside) in forms.into_iter().filter(|(_, beside)| !beside.is_empty()) {
                for program in PROGRAMS.iter().filter(|program| !program.is_cxx()) {
                    let file = programs.join(program.source);
                    let mut cc = compiler(venv, triple);
                    cc.args([program.standard, "-O1"]).args(c::WARNINGS).arg("-I").arg(&library.include);
                    cc.arg(root().join(c::EXAMPLES).join(program.source)).arg("-o").arg(&file).arg(linked).args(beside);
                    show(&mut cc)?;
                    let Some(mut run) = runner(target, triple, &file)? else { continue };
                    run.env("LD_LIBRARY_PATH", tree.join("lib")).args(program.reads.map(|file| root().join(file)));
                    capture(&mut run)?;
                    count += 1;
                }
            }
            let what = if count == 0 {
                "linked, and not run: nothing here runs them".to_owned()
            } else {
                format!("{count} run")
            };
            say(format_args!("programs in C: {what}"));
            if is_here(triple) {
                c::with_pkg_config(tree, &programs.join("by-pkg-config"))?;
            }
        }
    }
    remove_folder(&programs)
}

/// Whether this machine's compiler makes programs of a platform, and runs them.
fn is_here(triple: &str) -> bool {
    cfg!(target_arch = "x86_64") && triple == "x86_64-unknown-linux-gnu"
}

/// This machine's compiler for its own platform, else zig.
fn compiler(venv: &Venv, triple: &str) -> Command {
    if is_here(triple) {
        return command("cc", [""; 0]);
    }
    let of = match triple {
        "x86_64-unknown-linux-musl" => "x86_64-linux-musl",
        "aarch64-apple-darwin" => "aarch64-macos",
        "x86_64-apple-darwin" => "x86_64-macos",
        _ => "x86_64-linux-gnu",
    };
    let mut zig = venv.python(["-m", "ziglang", "cc", "-target", of]);
    if of.ends_with("musl") {
        // Its own checks ask for functions that musl of Debian 12 does not have.
        zig.args(["-dynamic", "-fno-sanitize=undefined"]);
    }
    zig
}

/// What starts a program of a platform that no emulator is needed for.
fn runner(target: &Path, triple: &str, file: &Path) -> Result<Option<Command>, Failure> {
    Ok(match triple {
        _ if is_here(triple) => Some(Command::new(file)),
        "x86_64-unknown-linux-musl" if cfg!(target_arch = "x86_64") => {
            let tree = debian::unpacked(&target.join("cross").join(triple), &["musl"])?;
            Some(command(debian::find(&tree, |name| name == "libc.so")?, [file]))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_archive_has_both_libraries_and_what_links_to_them() {
        for platform in &platforms::PLATFORMS {
            let form = Form::of(platform);
            assert!(form.files[1].1 == "lib/librapt.a" && !form.private.is_empty(), "{}", platform.name);
            let leads_to = |name: &str| form.links.iter().find(|(at, _)| at == name).map(|(_, to)| to.clone());
            let found = leads_to(form.linked).and_then(|next| leads_to(&next)).map(|file| format!("lib/{file}"));
            assert!(form.links.is_empty() || found.as_deref() == Some(form.files[0].1.as_str()), "{}", platform.name);
        }
    }
}
