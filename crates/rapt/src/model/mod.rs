//! Exported programs: a `.pt2` archive, loaded, checked and run without PyTorch.
//!
//! ```text
//! Model::open ─► Model ──bind(forms)──► Bound ──run──► outputs        a Bound is a model for one set of sizes
//!                  └──session()──► Session ──run──► outputs           what the program keeps stays in the session
//! ```
//! Loading checks everything that needs no input: the archive, that every operator is served, and that what each node gives is
//! what the program says of it. Binding checks everything that needs no numbers: count, dtypes, sizes, guards. A run that is
//! refused has written nothing.
//!
//! An input is given as it lies, with any strides; it is never converted. Results are written where the caller says, or into
//! tensors of their own.
//!
//! Deliberately absent: any arithmetic (rapt-graph), any conversion, and any choice of a device: programs run on the CPU.

mod bound;
mod cells;
mod error;
mod port;
mod report;
mod session;
mod state;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rapt_core::DType;
use rapt_graph::{Binding, Fact, Graph};
use rapt_pt2::{Archive, Call, Payload, Program, Symbols};

pub use bound::{Bound, Input, InputForm, Output, OutputForm};
pub use error::ModelError;
pub use port::Port;
pub use rapt_pt2::{Call as ModelCall, Key as CallKey, Kind as CallKind, Tree as CallTree};
pub use report::Check;
pub use session::Session;

/// The dtypes that programs may have.
pub const SERVED: [DType; 10] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U8,
    DType::Bool,
];

/// Bindings that are kept; the oldest goes when another comes.
const BINDINGS: usize = 64;

/// An exported program, ready to run. Clones share everything.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("inputs", &self.inner.inputs).field("outputs", &self.inner.outputs).finish()
    }
}

struct Inner {
    /// The weights, where the program has an archive.
    archive: Option<Archive>,
    program: Program,
    graph: Graph,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    bindings: Mutex<Vec<Arc<Binding>>>,
}

impl Model {
    /// Loads an archive that `torch.export.save` wrote. The file is mapped: it must not be altered while the model is used.
    ///
    /// # Errors
    /// [`ModelError`]: the archive is damaged, of an older form, or says of itself what is not so; operators that are not
    /// served, all of them at once.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, ModelError> {
        Model::of_archive(Archive::open(path)?)
    }

    /// The same from memory.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_bytes(bytes: impl Into<Arc<[u8]>>) -> Result<Model, ModelError> {
        Model::of_archive(Archive::from_bytes(bytes.into())?)
    }

    /// A program without weights, from the JSON of `models/model.json` in an archive.
    ///
    /// # Errors
    /// As [`Model::open`]; [`ModelError::MissingState`] for a program that has parameters, buffers or constants.
    pub fn from_json(json: &[u8]) -> Result<Model, ModelError> {
        Model::new(None, Program::from_json(json)?)
    }

    /// What is known of an archive without running it: whether it is served, and if not, everything that is missing.
    ///
    /// # Errors
    /// [`ModelError::Archive`] for what is no archive.
    pub fn check(path: impl AsRef<Path>) -> Result<Check, ModelError> {
        let archive = Archive::open(path)?;
        let program = archive.program().clone();
        Ok(Check::new(&program, Model::new(Some(archive), program.clone())))
    }

    fn of_archive(archive: Archive) -> Result<Model, ModelError> {
        let program = archive.program().clone();
        Model::new(Some(archive), program)
    }

    fn new(archive: Option<Archive>, program: Program) -> Result<Model, ModelError> {
        port::check_dtypes(&program)?;
        let graph = Graph::new(&program)?;
        let (inputs, outputs) = (port::inputs(&program), port::outputs(&program));
        let mut inner = Inner { archive, program, graph, inputs, outputs, bindings: Mutex::default() };
        for place in 0..inner.graph.inputs.len() {
            inner.payload(place)?;
        }
        if let Some(binding) = inner.verify()? {
            for written in bound::written(&inner.graph, &binding) {
                let mut users = inner.graph.user_inputs();
                if let Some(place) = users.position(|input| input.value == Some(written)) {
                    inner.inputs[place].is_written = true;
                }
            }
        }
        Ok(Model { inner: Arc::new(inner) })
    }

    /// The inputs that a call gives, in the order of the leaves of [`Model::call`].
    #[must_use]
    pub fn inputs(&self) -> &[Port] {
        &self.inner.inputs
    }

    /// The results, in the order of the leaves of the call's output.
    #[must_use]
    pub fn outputs(&self) -> &[Port] {
        &self.inner.outputs
    }

    /// How the exported model was called and what it returned, where the program says.
    #[must_use]
    pub fn call(&self) -> Option<&Call> {
        self.inner.program.call.as_ref()
    }

    /// What runs, in words: a table for people.
    #[must_use]
    pub fn explain(&self) -> report::Explanation {
        report::Explanation::new(self)
    }

    /// The model for inputs of these forms: symbols have values, every size is a number, every guard holds.
    ///
    /// # Errors
    /// [`ModelError`] for a wrong count, kind, dtype, rank or size, and for a guard that does not hold.
    pub fn bind(&self, inputs: &[InputForm]) -> Result<Bound, ModelError> {
        let binding = self.inner.bind(inputs)?;
        Bound::new(self.clone(), binding)
    }

    /// Runs the program on these inputs. What it keeps (a cache in a buffer) starts as the archive has it, and is forgotten:
    /// [`Model::session`] keeps it.
    ///
    /// # Errors
    /// As [`Model::bind`], and [`ModelError`] for what only the values show. Nothing was written.
    pub fn run(&self, inputs: &mut [Input<'_>]) -> Result<Vec<Output>, ModelError> {
        self.session().run(inputs)
    }

    /// A run of calls that share what the program keeps: caches that it writes in place.
    #[must_use]
    pub fn session(&self) -> Session {
        Session::new(self.clone())
    }
}

