//! `rapt.doctor()`: the facts that Rust knows; Python adds its own.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rapt::doctor::{SelfTest, cpu_name, platform, self_test, variables};
use rapt::{Arch, Threads};

use crate::engine::Home;
use crate::errors::hints;
use crate::errors::{Failure, Wording, guard};

fn listed(py: Python<'_>, cases: Vec<SelfTest>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for case in cases {
        let entry = PyDict::new(py);
        entry.set_item("dtype", case.dtype.name())?;
        entry.set_item("kernel", case.kernel)?;
        entry.set_item("limit", case.limit)?;
        entry.set_item("passed", case.passed())?;
        match case.error {
            Ok(error) => entry.set_item("error", error)?,
            Err(error) => entry.set_item("error", error.to_string())?,
        }
        list.append(entry)?;
    }
    Ok(list)
}

/// The facts that Rust knows; `rapt.doctor` adds Python's.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let wording = std::cell::Cell::new(Wording { names: &hints::ATTENTION, kind: crate::kind::Kind::Numpy });
    guard(py, &wording, || {
        let home = Home::Default;
        crate::engine::pass_folders(py)?;
        let engine = home.engine()?;
        let facts = PyDict::new(py);
        facts.set_item("cpu", cpu_name())?;
        facts.set_item("platform", platform())?;
        facts.set_item("isa", engine.caps().arch.name())?;
        let isas: Vec<&str> = rapt::available_isas().iter().copied().map(Arch::name).collect();
        facts.set_item("isa_available", isas)?;
        facts.set_item("threads", engine.threads().get())?;
        facts.set_item(
            "threads_from",
            match engine.threads() {
                Threads::Asked(_) => "Context(threads)",
                Threads::Environment(_) => "RAPT_NUM_THREADS",
                Threads::Available(_) => "available_parallelism",
            },
        )?;
        facts.set_item("cuda", py.detach(rapt::cuda::report))?;
        let environment = PyDict::new(py);
        for (name, value) in variables() {
            environment.set_item(name, value)?;
        }
        facts.set_item("environment", environment)?;
        let cases = py.detach(|| self_test(engine));
        facts.set_item("self_test", listed(py, cases)?)?;
        Ok::<_, Failure>(facts)
    })
}
