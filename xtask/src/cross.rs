//! Platforms beside this machine's own: what compiles for them and runs their programs, out of Debian's packages, and the tests there.
//!
//! ```text
//! debian.rs         ─► target/cross/PLATFORM/root ─► target/cross/PLATFORM/bin/{cc, c++, run}
//! cargo test        ─► the Rust tests, linked by cc and run by `run`: qemu for Arm, wine for Windows
//! examples/c        ─► linked with both forms of the C library, and run
//! rapt doctor       ─► the command line, with its self-test
//! ```
//! Nothing is installed. Deliberately absent: speed, of which an emulator says nothing; macOS, whose programs nothing here runs
//! (`cargo xtask wheel --all` links for it).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::args::Args;
use crate::c::{self, PROGRAMS};
use crate::metadata::{Workspace, root};
use crate::shell::{Failure, Outcome, capture, cargo, command, say, show, step, write};
use crate::{debian, targets};

/// Another platform, and how its programs come to run here.
struct Platform {
    /// As rustc names it.
    triple: &'static str,
    /// Compilers, and what runs programs.
    packages: &'static [&'static str],
    /// Makes `bin` of what was unpacked.
    prepare: fn(&Folders) -> Outcome,
    /// The instruction sets whose tests must run.
    required: &'static str,
    /// Packages whose tests cannot run here, and why.
    without: &'static [(&'static str, &'static str)],
    /// Tests that cannot run here: parts of their names, and why.
    left_out: &'static [(&'static str, &'static str)],
    /// What a static C library leaves open, as `rustc --print native-static-libs` says.
    native: &'static [&'static str],
    /// Whether a library is found beside the program that was linked with it.
    is_windows: bool,
}

const WINDOWS: Platform = Platform {
    triple: "x86_64-pc-windows-gnu",
    packages: &["gcc-mingw-w64-x86-64-posix", "g++-mingw-w64-x86-64-posix", "wine64"],
    prepare: prepare_windows,
    required: "",
    without: &[],
    left_out: &[],
    native: &["-lkernel32", "-lntdll", "-luserenv", "-lws2_32", "-ldbghelp"],
    is_windows: true,
};

const NO_CHILD: &str = "a program under qemu-user cannot start another of its platform";

const ARM: Platform = Platform {
    triple: "aarch64-unknown-linux-gnu",
    packages: &["gcc-aarch64-linux-gnu", "g++-aarch64-linux-gnu", "qemu-user-static"],
    prepare: prepare_arm,
    required: "neon,neon_bf16",
    without: &[("rapt-cli", NO_CHILD)],
    left_out: &[
        ("the_byte_beside_is_refused", NO_CHILD),
        ("may_be_far_apart", "it needs more addresses than qemu-user has"),
        ("keys_past_two_to_the", "it needs more addresses than qemu-user has"),
    ],
    native: &["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"],
    is_windows: false,
};

const PLATFORMS: [&Platform; 2] = [&WINDOWS, &ARM];

/// Packages of the workspace whose tests have nothing of the platform in them, or need what is not there: Python's libraries, a browser; and
/// texts for GPUs, which this machine's C++ compiler makes programs of this machine.
const LEFT_OUT: [&str; 7] =
    ["rapt-python", "rapt-python-vulkan", "rapt-web", "rapt-shader", "rapt-metal", "rapt-sentences", "xtask"];

/// Below the scripts: what is looked for by its name.
const BY_NAME: &str = "path";

/// Where a platform's programs lie.
pub(crate) struct Folders {
    /// Debian's packages, unpacked.
    root: PathBuf,
    /// Scripts that start them.
    bin: PathBuf,
    /// What else a platform keeps.
    pub(crate) kept: PathBuf,
}

impl Folders {
    /// One of the scripts: `cc`, `c++`, `run`.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    fn script(&self, name: &str, text: &str) -> Outcome {
        let file = self.bin.join(name);
        write(&file, &format!("#!/bin/sh\n{text}\n"))?;
        executable(&file)
    }

    /// The line of a script that says where this machine's own libraries of those packages are.
    fn with_libraries(&self) -> String {
        let [usr, own] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|folder| self.root.join(folder));
        format!("export LD_LIBRARY_PATH={}:{}", in_shell(&usr), in_shell(&own))
    }
}

/// A path as one word of a shell.
fn in_shell(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(unix)]
fn executable(file: &Path) -> Outcome {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).map_err(Failure::file(file))
}

#[cfg(not(unix))]
fn executable(_: &Path) -> Outcome {
    Ok(())
}

