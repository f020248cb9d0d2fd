//! The C library: what `cargo cinstall` would install, made without cargo-c; and the proof that C, C++ and ctypes can use it.
//!
//! ```text
//! PREFIX/include/rapt.h, rapt_types.h
//! PREFIX/lib/librapt.so.0.1.0   ◄── librapt.so.0.1 (its soname)   ◄── librapt.so
//! PREFIX/lib/librapt.a
//! PREFIX/lib/pkgconfig/rapt.pc
//! ```
//! Deliberately absent: platforms without ELF, for which archives.rs makes archives. There the library is what `cargo build -p rapt-c` leaves, or cargo-c's.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::args::Args;
use crate::binary;
use crate::built;
use crate::docs;
use crate::metadata::{Workspace, root};
use crate::python;
use crate::shell::{Failure, Outcome, capture, cargo, command, say, show, step, write};

pub(crate) const HELP: &str = "\
cargo xtask c [--prefix FOLDER | --check | --all [--only NAME]]

Builds the C library (release) and installs header, shared and static library and rapt.pc below FOLDER.

  --prefix FOLDER   where to; target/c if it is not given. rapt.pc names it as an absolute path
  --check           instead: compiles the examples against both libraries, runs them, and runs them under valgrind (or
                    AddressSanitizer); a step of `cargo xtask test`
  --all             instead: an archive for every platform that wheels are shipped for, into target/dist/c; each is checked as wheels are, and
                    programs are linked with both of its libraries and run where something runs programs of the platform here. Linux alone
  --only NAME       of these one, by the name that its wheel ends in, such as manylinux_2_28_aarch64 or win_amd64";

pub(crate) const PACKAGE: &str = "rapt-c";
/// What cargo calls the library: the façade's is `librapt`.
pub(crate) const BUILT: &str = "librapt_c";
pub(crate) const HEADERS: [&str; 2] = ["rapt.h", "rapt_types.h"];
pub(crate) const BINDING: &str = "bindings/c";
pub(crate) const EXAMPLES: &str = "examples/c";
const DESCRIPTION: &str = "Attention with an exact tensor boundary";

/// What the static library leaves open on Linux, as `rustc --print native-static-libs` says.
pub(crate) const NATIVE_LIBRARIES: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

pub(crate) const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// What archives.rs does not do.
pub(crate) fn run(mut args: Args) -> Outcome {
    let (prefix, is_check) = (args.value("--prefix")?, args.flag("--check"));
    args.finish(HELP)?;
    if is_check {
        return check();
    }
    if cfg!(not(target_os = "linux")) {
        let hint = format!("use `cargo build --release -p {PACKAGE}`, or cargo-c");
        return Err(Failure::Usage(format!("`cargo xtask c` installs ELF libraries only: {hint}")));
    }
    let target = Workspace::load()?.target;
    let prefix = prefix.map_or_else(|| target.join("c"), |prefix| root().join(prefix));
    let tree = step("build the C library", || Tree::install(&target, Profile::Release, &prefix))?;
    println!(
        "{}\nPKG_CONFIG_PATH={} pkg-config --cflags --libs rapt",
        tree.prefix.display(),
        tree.pkg_config().display()
    );
    Ok(())
}

#[derive(Clone, Copy)]
enum Profile {
    /// What the tests have compiled already.
    Dev,
    Release,
}

/// A version's parts, and what the soname shows of them.
pub(crate) struct Version {
    whole: String,
    /// Everything before the first number that is not zero, and that number: as SemVer promises and cargo-c does.
    compatible: String,
}

impl Version {
    /// Of this workspace.
    pub(crate) fn here() -> Self {
        Version::new(env!("CARGO_PKG_VERSION"))
    }

    fn new(whole: &str) -> Self {
        let parts: Vec<&str> = whole.split('.').collect();
        let kept = parts.iter().position(|part| *part != "0").unwrap_or(parts.len() - 1) + 1;
        Version { whole: whole.to_owned(), compatible: parts[..kept].join(".") }
    }

    pub(crate) fn soname(&self) -> String {
        format!("librapt.so.{}", self.compatible)
    }

    pub(crate) fn file(&self) -> String {
        format!("librapt.so.{}", self.whole)
    }
}

/// The name under which programs look for the shared library.
pub(crate) fn soname() -> String {
    Version::here().soname()
}

/// The installed library.
struct Tree {
    prefix: PathBuf,
}

