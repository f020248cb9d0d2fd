//! A program that is loaded and verified, and has no weights yet.

use std::any::Any;
use std::sync::{Arc, Mutex};

use rapt_graph::{Binding, Graph};
use rapt_pt2::Program;

use super::weights::Weights;
use super::{Inner, Model, ModelError, Port, Weight, bound, port};

/// A program that is loaded and verified, but for its weights: models of it have the same operators and weights of their own, and
/// share what depends on the program alone.
#[derive(Clone)]
pub struct Template {
    program: Arc<Program>,
    graph: Arc<Graph>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    example: Option<Arc<Binding>>,
    bindings: Arc<Mutex<Vec<Arc<Binding>>>>,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("inputs", &self.inputs).field("outputs", &self.outputs).finish()
    }
}

impl Template {
    /// The program in the JSON of `models/model.json` in an archive.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_json(json: &[u8]) -> Result<Template, ModelError> {
        let program = Program::from_json(json)?;
        port::check_dtypes(&program)?;
        let graph = Graph::new(&program)?;
        Template::new(program, graph)
    }

    /// The program of an archive: its callers' tensors lie otherwise than those of the export did.
    pub(super) fn of_archive(program: Program) -> Result<Template, ModelError> {
        port::check_dtypes(&program)?;
        let graph = Graph::new(&program)?.with_inputs_laid_out();
        Template::new(program, graph)
    }

    fn new(program: Program, graph: Graph) -> Result<Template, ModelError> {
        let (mut inputs, outputs) = (port::inputs(&program), port::outputs(&program));
        // At several bindings; one of them is the example.
        let example = graph.verify()?.first().map(|symbols| graph.bind(symbols)).transpose()?.map(Arc::new);
        if let Some(binding) = &example {
            for written in bound::written(&graph, binding) {
                let mut users = graph.user_inputs();
                if let Some(place) = users.position(|input| input.value == Some(written)) {
                    inputs[place].is_written = true;
                }
            }
        }
        let bindings = Arc::new(Mutex::new(example.iter().cloned().collect()));
        let (program, graph) = (Arc::new(program), Arc::new(graph));
        Ok(Template { program, graph, inputs, outputs, example, bindings })
    }

    /// The inputs that a call gives.
    #[must_use]
    pub fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    /// The model with these weights, which are read where they lie, and packed or computed with once: they are constants. `keep` is
    /// dropped with the last that uses them.
    ///
    /// # Errors
    /// [`ModelError::MissingState`] for a weight of the program that is not given; [`ModelError::WeightForm`] for one that does
    /// not lie in its storage. One of another dtype or form than the program states is refused by [`Model::bind`].
    ///
    /// # Safety
    /// While `keep` lives, the storages are readable, and nothing writes to them.
    pub unsafe fn with_weights(
        &self,
        weights: Vec<Weight>,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Model, ModelError> {
        // SAFETY: promised by the caller.
        self.with(unsafe { Weights::lent(weights, keep)? })
    }

    pub(super) fn with(&self, weights: Weights) -> Result<Model, ModelError> {
        let inner = Inner {
            weights,
            program: Arc::clone(&self.program),
            graph: Arc::clone(&self.graph),
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            example: self.example.clone(),
            bindings: Arc::clone(&self.bindings),
            recent: Mutex::default(),
            plans: Mutex::default(),
            packed: Mutex::default(),
            folded: Mutex::default(),
            arenas: Mutex::default(),
        };
        for place in 0..inner.graph.inputs.len() {
            inner.payload(place)?;
        }
        Ok(Model { inner: Arc::new(inner), engine: None })
    }
}
