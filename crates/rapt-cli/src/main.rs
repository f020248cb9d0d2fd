//! cargo's `rapt`: the command line of the library, with Python reached as another program.

use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use rapt::{Device, Error, Offload};
use rapt_cli::doctor::HostFacts;
use rapt_cli::{Host, Outcome, PythonCommand};

/// The Python that subcommands of the Python package are started with.
const PYTHON: &str = "python3";

/// A process of its own, without Python in it.
struct Process;

impl Host for Process {
    fn facts(&self) -> Result<HostFacts, Box<dyn std::error::Error>> {
        Ok(HostFacts::default())
    }

    fn offload(&self, device: Device) -> Result<Arc<dyn Offload>, Box<dyn std::error::Error>> {
        rapt::offload(device).map_err(|error| match device {
            Device::Vulkan(_) if cfg!(not(feature = "vulkan")) => NoBackend(error).into(),
            _ => error.into(),
        })
    }

    /// `python3 -m rapt …` with the same words: the command line of the wheel answers them.
    fn python(&self, command: &PythonCommand) -> Outcome {
        let probe = ["-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('rapt._native') is None)"];
        let found = Command::new(PYTHON).args(probe).stdout(Stdio::null()).stderr(Stdio::null()).status();
        match found {
            Ok(status) if status.success() => start(Command::new(PYTHON).args(["-m", "rapt"]).args(&command.words)),
            Ok(_) => Err(NoPython { command: command.name, why: "no package rapt" }.into()),
            Err(_) => Err(NoPython { command: command.name, why: "not on PATH" }.into()),
        }
    }
}

/// In place of this process, so that the terminal's signals reach one program.
#[cfg(unix)]
fn start(command: &mut Command) -> Outcome {
    use std::os::unix::process::CommandExt;
    Err(command.exec().into())
}

#[cfg(not(unix))]
fn start(command: &mut Command) -> Outcome {
    let code = command.status()?.code();
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(rapt_cli::exit::FAILED))
}

/// A subcommand is Python code, and there is none.
#[derive(Debug)]
struct NoPython {
    command: &'static str,
    why: &'static str,
}

impl std::fmt::Display for NoPython {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let NoPython { command, why } = self;
        write!(
            f,
            "`rapt {command}` is part of Rapt's Python package, and {PYTHON} has none ({why}). Install it: \
             {PYTHON} -m pip install \"rapt-attention[numpy]\""
        )
    }
}

impl std::error::Error for NoPython {}

/// This program was built without the backend of a device.
#[derive(Debug)]
struct NoBackend(Error);

impl std::fmt::Display for NoBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}. Install it: cargo install rapt-cli --features vulkan", self.0)
    }
}

impl std::error::Error for NoBackend {}

fn main() -> ExitCode {
    ExitCode::from(rapt_cli::run(std::env::args_os(), &Process))
}