/// A C library, in both forms.
pub(crate) struct Library {
    /// The folder of its headers.
    pub(crate) include: PathBuf,
    /// What programs are linked with that load the shared one.
    pub(crate) linked: PathBuf,
    /// The static one.
    pub(crate) archive: PathBuf,
    /// Where the shared one lies under the name that programs look for, and where they are put.
    pub(crate) to: PathBuf,
}

/// The examples in C and C++, linked with a library of another platform and run there.
pub(crate) fn link_and_run(triple: &str, library: &Library) -> Outcome {
    let platform = platform(triple)?;
    platform.link_and_run(&platform.folders()?, library)
}

/// Builds a package in the profile of releases, and gives the folder where cargo leaves it.
pub(crate) fn build(triple: &str, words: &[&str]) -> Result<PathBuf, Failure> {
    let platform = platform(triple)?;
    show(platform.cargo(&platform.folders()?, &["build", "--release"]).args(words))?;
    Ok(Workspace::load()?.target.join(triple).join("release"))
}

/// What compiles for a platform and runs its programs.
pub(crate) fn folders(triple: &str) -> Result<Folders, Failure> {
    platform(triple)?.folders()
}

fn platform(triple: &str) -> Result<&'static Platform, Failure> {
    PLATFORMS.into_iter().find(|platform| platform.triple == triple).ok_or_else(|| {
        let known: Vec<&str> = PLATFORMS.into_iter().map(|platform| platform.triple).collect();
        Failure::Usage(format!("--target takes {}, not `{triple}`", known.join(" or ")))
    })
}

/// The tests on another platform: all of them, or those of the packages that are named.
pub(crate) fn test(triple: &str, packages: &[String]) -> Outcome {
    let platform = platform(triple)?;
    targets::require(&[triple])?;
    let folders = platform.folders()?;
    platform.rust_tests(&folders, packages)?;
    let is_asked = |name: &str| packages.is_empty() || packages.iter().any(|package| package == name);
    if is_asked("rapt-c") {
        platform.c_programs(&folders)?;
    }
    if is_asked("rapt-cli") {
        platform.command_line(&folders)?;
    }
    Ok(())
}

impl Platform {
    /// Its compilers and what runs programs, unpacked once.
    fn folders(&self) -> Result<Folders, Failure> {
        if let Some(missing) = debian::missing() {
            return Err(Failure::Check(format!("{} needs Debian's packages, for want of {missing}", self.triple)));
        }
        let kept = Workspace::load()?.target.join("cross").join(self.triple);
        step(&format!("unpack what compiles for {} and runs it", self.triple), || {
            let root = debian::unpacked(&kept, self.packages)?;
            let folders = Folders { root, bin: kept.join("bin"), kept };
            let by_name = folders.bin.join(BY_NAME);
            std::fs::create_dir_all(&by_name).map_err(Failure::file(&by_name))?;
            (self.prepare)(&folders)?;
            Ok(folders)
        })
    }

