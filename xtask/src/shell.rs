//! Running programs, one after another or side by side, and the ways in which that fails.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Why a command of xtask ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line was wrong.
    Usage(String),
    /// No Python that Rapt can use; the text says what was tried.
    NoPython(String),
    /// A program could not be started.
    NotStarted { program: String, error: std::io::Error },
    /// A program ended with a failure.
    Ended { program: String, code: Option<i32> },
    /// A file could not be read or written.
    File { path: PathBuf, error: std::io::Error },
    /// A check found something; the text lists what.
    Check(String),
    /// What ran side by side failed on both sides.
    Both(Box<Failure>, Box<Failure>),
}

pub(crate) type Outcome = Result<(), Failure>;

impl Failure {
    /// The exit code to leave with: that of the program that failed, where there is one.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Both(first, _) => first.exit_code(),
            Failure::Ended { code: Some(code), .. } => u8::try_from(*code).ok().filter(|code| *code != 0).unwrap_or(1),
            _ => 1,
        }
    }

    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Failure + '_ {
        move |error| Failure::File { path: path.to_owned(), error }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(text) | Failure::NoPython(text) | Failure::Check(text) => f.write_str(text),
            Failure::NotStarted { program, error } => write!(f, "could not start `{program}`: {error}"),
            Failure::Ended { program, code: Some(code) } => write!(f, "`{program}` ended with exit code {code}"),
            Failure::Ended { program, code: None } => write!(f, "`{program}` was ended by a signal"),
            Failure::File { path, error } => write!(f, "{}: {error}", path.display()),
            Failure::Both(first, second) => write!(f, "{first}\nxtask: {second}"),
        }
    }
}

/// A command of `program` with `args`, to be completed by the caller.
pub(crate) fn command<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// A command of the cargo that runs xtask.
pub(crate) fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), args)
}

fn name(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let mut line = program.to_string_lossy().into_owned();
    for word in command.get_args().take(4) {
        line.push(' ');
        line.push_str(&word.to_string_lossy());
    }
    line
}

thread_local! {
    /// Where a thread writes that runs beside another, so that the lines of the two do not mix.
    static LOG: RefCell<Option<File>> = const { RefCell::new(None) };
}

/// The log of this thread, if it runs beside another.
fn log() -> Option<File> {
    LOG.with_borrow(|log| log.as_ref().and_then(|file| file.try_clone().ok()))
}

/// Prints a line where the output of this thread's programs goes.
pub(crate) fn say(line: impl fmt::Display) {
    // A log that cannot be written must not hide the line.
    if !log().is_some_and(|mut file| writeln!(file, "{line}").is_ok()) {
        println!("{line}");
    }
}

/// Runs `here` in view and `beside` at the same time, whose output is printed in one piece after both have ended, from the file
/// `kept`. What both answer, or what failed: both where both did.
pub(crate) fn side_by_side<A, B: Send>(
    kept: &Path,
    here: impl FnOnce() -> Result<A, Failure>,
    beside: impl FnOnce() -> Result<B, Failure> + Send,
) -> Result<(A, B), Failure> {
    if let Some(folder) = kept.parent() {
        std::fs::create_dir_all(folder).map_err(Failure::file(folder))?;
    }
    let file = File::create(kept).map_err(Failure::file(kept))?;
    let (here, beside) = std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            LOG.set(Some(file));
            beside()
        });
        let here = here();
        (here, other.join())
    });
    // What another program prints need not be text.
    print!("{}", String::from_utf8_lossy(&std::fs::read(kept).map_err(Failure::file(kept))?));
    match (here, beside.unwrap_or_else(|panic| std::panic::resume_unwind(panic))) {
        (Ok(here), Ok(beside)) => Ok((here, beside)),
        (Err(here), Err(beside)) => Err(Failure::Both(Box::new(here), Box::new(beside))),
        (Err(failure), _) | (_, Err(failure)) => Err(failure),
    }
}

/// Runs a command with its output in view.
pub(crate) fn show(command: &mut Command) -> Outcome {
    let program = name(command);
    if let Some(file) = log() {
        let error = file.try_clone().map_err(Failure::file(Path::new("the log")))?;
        command.stdout(file).stderr(error);
    }
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::Ended { program, code: status.code() }),
        Err(error) => Err(Failure::NotStarted { program, error }),
    }
}

