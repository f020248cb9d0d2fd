//! The command `rapt` of the Python package: rapt-cli in Python's process.
//!
//! The command line runs in a thread of its own. Python's thread waits for it, runs what is Python code when it is asked to,
//! and looks for signals: Python's handler of SIGINT only sets a flag, which native code in that thread would never see.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError, PySystemExit};
use pyo3::prelude::*;
use rapt::{Device, Offload};
use rapt_cli::doctor::HostFacts;
use rapt_cli::{Host, Outcome, PythonCommand, exit};

use crate::engine::vulkan;
use crate::errors::{Wording, raise};
use crate::tensors::torch;

/// How long an interrupt may go unnoticed.
const LOOK: Duration = Duration::from_millis(50);

/// What the thread of the command line wants of Python's.
enum Request {
    Facts(Sender<Result<HostFacts, String>>),
    Run { name: &'static str, options: String, code: Sender<u8> },
    Done(u8),
}

/// The thread of the command line, as Python's thread is reached from it.
struct InPython {
    requests: Sender<Request>,
}

impl InPython {
    fn ask<T>(&self, request: impl FnOnce(Sender<T>) -> Request) -> Result<T, Box<dyn std::error::Error>> {
        let (answer, answered) = channel();
        self.requests.send(request(answer))?;
        Ok(answered.recv()?)
    }
}

impl Host for InPython {
    fn facts(&self) -> Result<HostFacts, Box<dyn std::error::Error>> {
        Ok(self.ask(Request::Facts)??)
    }

    fn python(&self, command: &PythonCommand) -> Outcome {
        let PythonCommand { name, options, .. } = command;
        self.ask(|code| Request::Run { name, options: options.clone(), code })
    }

    fn offload(&self, device: Device) -> Result<Arc<dyn Offload>, Box<dyn std::error::Error>> {
        // Python's thread has let go of the GIL while it waits for requests.
        let wording = Wording { names: &crate::errors::hints::ATTENTION, kind: crate::kind::Kind::Numpy };
        Python::attach(|py| {
            let opened = vulkan::offload(py, device);
            opened.map_err(|failure| raise(py, failure, wording).value(py).to_string().into())
        })
    }
}

/// Runs the command line with these words after `rapt`; the exit code.
#[pyfunction]
pub(crate) fn cli(py: Python<'_>, words: Vec<OsString>) -> PyResult<u8> {
    let wording = Wording { names: &crate::errors::hints::ATTENTION, kind: crate::kind::Kind::Numpy };
    crate::engine::pass_folders(py).map_err(|failure| raise(py, failure, wording))?;
    let (requests, mut received) = channel();
    let thread = std::thread::Builder::new().name("rapt".to_owned());
    thread
        .spawn(move || {
            let host = InPython { requests };
            let args = std::iter::once(OsString::from("rapt")).chain(words);
            let code = rapt_cli::run(args, &host);
            // Python's thread is gone only if it was interrupted, and then nothing waits for this code.
            let _ = host.requests.send(Request::Done(code));
        })
        .map_err(PyOSError::new_err)?;
    loop {
        let next;
        // A receiver may change threads, not be shared between them: `detach` takes it and hands it back.
        (next, received) = py.detach(move || wait(received));
        match next {
            Ok(Request::Done(code)) => return Ok(code),
            Ok(Request::Facts(answer)) => {
                // The thread that asked waits for this answer.
                let _ = answer.send(facts(py).map_err(|error| error.to_string()));
            }
            Ok(Request::Run { name, options, code }) => {
                let _ = code.send(run(py, name, &options));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(exit::PANICKED),
        }
        if let Err(error) = py.check_signals() {
            return code_of(py, error);
        }
    }
}

fn wait(received: Receiver<Request>) -> (Result<Request, RecvTimeoutError>, Receiver<Request>) {
    (received.recv_timeout(LOOK), received)
}

/// What ends the program is an exit code; any other exception stays one.
fn code_of(py: Python<'_>, error: PyErr) -> PyResult<u8> {
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        return Ok(exit::INTERRUPTED);
    }
    if error.is_instance_of::<PySystemExit>(py) {
        return error.value(py).getattr("code")?.extract();
    }
    Err(error)
}

/// A subcommand that is Python code; an exception that it lets out is printed as Python prints it.
fn run(py: Python<'_>, name: &str, options: &str) -> u8 {
    let done = py.import("rapt._commands").and_then(|module| module.call_method1("run", (name, options))?.extract());
    done.or_else(|error| code_of(py, error)).unwrap_or_else(|error| {
        error.print(py);
        exit::FAILED
    })
}

/// What Python knows of itself, for `doctor`.
pub(crate) fn facts(py: Python<'_>) -> PyResult<HostFacts> {
    let module = py.import("rapt._doctor")?;
    torch::find_metal(py);
    // Variables that no engine takes are told of by the engine that is asked next.
    let isa = rapt::Engine::new(None).ok().map(|engine| engine.caps().arch.name());
    let beside_torch = isa.map(|isa| module.call_method1("beside_torch", (isa,))?.extract()).transpose()?;
    Ok(HostFacts {
        torch_threads: Some(module.call_method0("torch_threads")?.extract()?),
        beside_torch,
        versions: module.call_method0("versions")?.extract()?,
        vulkan: Some(vulkan::report(py)),
    })
}