    /// A cargo that compiles for this platform, and runs what it compiled.
    fn cargo(&self, folders: &Folders, words: &[&str]) -> Command {
        let mut command = cargo(words);
        let name = self.triple.replace('-', "_").to_uppercase();
        command.args(["--target", self.triple]).current_dir(root());
        command.env(format!("CARGO_TARGET_{name}_LINKER"), folders.bin.join("cc"));
        // As a list: cargo takes a string apart at spaces, which the path may have.
        command.arg("--config").arg(format!("target.{}.runner=[{:?}]", self.triple, folders.bin.join("run")));
        // rustc looks for dlltool there, and for nothing else: `cc` is this machine's.
        let path = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::iter::once(folders.bin.join(BY_NAME)).chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(paths).unwrap_or(path));
        command
    }

    fn rust_tests(&self, folders: &Folders, packages: &[String]) -> Outcome {
        let mut test = self.cargo(folders, &["test", "--no-fail-fast"]);
        let is_without = |package: &str| self.without.iter().any(|(name, _)| *name == package);
        for (name, why) in self.without {
            say(format_args!("── left out: the tests of {name}: {why}"));
        }
        if packages.is_empty() {
            let left_out = LEFT_OUT.into_iter().chain(self.without.iter().map(|(name, _)| *name));
            test.arg("--workspace").args(left_out.flat_map(|name| ["--exclude", name]));
        } else if packages.iter().all(|package| is_without(package)) {
            return Ok(());
        }
        test.args(packages.iter().filter(|package| !is_without(package)).flat_map(|name| ["--package", name]));
        // Programs of the documentation would be linked one by one.
        test.args(["--lib", "--bins", "--tests"]).env("RAPT_REQUIRE", self.required).arg("--");
        for (name, why) in self.left_out {
            say(format_args!("── left out: {name}*: {why}"));
            test.args(["--skip", name]);
        }
        step(&format!("cargo test for {}", self.triple), || show(&mut test))
    }

    /// The folder in which cargo leaves a package's targets.
    fn built(&self, folders: &Folders, words: &[&str]) -> Result<PathBuf, Failure> {
        show(self.cargo(folders, &["build"]).args(words))?;
        Ok(Workspace::load()?.target.join(self.triple).join("debug"))
    }

    /// The examples, linked with the shared and with the static library of the tests' profile.
    fn c_programs(&self, folders: &Folders) -> Outcome {
        step(&format!("C and C++ for {}", self.triple), || {
            let built = self.built(folders, &["--package", "rapt-c", "--lib"])?;
            let to = folders.kept.join("c");
            std::fs::create_dir_all(&to).map_err(Failure::file(&to))?;
            let linked = self.shared_library(&built, &to)?;
            let archive = built.join("librapt_c.a");
            self.link_and_run(
                folders,
                &Library { include: root().join(c::BINDING).join("include"), linked, archive, to },
            )
        })
    }

    /// The examples, linked with both forms of a library, and run.
    fn link_and_run(&self, folders: &Folders, library: &Library) -> Outcome {
        let Library { include, linked, archive, to } = library;
        for program in &PROGRAMS {
            for is_shared in [true, false] {
                let file = to.join(format!("{}-{}.exe", program.source, if is_shared { "shared" } else { "static" }));
                let compiler = if program.is_cxx() { "c++" } else { "cc" };
                let mut cc = command(folders.bin.join(compiler), [program.standard, "-O1"]);
                cc.args(c::WARNINGS).arg("-I").arg(include);
                cc.arg(root().join(c::EXAMPLES).join(program.source)).arg("-o").arg(&file);
                if is_shared {
                    cc.arg(linked).arg("-lm");
                    if !self.is_windows {
                        cc.arg(format!("-Wl,-rpath,{}", to.display()));
                    }
                } else {
                    cc.arg(archive).args(self.native);
                }
                if self.is_windows && program.is_cxx() {
                    // Else the compiler's own libraries would have to lie beside the program.
                    cc.arg("-static");
                }
                show(&mut cc)?;
                let mut run = command(folders.bin.join("run"), [&file]);
                run.args(program.reads.map(|file| root().join(file)));
                capture(&mut run)?;
            }
        }
        say(format_args!("{} programs run, each with both forms of the library", PROGRAMS.len()));
        Ok(())
    }

    /// What programs are linked with; what they load lies in `to`.
    fn shared_library(&self, built: &Path, to: &Path) -> Result<PathBuf, Failure> {
        let copied = |from: PathBuf, to: PathBuf| std::fs::copy(&from, &to).map_err(Failure::file(&from)).map(|_| to);
        if self.is_windows {
            copied(built.join("rapt_c.dll"), to.join("rapt_c.dll"))?;
            return Ok(built.join("librapt_c.dll.a"));
        }
        // Under the name that programs look for.
        copied(built.join("librapt_c.so"), to.join(c::soname()))
    }

    /// The command line's own check of this machine.
    fn command_line(&self, folders: &Folders) -> Outcome {
        step(&format!("rapt doctor for {}", self.triple), || {
            let built = self.built(folders, &["--package", "rapt-cli", "--bin", "rapt"])?;
            let program = built.join(if self.is_windows { "rapt.exe" } else { "rapt" });
            let told = capture(command(folders.bin.join("run"), [&program]).arg("doctor"))?;
            say(told.trim_end());
            Ok(())
        })
    }
}

/// What wine of Debian 12 lacks of Windows 10, and Rust's library asks for: random bytes.
const RANDOM: &str = "\
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T size) { return RtlGenRandom(data, (ULONG)size); }
";

