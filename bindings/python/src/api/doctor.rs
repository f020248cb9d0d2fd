//! `rapt.doctor()`: the facts that `rapt doctor` shows, as JSON and as its table.

use pyo3::prelude::*;
use rapt_cli::doctor::Facts;

use super::cli;
use crate::engine::Home;
use crate::errors::hints;
use crate::errors::{Failure, Wording, guard};
use crate::tensors::torch;

/// What `rapt doctor` says of Apple's GPUs.
#[pyfunction]
pub(crate) fn metal_report(py: Python<'_>) -> Vec<(String, String)> {
    torch::find_metal(py);
    rapt::doctor::metal()
}

/// The facts as JSON, and as a table for people.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> PyResult<(String, String)> {
    let wording = std::cell::Cell::new(Wording { names: &hints::ATTENTION, kind: crate::kind::Kind::Numpy });
    guard(py, &wording, || {
        crate::engine::pass_folders(py)?;
        let (home, of_python) = (Home::Default, cli::facts(py)?);
        let engine = home.engine()?;
        let facts = py.detach(|| Facts::gather(engine, of_python));
        Ok::<_, Failure>((facts.json(), facts.table()))
    })
}
