//! `rapt.Plan` and `rapt.RaggedPlan`: what will run, as attributes, a dict and a table.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rapt::{Certificate, Judgement, Kernel, PRounding, Plan, RaggedPlan};

use crate::api::tolerance;

/// What will run for a request. `str()` is a table.
#[pyclass(frozen, module = "rapt", name = "Plan")]
pub(crate) struct PyPlan {
    plan: Arc<Plan>,
    certificate: Option<Certificate>,
    judgement: Option<Judgement>,
}

impl PyPlan {
    pub(crate) fn new(plan: Arc<Plan>, certificate: Option<Certificate>, judgement: Option<Judgement>) -> Self {
        PyPlan { plan, certificate, judgement }
    }
}

/// The facts of a certificate under their names.
fn facts<'py>(py: Python<'py>, certificate: &Certificate) -> PyResult<Bound<'py, PyDict>> {
    let (in_bounds, injective, disjoint) = (PyDict::new(py), PyDict::new(py), PyDict::new(py));
    for fact in &certificate.in_bounds {
        let of = PyDict::new(py);
        of.set_item("elements", fact.elements)?;
        of.set_item("bytes", fact.bytes)?;
        of.set_item("storage", fact.storage)?;
        of.set_item("extent", if fact.storage.is_some() { "proven" } else { "declared" })?;
        in_bounds.set_item(fact.tensor, of)?;
    }
    for fact in &certificate.injective {
        let of = PyDict::new(py);
        of.set_item("elements", fact.elements)?;
        of.set_item("steps", fact.steps)?;
        injective.set_item(fact.tensor, of)?;
        let others = PyDict::new(py);
        for pair in certificate.disjoint.iter().filter(|pair| pair.tensor == fact.tensor) {
            others.set_item(pair.other, pair.steps)?;
        }
        disjoint.set_item(fact.tensor, others)?;
    }
    let coverage = PyDict::new(py);
    coverage.set_item("rows", certificate.coverage.rows)?;
    coverage.set_item("items", certificate.coverage.items)?;
    coverage.set_item("parts", certificate.coverage.parts)?;
    if let Some(work) = certificate.coverage.work {
        coverage.set_item("tasks", work.tasks)?;
        coverage.set_item("rows_per_task", work.rows)?;
        coverage.set_item("rows_per_item", work.rows_per_item)?;
        coverage.set_item("keys_per_item", work.keys_per_item)?;
    }
    let all = PyDict::new(py);
    all.set_item("in_bounds", in_bounds)?;
    all.set_item("injective", injective)?;
    all.set_item("disjoint", disjoint)?;
    all.set_item("coverage", coverage)?;
    Ok(all)
}