impl Tree {
    fn install(target: &Path, profile: Profile, prefix: &Path) -> Result<Self, Failure> {
        let built = match profile {
            Profile::Dev => built::debug(&["--lib"])?,
            Profile::Release => {
                show(cargo(["build", "--release", "--package", PACKAGE]).current_dir(root()))?;
                target.join("release")
            }
        };
        let tree = Tree { prefix: prefix.to_owned() };
        for made in [tree.include(), tree.pkg_config()] {
            std::fs::create_dir_all(&made).map_err(Failure::file(&made))?;
        }
        let version = Version::here();
        let shared = tree.lib().join(version.file());
        for header in HEADERS {
            copy(&root().join(BINDING).join("include").join(header), &tree.include().join(header))?;
        }
        copy(&built.join(format!("{BUILT}.so")), &shared)?;
        copy(&built.join(format!("{BUILT}.a")), &tree.lib().join("librapt.a"))?;
        for (name, to) in [(version.soname(), version.file()), ("librapt.so".to_owned(), version.soname())] {
            link(&tree.lib().join(name), &to)?;
        }
        let bytes = std::fs::read(&shared).map_err(Failure::file(&shared))?;
        let found = binary::needs(&bytes).and_then(|needs| needs.soname);
        if found.as_deref() != Some(&version.soname()) {
            return Err(Failure::Check(format!("librapt.so has soname {found:?}, not {}", version.soname())));
        }
        let pc = pc(&escaped(&prefix.display().to_string()), &NATIVE_LIBRARIES.join(" "));
        write(&tree.pkg_config().join("rapt.pc"), &pc)?;
        Ok(tree)
    }

    fn include(&self) -> PathBuf {
        self.prefix.join("include")
    }

    fn lib(&self) -> PathBuf {
        self.prefix.join("lib")
    }

    fn pkg_config(&self) -> PathBuf {
        self.lib().join("pkgconfig")
    }
}

/// The file of pkg-config of a library below `prefix`, whose static form leaves `private` open.
pub(crate) fn pc(prefix: &str, private: &str) -> String {
    format!(
        "prefix={prefix}\nexec_prefix=${{prefix}}\nlibdir=${{exec_prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
         Name: rapt\nDescription: {DESCRIPTION}\nVersion: {}\nLibs: -L${{libdir}} -lrapt\n\
         Libs.private: {private}\nCflags: -I${{includedir}}\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// A path as a file of pkg-config has it: an unescaped space would end a flag.
fn escaped(path: &str) -> String {
    path.replace('\\', "\\\\").replace(' ', "\\ ")
}

pub(crate) fn copy(from: &Path, to: &Path) -> Outcome {
    // Removed first: a program that has the old one mapped keeps it.
    remove(to)?;
    std::fs::copy(from, to).map(|_| ()).map_err(Failure::file(from))
}

fn remove(path: &Path) -> Outcome {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Failure::file(path)(error)),
        _ => Ok(()),
    }
}

#[cfg(unix)]
pub(crate) fn link(at: &Path, to: &str) -> Outcome {
    remove(at)?;
    std::os::unix::fs::symlink(to, at).map_err(Failure::file(at))
}

#[cfg(not(unix))]
pub(crate) fn link(at: &Path, _: &str) -> Outcome {
    Err(Failure::Check(format!("{}: links are made on Unix only", at.display())))
}

/// A tool that a machine may lack. Its name is what RAPT_REQUIRE calls it.
struct Tool {
    name: &'static str,
    programs: &'static [&'static str],
}

const CC: Tool = Tool { name: "cc", programs: &["cc", "gcc", "clang"] };
const CXX: Tool = Tool { name: "c++", programs: &["c++", "g++", "clang++"] };
const PKG_CONFIG: Tool = Tool { name: "pkg-config", programs: &["pkg-config", "pkgconf"] };
const VALGRIND: Tool = Tool { name: "valgrind", programs: &["valgrind"] };

impl Tool {
    fn find(&self) -> Option<&'static str> {
        let works = |program: &&&str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
        self.programs.iter().find(works).copied()
    }

    /// The program, or a printed line that says what is skipped without it; a failure if RAPT_REQUIRE names it.
    fn or_skip(&self, what: &str) -> Result<Option<&'static str>, Failure> {
        match self.find() {
            Some(program) => Ok(Some(program)),
            None => skip(self.name, what).map(|()| None),
        }
    }
}

fn skip(tool: &str, what: &str) -> Outcome {
    let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
    if required.split(',').any(|name| name == tool) {
        return Err(Failure::Check(format!("RAPT_REQUIRE asks for {tool}, which this machine lacks: {what}")));
    }
    say(format_args!("skipped: {what}, for want of {tool}"));
    Ok(())
}

/// A program of examples/c (or an absolute path): its file, the language's standard, and the file of the repository that it reads.
pub(crate) struct Program<'a> {
    pub(crate) source: &'a str,
    pub(crate) standard: &'static str,
    tool: &'static Tool,
    pub(crate) reads: Option<&'static str>,
}

impl Program<'_> {
    /// Whether it is C++.
    pub(crate) fn is_cxx(&self) -> bool {
        self.tool.name == CXX.name
    }
}