/// Runs a command and gives its standard output; its errors are shown only if it fails.
pub(crate) fn capture(command: &mut Command) -> Result<String, Failure> {
    let program = name(command);
    match command.output() {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => {
            say(String::from_utf8_lossy(&output.stdout));
            say(String::from_utf8_lossy(&output.stderr));
            Err(Failure::Ended { program, code: output.status.code() })
        }
        Err(error) => Err(Failure::NotStarted { program, error }),
    }
}

/// Runs a step under one printed line that says what it does and, after it, how long it took.
pub(crate) fn step<T>(what: &str, run: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    say(format_args!("── {what}"));
    let start = Instant::now();
    let result = run();
    let seconds = start.elapsed().as_secs_f64();
    if result.is_ok() {
        say(format_args!("── {what}: done in {seconds:.1} s"));
    } else {
        say(format_args!("── {what}: FAILED after {seconds:.1} s"));
    }
    result
}

pub(crate) fn read(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(Failure::file(path))
}

pub(crate) fn write(path: &Path, text: &str) -> Outcome {
    std::fs::write(path, text).map_err(Failure::file(path))
}

/// Removes a folder with all that lies in it, if it is there.
pub(crate) fn remove_folder(folder: &Path) -> Outcome {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Failure::file(folder)(error)),
        _ => Ok(()),
    }
}

/// Copies a folder with all that lies in it, but for Python's caches.
pub(crate) fn copy(from: &Path, to: &Path) -> Outcome {
    std::fs::create_dir_all(to).map_err(Failure::file(to))?;
    for entry in std::fs::read_dir(from).map_err(Failure::file(from))? {
        let path = entry.map_err(Failure::file(from))?.path();
        let Some(name) = path.file_name() else { continue };
        if name == "__pycache__" {
            continue;
        }
        if path.is_dir() {
            copy(&path, &to.join(name))?;
        } else {
            std::fs::copy(&path, to.join(name)).map_err(Failure::file(&path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_that_of_the_program_and_never_zero() {
        let ended = |code| Failure::Ended { program: "p".to_owned(), code };
        assert_eq!(ended(Some(3)).exit_code(), 3);
        assert_eq!(ended(Some(256)).exit_code(), 1);
        assert_eq!(ended(None).exit_code(), 1);
        assert_eq!(Failure::Usage(String::new()).exit_code(), 2);
    }

    #[test]
    fn side_by_side_both_run_and_each_failure_is_told() {
        let kept = std::env::temp_dir().join(format!("rapt-xtask-{}.log", std::process::id()));
        let fail = |what: &str| -> Result<u8, Failure> { Err(Failure::Check(what.to_owned())) };
        let beside = || {
            say("a line of the other");
            show(&mut command("cargo", ["--version"]))?;
            Ok(2)
        };
        assert_eq!(side_by_side(&kept, || Ok(1), beside).unwrap(), (1, 2));
        let text = std::fs::read_to_string(&kept).unwrap();
        assert!(text.starts_with("a line of the other\ncargo "), "{text}");
        let told = |here: bool, beside: bool| {
            let of = move |is_wrong: bool, what: &'static str| if is_wrong { fail(what) } else { Ok(0) };
            side_by_side(&kept, || of(here, "one"), || of(beside, "two")).unwrap_err().to_string()
        };
        assert_eq!([told(true, false), told(false, true), told(true, true)], ["one", "two", "one\nxtask: two"]);
        std::fs::remove_file(&kept).unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let failure = show(&mut command("rapt-no-such-program", ["x"])).unwrap_err();
        assert!(failure.to_string().contains("rapt-no-such-program"), "{failure}");
    }

    #[test]
    fn a_folder_is_copied_with_what_lies_below_it() {
        let folder = std::env::temp_dir().join(format!("rapt-copied-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("from/below")).unwrap();
        std::fs::write(folder.join("from/below/page.html"), "text").unwrap();
        copy(&folder.join("from"), &folder.join("to")).unwrap();
        assert_eq!(std::fs::read_to_string(folder.join("to/below/page.html")).unwrap(), "text");
        assert!(copy(&folder.join("absent"), &folder.join("to")).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
