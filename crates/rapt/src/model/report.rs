//! What a program is, in words: for `explain`, and for an archive that is not served.

use std::collections::BTreeMap;
use std::fmt;

use rapt_pt2::Program;

use super::host::Host;
use super::plan::Plan;
use super::{Model, ModelError, Port, port};

/// What is known of an archive: its form, and whether it is served.
#[derive(Debug)]
pub struct Check {
    /// The version of torch that wrote it.
    pub written_by: String,
    /// How often each operator occurs.
    pub ops: BTreeMap<String, usize>,
    /// Operators that are not served: name, number of nodes, first node. All of them.
    pub missing: Vec<(String, usize, String)>,
    /// Why it is not served, where it is not.
    pub refusal: Option<ModelError>,
    /// The inputs.
    pub inputs: Vec<Port>,
    /// The results.
    pub outputs: Vec<Port>,
}

impl Check {
    pub(super) fn new(program: &Program, loaded: Result<Model, ModelError>) -> Check {
        let mut ops = BTreeMap::new();
        for node in &program.graph.nodes {
            *ops.entry(short(&node.target).to_owned()).or_default() += 1;
        }
        let written_by = program.torch_version.clone();
        match loaded {
            Ok(model) => {
                let (inputs, outputs) = (model.inputs().to_vec(), model.outputs().to_vec());
                Check { written_by, ops, missing: Vec::new(), refusal: None, inputs, outputs }
            }
            Err(error) => {
                let missing = match &error {
                    ModelError::Graph(rapt_graph::Error::MissingOps { ops }) => ops
                        .iter()
                        .map(|(target, count, first)| (short(target).to_owned(), *count, first.clone()))
                        .collect(),
                    _ => Vec::new(),
                };
                let (inputs, outputs) = (port::inputs(program), port::outputs(program));
                Check { written_by, ops, missing, refusal: Some(error), inputs, outputs }
            }
        }
    }

    /// Whether the archive is served.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.refusal.is_none()
    }
}

/// `aten.add.Tensor` of the name that an archive has.
fn short(target: &str) -> &str {
    target.rsplit_once("torch.ops.").map_or(target, |(_, name)| name)
}

impl ModelError {
    /// The operators that are not served, as torch names them (`aten.igamma.default`): all of them where that is the error.
    #[must_use]
    pub fn missing_ops(&self) -> Vec<String> {
        match self {
            ModelError::Graph(rapt_graph::Error::MissingOps { ops }) => {
                ops.iter().map(|(target, ..)| short(target).to_owned()).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// What runs for a model, as rows of name and text; `Display` gives one line for each.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    rows: Vec<(String, String)>,
}

impl Explanation {
    /// What runs for a plan; for that of the export's sizes on the model's engine, if it is not given.
    pub(super) fn new(model: &Model, plan: Option<&Plan>) -> Explanation {
        let inner = &model.inner;
        let mut rows: Vec<(String, String)> = Vec::new();
        let mut row = |name: &str, text: String| rows.push((name.to_owned(), text));
        row("executor", "kernels for the CPU; what has none by the interpreter's definition".into());
        row("archive", format!("torch {}", inner.program.torch_version));
        for input in &inner.inputs {
            let text = format!("{}{}", of_port(input), if input.is_written { ", written" } else { "" });
            row(&format!("input {}", input.name), text);
        }
        for output in &inner.outputs {
            row(&output.name, of_port(output));
        }
        for symbol in &inner.program.symbols {
            let max = symbol.max.map_or_else(|| "any".to_owned(), |max| max.to_string());
            row(&format!("symbol {}", symbol.name), format!("{} to {max}", symbol.min));
        }
        for guard in &inner.program.guards {
            row("guard", guard.text.clone());
        }
        let storages: std::collections::BTreeSet<_> = (0..inner.graph.inputs.len())
            .filter_map(|place| inner.payload(place).ok().flatten())
            .map(|payload| payload.storage)
            .collect();
        let bytes: usize = storages.into_iter().map(|storage| inner.storage(storage).len()).sum();
        row("weights", format!("{bytes} bytes, {}", inner.weights.how()));
        row("nodes", inner.graph.nodes.len().to_string());
        let of_example = || {
            let host = Host::of(model.engine().ok()?);
            inner.plan(inner.example.as_ref()?, host).ok()
        };
        let example = if plan.is_none() { of_example() } else { None };
        let plan = plan.or(example.as_deref());
        if let Some(plan) = plan {
            let name = |n: usize| short(&inner.graph.nodes[n].target).to_owned();
            for (name, text) in plan.rows(&name) {
                row(&name, text);
            }
        }
        row("weights packed", format!("{} bytes", inner.packed_bytes()));
        if let Some(plan) = plan {
            let kept: usize = plan.states().map(|id| inner.storage(id).len()).sum();
            let most = bytes + inner.packed_bytes() + plan.memory_bytes() + kept;
            let what = "weights, packed weights, arena, scratch, constants, what a session keeps";
            let copies = if plan.has_definitions() { "; not the copies of steps by definition" } else { "" };
            row("memory", format!("{most} bytes at most, beside inputs and results: {what}{copies}"));
        }
        row("operators", String::new());
        let mut ops: BTreeMap<&str, usize> = BTreeMap::new();
        for node in &inner.graph.nodes {
            *ops.entry(short(&node.target)).or_default() += 1;
        }
        for (name, count) in ops {
            row(&format!("  {name}"), count.to_string());
        }
        Explanation { rows }
    }

    /// Name and text of each row.
    #[must_use]
    pub fn rows(&self) -> &[(String, String)] {
        &self.rows
    }
}

/// `int64 [s0, 8]`
pub(super) fn of_port(port: &Port) -> String {
    match port.dtype {
        Some(dtype) => format!("{dtype} [{}]", port.sizes.join(", ")),
        None => "no tensor".into(),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, text) in &self.rows {
            writeln!(f, "{name:width$}  {text}")?;
        }
        Ok(())
    }
}