pub(crate) const PROGRAMS: [Program<'static>; 8] = [
    Program { source: "contiguous.c", standard: "-std=c99", tool: &CC, reads: None },
    Program { source: "backward.c", standard: "-std=c99", tool: &CC, reads: None },
    Program { source: "strided.c", standard: "-std=c11", tool: &CC, reads: None },
    Program { source: "errors.c", standard: "-std=c99", tool: &CC, reads: None },
    Program { source: "kvcache.c", standard: "-std=c99", tool: &CC, reads: None },
    Program { source: "sequences.c", standard: "-std=c99", tool: &CC, reads: None },
    Program { source: "model.c", standard: "-std=c99", tool: &CC, reads: Some(ARCHIVE) },
    Program { source: "attention.cpp", standard: "-std=c++11", tool: &CXX, reads: None },
];

/// An exported program with a buffer that it writes.
const ARCHIVE: &str = "crates/rapt-pt2/tests/fixtures/torch-2.15/state.pt2";

/// A program that was compiled, and the file that it reads.
struct Built {
    file: PathBuf,
    reads: Option<PathBuf>,
}

impl Built {
    fn new(file: PathBuf, program: &Program<'_>) -> Self {
        Built { file, reads: program.reads.map(|file| root().join(file)) }
    }

    /// Its words on a command line.
    fn words(&self) -> impl Iterator<Item = &Path> {
        [Some(self.file.as_path()), self.reads.as_deref()].into_iter().flatten()
    }

    /// Runs it; what it prints is shown only if it fails.
    fn run(&self) -> Outcome {
        let mut words = self.words();
        run_quietly(Command::new(words.next().unwrap_or(Path::new(""))).args(words))
    }
}

/// Builds the library, compiles the examples against both forms of it, runs them, and runs them again under a checker.
pub(crate) fn check() -> Outcome {
    if cfg!(not(target_os = "linux")) {
        return skip("linux", "the C library");
    }
    let target = Workspace::load()?.target;
    let tree = step("the C library", || Tree::install(&target, Profile::Dev, &target.join("c-test")))?;
    step("C, C++ and ctypes", || {
        let mut made = Vec::new();
        for program in &PROGRAMS {
            if let Some(compiler) = program.tool.or_skip(program.source)? {
                for form in [Form::Shared, Form::Static] {
                    let built = Built::new(compile(&tree, compiler, program, form)?, program);
                    built.run()?;
                    made.push(built);
                }
            }
        }
        let pages = docs::c_programs()?;
        if let Some(compiler) = CC.or_skip("the C of the documentation")? {
            for (at, (place, source)) in pages.iter().enumerate() {
                let file = tree.prefix.join(format!("page-{at}.c"));
                write(&file, &format!("#line 1 \"{place}\"\n{source}"))?;
                let page =
                    Program { source: &file.display().to_string(), standard: "-std=c99", tool: &CC, reads: None };
                run_quietly(&mut Command::new(compile(&tree, compiler, &page, Form::Shared)?))?;
            }
        }
        let (python, _) = python::find()?;
        let script = root().join(EXAMPLES).join("attention.py");
        run_quietly(command(python, [script, tree.lib().join("librapt.so")]).env_remove("PYTHONPATH"))?;
        with_pkg_config(&tree.prefix, &tree.prefix.join("contiguous.c-pkg-config"))?;
        say(format_args!("{} programs, {} of the documentation and attention.py run", made.len(), pages.len()));
        under_valgrind(&tree, &made)
    })
}

#[derive(Clone, Copy)]
enum Form {
    Shared,
    Static,
    /// Static, with AddressSanitizer around the program and its heap.
    Sanitized,
}

fn compile(tree: &Tree, compiler: &str, program: &Program<'_>, form: Form) -> Result<PathBuf, Failure> {
    let end = match form {
        Form::Shared => "shared",
        Form::Static => "static",
        Form::Sanitized => "asan",
    };
    let name = Path::new(program.source).file_name().unwrap_or_default().to_string_lossy();
    let file = tree.prefix.join(format!("{name}-{end}"));
    let mut cc = command(compiler, [program.standard, "-g", "-O1"]);
    cc.args(WARNINGS).arg("-I").arg(tree.include()).arg(root().join(EXAMPLES).join(program.source));
    cc.arg("-o").arg(&file);
    match form {
        Form::Shared => {
            cc.arg("-L").arg(tree.lib()).args(["-lrapt", "-lm", "-pthread"]);
            cc.arg(format!("-Wl,-rpath,{}", tree.lib().display()))
        }
        Form::Static => cc.arg(tree.lib().join("librapt.a")).args(NATIVE_LIBRARIES),
        Form::Sanitized => cc.arg("-fsanitize=address").arg(tree.lib().join("librapt.a")).args(NATIVE_LIBRARIES),
    };
    show(&mut cc)?;
    Ok(file)
}