#[pymethods]
impl PyPlan {
    /// The algorithm.
    #[getter]
    fn kernel(&self) -> &'static str {
        self.plan.key().kernel.name()
    }
    /// The instruction set.
    #[getter]
    fn isa(&self) -> &'static str {
        self.plan.key().arch.name()
    }
    /// The dtype of those of q, k and v that are not codes.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.plan.key().storage.name()
    }
    /// The dtype of products and sums.
    #[getter]
    fn accumulation(&self) -> &'static str {
        self.plan.key().accumulation.name()
    }
    /// Multiplications and additions over the pairs that causal and window leave.
    #[getter]
    fn flops(&self) -> f64 {
        self.plan.cost().flops
    }
    /// Each input read once.
    #[getter]
    fn bytes_read(&self) -> f64 {
        self.plan.cost().bytes_read
    }
    /// Each output written once.
    #[getter]
    fn bytes_written(&self) -> f64 {
        self.plan.cost().bytes_written
    }
    /// The least time on the plan's threads, where the clock is known.
    #[getter]
    fn floor_seconds(&self) -> Option<f64> {
        self.plan.cost().floor_seconds
    }
    /// Bytes of tensors copied: 0 where they are attended to where they lie, else those that go to `device=` and back.
    #[getter]
    fn bytes_copied(&self) -> usize {
        self.plan.cost().bytes_copied
    }
    /// Most bytes that lie packed in cache at one time.
    #[getter]
    fn bytes_packed(&self) -> usize {
        self.plan.cost().bytes_packed
    }
    /// Scratch memory.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }
    /// Queries per tile.
    #[getter]
    fn block_m(&self) -> usize {
        self.plan.block_m()
    }
    /// Keys per block.
    #[getter]
    fn block_n(&self) -> usize {
        self.plan.block_n()
    }
    /// Parts into which the keys are split.
    #[getter]
    fn num_splits(&self) -> usize {
        self.plan.num_splits()
    }
    /// Threads that the run will use.
    #[getter]
    fn threads(&self) -> usize {
        self.plan.threads()
    }
    /// Why this kernel.
    #[getter]
    fn why(&self) -> String {
        self.plan.why()
    }
    /// Why not a faster one; empty if there is none.
    #[getter]
    fn why_not_faster(&self) -> String {
        self.plan.why_not_faster()
    }
    /// `"top_left"`, `"bottom_right"` or None.
    #[getter]
    fn causal_alignment(&self) -> Option<&'static str> {
        self.plan.spec().causal.map(rapt::Causal::name)
    }
    /// Where the probabilities are rounded.
    #[getter]
    fn p_rounding(&self) -> &'static str {
        match self.plan.key().p_rounding {
            PRounding::Accumulation => "accumulation",
            PRounding::Storage => "storage",
            PRounding::TwoBf16 => "two_bf16",
            PRounding::Fixed => "fixed",
            PRounding::Block => "block",
            _ => "unknown",
        }
    }
    /// `"exact"` or `"int8"`: what products are formed of.
    #[getter]
    fn compute(&self) -> &'static str {
        self.plan.spec().compute.name()
    }
    /// Whether K and V are read where they lie.
    #[getter]
    fn kv_in_place(&self) -> bool {
        self.plan.kv_in_place()
    }

    /// Of each of q, k and v that is codes: `format`, `granularity`, `block_size`, `code_bytes` and `scale_bytes`.
    #[getter]
    fn codes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (tensor, numbers, codes) in self.plan.spec().quantized() {
            let of = PyDict::new(py);
            of.set_item("format", codes.format.name())?;
            of.set_item("granularity", codes.granularity.name())?;
            of.set_item("block_size", codes.granularity.block_size())?;
            of.set_item("code_bytes", codes.code_bytes(numbers))?;
            of.set_item("scale_bytes", codes.scale_bytes())?;
            all.set_item(tensor, of)?;
        }
        Ok(all)
    }

    /// Of sequences whose lengths only a GPU knows, each launch in order: `kernel` (None where nothing is attended to), `variant`, `serves`,
    /// `blocks` and `threads`; else empty.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let all = PyList::empty(py);
        for part in self.plan.parts() {
            let of = PyDict::new(py);
            of.set_item("kernel", part.kernel.map(Kernel::name))?;
            of.set_item("variant", part.variant)?;
            of.set_item("serves", part.serves)?;
            of.set_item("blocks", part.launch.blocks)?;
            of.set_item("threads", part.launch.block_threads)?;
            all.append(of)?;
        }
        Ok(all)
    }

    /// What was proven about the tensors: `in_bounds`, `injective`, `disjoint`, `coverage`; None where memory for the output
    /// could not be had.
    #[getter]
    fn certificate<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.certificate.as_ref().map(|certificate| facts(py, certificate)).transpose()
    }

    /// With a tolerance: `limit`, how many query heads are `quantized` and how many `fell_back`, `worst_estimate`, `worst_bound`,
    /// `worst_epsilon`, and of each of the `heads` the same; else None.
    #[getter]
    fn tolerance<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.judgement.as_ref().map(|judgement| tolerance::as_dict(py, judgement)).transpose()
    }

    /// Every attribute by name.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("kernel", self.kernel())?;
        dict.set_item("isa", self.isa())?;
        dict.set_item("dtype", self.dtype())?;
        dict.set_item("accumulation", self.accumulation())?;
        dict.set_item("why", self.why())?;
        dict.set_item("why_not_faster", self.why_not_faster())?;
        dict.set_item("flops", self.flops())?;
        dict.set_item("bytes_read", self.bytes_read())?;
        dict.set_item("bytes_written", self.bytes_written())?;
        dict.set_item("floor_seconds", self.floor_seconds())?;
        dict.set_item("bytes_copied", self.bytes_copied())?;
        dict.set_item("bytes_packed", self.bytes_packed())?;
        dict.set_item("workspace_bytes", self.workspace_bytes())?;
        dict.set_item("block_m", self.block_m())?;
        dict.set_item("block_n", self.block_n())?;
        dict.set_item("num_splits", self.num_splits())?;
        dict.set_item("threads", self.threads())?;
        dict.set_item("causal_alignment", self.causal_alignment())?;
        dict.set_item("p_rounding", self.p_rounding())?;
        dict.set_item("compute", self.compute())?;
        dict.set_item("kv_in_place", self.kv_in_place())?;
        dict.set_item("codes", self.codes(py)?)?;
        dict.set_item("parts", self.parts(py)?)?;
        dict.set_item("certificate", self.certificate(py)?)?;
        dict.set_item("tolerance", self.tolerance(py)?)?;
        Ok(dict)
    }

    fn __str__(&self) -> String {
        let explanation = self.plan.explain();
        let certified = self.certificate.as_ref();
        let text = certified.map_or(explanation, |certificate| explanation.certified(certificate)).to_string();
        text + &self.judgement.as_ref().map(Judgement::to_string).unwrap_or_default()
    }

    fn __repr__(&self) -> String {
        let PyPlan { plan, .. } = self;
        format!("<rapt.Plan {} {} on {}>", plan.key().kernel.name(), plan.key().storage, plan.key().arch.name())
    }
}

/// What will run for sequences of different lengths. `str()` has a table of each part.
#[pyclass(frozen, module = "rapt", name = "RaggedPlan")]
pub(crate) struct PyRaggedPlan {
    plan: RaggedPlan,
}

impl PyRaggedPlan {
    pub(crate) fn new(plan: RaggedPlan) -> Self {
        PyRaggedPlan { plan }
    }
}

#[pymethods]
impl PyRaggedPlan {
    /// How many sequences there are.
    #[getter]
    fn sequences(&self) -> usize {
        self.plan.sequences()
    }
    /// The kernels that attend, each once.
    #[getter]
    fn kernels(&self) -> Vec<&'static str> {
        self.plan.kernels().into_iter().map(Kernel::name).collect()
    }
    /// Sequences that are served alike, each with their places in the call and the plan of that one which has the most work; on a GPU
    /// one part, whose plan tells them apart by its `parts`.
    #[getter]
    fn parts(&self) -> Vec<(Vec<usize>, PyPlan)> {
        let part =
            |part: &rapt::RaggedPart| (part.sequences().to_vec(), PyPlan::new(Arc::clone(part.plan()), None, None));
        self.plan.parts().iter().map(part).collect()
    }
    /// Scratch memory of the whole call.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    fn __str__(&self) -> String {
        self.plan.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<rapt.RaggedPlan of {} sequences by {}>", self.plan.sequences(), self.kernels().join(", "))
    }
}