/// dlltool hands the names of its temporary files to the assembler without quotes: they lie where no folder has a space, wherever rustc wants them.
const ELSEWHERE: &str = "\
temporary=$(mktemp -d)
trap 'rm -rf \"$temporary\"' EXIT
last=
for word; do
    shift
    if [ \"$last\" = --temp-prefix ]; then word=$temporary/import; fi
    set -- \"$@\" \"$word\"
    last=$word
done
";

/// MinGW and wine. wine asks for its server by a script that knows one place, and for zlib below /usr.
fn prepare_windows(folders: &Folders) -> Outcome {
    let mingw = |program: &str| {
        let program = folders.root.join(format!("usr/bin/x86_64-w64-mingw32-{program}"));
        format!("exec {} \"$@\"", in_shell(&program))
    };
    let with = |text: String| format!("{}\n{text}", folders.with_libraries());
    for (name, program) in [("cc", "gcc-posix"), ("c++", "g++-posix")] {
        folders.script(name, &with(mingw(program)))?;
    }
    let dlltool = in_shell(&folders.root.join("usr/bin/x86_64-w64-mingw32-dlltool"));
    folders.script("path/x86_64-w64-mingw32-dlltool", &with(format!("{ELSEWHERE}{dlltool} \"$@\"")))?;
    let wine = folders.root.join("usr/lib/wine");
    let server = format!("#!/bin/sh\nexec {} -p5 \"$@\"\n", in_shell(&wine.join("wineserver64")));
    write(&wine.join("wineserver"), &server)?;
    let (zlib, programs) = ("usr/x86_64-w64-mingw32/lib/zlib1.dll", "usr/lib/x86_64-linux-gnu/wine/x86_64-windows");
    let zlib = folders.root.join(zlib);
    let programs = folders.root.join(programs);
    let copied = |to: &Path| std::fs::copy(&zlib, to.join("zlib1.dll")).map_err(Failure::file(&zlib));
    copied(&programs)?;
    let drive = folders.kept.join("drive");
    let environment = [
        format!("export WINEPREFIX={} WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml='", in_shell(&drive)),
        // What this machine's own libraries are called by must not reach what runs there.
        folders.with_libraries(),
        format!("exec {} \"$@\"", in_shell(&wine.join("wine64"))),
    ];
    folders.script("run", &environment.join("\n"))?;
    let system = drive.join("drive_c/windows/system32");
    if !system.join("kernel32.dll").is_file() {
        // Makes the drive. What it answers is that of a 32-bit program, which is not there.
        let made = command(folders.bin.join("run"), ["wineboot", "--init"]).output();
        if !system.join("kernel32.dll").is_file() {
            return Err(Failure::Check(format!("wine does not start: {made:?}")));
        }
    }
    // Once more: beside wine's own it is found while the drive is made, and not afterwards.
    copied(&system)?;
    let random = "bcryptprimitives.dll";
    if !programs.join(random).is_file() && !system.join(random).is_file() {
        let source = folders.kept.join("random.c");
        write(&source, RANDOM)?;
        let mut cc = command(folders.bin.join("cc"), ["-shared", "-O1", "-o"]);
        show(cc.arg(system.join(random)).arg(&source).arg("-ladvapi32"))?;
    }
    Ok(())
}

/// The cross compiler, and qemu with the libraries beside it.
fn prepare_arm(folders: &Folders) -> Outcome {
    let root = &folders.root;
    for (name, program) in [("cc", "gcc"), ("c++", "g++")] {
        let program = in_shell(&root.join(format!("usr/bin/aarch64-linux-gnu-{program}")));
        let start = format!("exec {program} --sysroot={} \"$@\"", in_shell(root));
        folders.script(name, &format!("{}\n{start}", folders.with_libraries()))?;
    }
    let qemu = in_shell(&root.join("usr/bin/qemu-aarch64-static"));
    let libraries = in_shell(&root.join("usr/aarch64-linux-gnu"));
    folders.script("qemu", &format!("exec {qemu} \"$@\""))?;
    folders.script("run", &format!("exec {qemu} -L {libraries} \"$@\""))
}

/// The words of `cargo xtask test --target`: packages, or none for all.
pub(crate) fn run(triple: &str, args: Args) -> Outcome {
    let words = args.words();
    if let Some(word) = words.iter().find(|word| word.starts_with('-')) {
        return Err(Failure::Usage(format!("unexpected `{word}`: `--target` is followed by names of packages")));
    }
    test(triple, &words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_spaces_and_quotes_is_one_word() {
        let path = Path::new("/a clone's/target");
        let script = format!("printf '%s\\n' {}", in_shell(path));
        let told = Command::new("sh").args(["-c", &script]).output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&told.stdout), "/a clone's/target\n");
    }

    #[test]
    fn a_platform_that_nothing_here_runs_is_refused_with_those_that_are_known() {
        let Err(Failure::Usage(text)) = test("aarch64-apple-darwin", &[]) else { panic!("must be refused") };
        assert!(text.contains("x86_64-pc-windows-gnu or aarch64-unknown-linux-gnu"), "{text}");
        let words = Args::new(vec!["--whole".to_owned()]);
        assert!(matches!(run(WINDOWS.triple, words), Err(Failure::Usage(_))));
    }
}