/// Runs a program; what it prints is shown only if it fails.
fn run_quietly(program: &mut Command) -> Outcome {
    capture(program).map(|_| ())
}

/// The flags that pkg-config tells are enough for a program, with the library found at run time by its soname.
/// A program in the file `program`, compiled with what rapt.pc of the library below `prefix` says, and run.
pub(crate) fn with_pkg_config(prefix: &Path, program: &Path) -> Outcome {
    let what = "rapt.pc";
    let (Some(pkg_config), Some(cc)) = (PKG_CONFIG.or_skip(what)?, CC.or_skip(what)?) else { return Ok(()) };
    let tree = Tree { prefix: prefix.to_owned() };
    let ask = |args: &[&str]| capture(command(pkg_config, args).env("PKG_CONFIG_PATH", tree.pkg_config()));
    let version = ask(&["--modversion", "rapt"])?;
    if version.trim() != env!("CARGO_PKG_VERSION") {
        return Err(Failure::Check(format!("rapt.pc is of version {}", version.trim())));
    }
    // By a shell, as in a Makefile: the flags hold this checkout's path, with its spaces and letters escaped.
    let with_flags = r#"eval "set -- \"\$@\" $("$PKG_CONFIG" --cflags --libs rapt) -lm"; exec "$@""#;
    let mut compile = command("sh", ["-c", with_flags, "sh", cc]);
    compile.args(WARNINGS).arg(root().join(EXAMPLES).join("contiguous.c")).arg("-o").arg(program);
    show(compile.env("PKG_CONFIG", pkg_config).env("PKG_CONFIG_PATH", tree.pkg_config()))?;
    run_quietly(Command::new(program).env("LD_LIBRARY_PATH", tree.lib()))
}

/// No invalid access, no jump on undefined bytes, no leak; on the AVX2 kernels, the widest that valgrind knows.
fn under_valgrind(tree: &Tree, programs: &[Built]) -> Outcome {
    let Some(valgrind) = VALGRIND.find() else {
        skip(VALGRIND.name, "leaks and invalid accesses by valgrind")?;
        return under_sanitizer(tree);
    };
    let has_avx2 = cfg!(target_arch = "x86_64") && std::is_x86_feature_detected!("avx2");
    let suppressions = root().join(BINDING).join("valgrind.supp");
    for program in programs {
        let mut checked = command(
            valgrind,
            [
                "--quiet",
                "--error-exitcode=1",
                "--leak-check=full",
                "--show-leak-kinds=definite,indirect,possible",
                "--errors-for-leak-kinds=definite,indirect,possible",
            ],
        );
        checked.arg(format!("--suppressions={}", suppressions.display()));
        checked.args(program.words()).env("RAPT_ISA", if has_avx2 { "avx2" } else { "scalar" });
        run_quietly(&mut checked)?;
    }
    say(format_args!("{} programs are clean under valgrind", programs.len()));
    Ok(())
}

fn under_sanitizer(tree: &Tree) -> Outcome {
    const WHAT: &str = "leaks and invalid accesses by AddressSanitizer";
    let Some(cc) = CC.find().filter(|cc| has_sanitizer(tree, cc)) else { return skip("asan", WHAT) };
    for program in PROGRAMS.iter().filter(|program| program.tool.name == CC.name) {
        Built::new(compile(tree, cc, program, Form::Sanitized)?, program).run()?;
    }
    say(format_args!("the C programs are clean under AddressSanitizer"));
    Ok(())
}

/// Whether the compiler comes with the sanitizer's library.
fn has_sanitizer(tree: &Tree, cc: &str) -> bool {
    let (source, file) = (tree.prefix.join("asan.c"), tree.prefix.join("asan"));
    let made = write(&source, "int main(void) { return 0; }\n").is_ok();
    made && command(cc, ["-fsanitize=address", "-o"]).arg(&file).arg(&source).output().is_ok_and(|o| o.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soname_shows_what_semver_promises() {
        for (version, soname) in [
            ("0.1.0", "librapt.so.0.1"),
            ("0.0.3", "librapt.so.0.0.3"),
            ("1.2.3", "librapt.so.1"),
            ("0.12.1", "librapt.so.0.12"),
        ] {
            assert_eq!(Version::new(version).soname(), soname);
        }
        assert_eq!(Version::new("0.1.0").file(), "librapt.so.0.1.0");
    }

    #[test]
    fn a_space_does_not_end_a_flag() {
        assert_eq!(escaped("/a folder/rapt"), "/a\\ folder/rapt");
    }

    #[test]
    fn a_missing_tool_is_no_program() {
        let tool = Tool { name: "none", programs: &["rapt-no-such-tool"] };
        assert_eq!(tool.find(), None);
        assert!(matches!(tool.or_skip("nothing"), Ok(None)));
    }
}