impl Inner {
    /// Where a parameter, buffer or constant lies in the archive; `None` for an input of the caller.
    fn payload(&self, place: usize) -> Result<Option<(&Archive, &Payload)>, ModelError> {
        let Some(name) = self.graph.inputs[place].source.state() else { return Ok(None) };
        let found = self.archive.as_ref().and_then(|archive| {
            let payload = archive.payload(self.program.signature.inputs.get(place)?)?;
            Some((archive, payload))
        });
        found.map(Some).ok_or_else(|| ModelError::MissingState { name: name.to_owned() })
    }

    /// Verifies the graph at several bindings, and gives one of them.
    fn verify(&self) -> Result<Option<Arc<Binding>>, ModelError> {
        self.graph.verify()?.first().map(|symbols| self.binding(symbols)).transpose()
    }

    fn bind(&self, inputs: &[InputForm]) -> Result<Arc<Binding>, ModelError> {
        let facts: Vec<Fact> = inputs.iter().map(InputForm::fact).collect();
        if facts.len() != self.inputs.len() {
            let names = self.inputs.iter().map(|port| port.name.clone()).collect();
            return Err(ModelError::InputCount { expected: self.inputs.len(), got: facts.len(), names });
        }
        let symbols = self.graph.solve(&facts).map_err(|error| self.named(error))?;
        self.binding(&symbols)
    }

    /// The binding of these symbols, verified once.
    fn binding(&self, symbols: &Symbols) -> Result<Arc<Binding>, ModelError> {
        let lock = || self.bindings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().iter().find(|binding| binding.symbols == *symbols) {
            return Ok(Arc::clone(known));
        }
        let binding = Arc::new(self.graph.bind(symbols)?);
        let mut bindings = lock();
        if bindings.len() == BINDINGS {
            bindings.remove(0);
        }
        bindings.push(Arc::clone(&binding));
        Ok(binding)
    }

    /// The graph's error with the inputs' names in the call: `past[0]`, where the graph has a name without brackets.
    fn named(&self, mut error: rapt_graph::Error) -> ModelError {
        use rapt_graph::Error;
        let outer = |inner: &str| {
            let place = self.graph.user_inputs().position(|input| input.name == inner);
            place.map_or_else(|| inner.to_owned(), |place| self.inputs[place].name.clone())
        };
        match &mut error {
            Error::InputDtype { name, .. }
            | Error::InputKind { name, .. }
            | Error::InputRank { name, .. }
            | Error::InputSize { name, .. }
            | Error::InputStrides { name, .. } => *name = outer(name),
            _ => {}
        }
        match error {
            Error::InputDtype { name, expected, got } => ModelError::Dtype { input: name, expected, got },
            Error::InputKind { name, expected, got } => ModelError::InputKind { input: name, expected, got },
            error => ModelError::Graph(error),
        }
    }
}
