//! Exported programs: a `.pt2` archive, loaded, checked and run without PyTorch.
//!
//! ```text
//! Model::open ─► Model ──bind(forms)──► Bound ──run──► outputs        a Bound is a model for one set of sizes
//!                  └──session()──► Session ──run──► outputs           what the program keeps stays in the session
//! ```
//! Threads are those of the default engine; of an engine of one's own with [`Model::on`]; of any executor with
//! [`Model::bind_on`] and [`Session::run_on`]. The bits of the results depend on neither their number nor their pool.
//!
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
mod host;
mod memory;
mod plan;
mod port;
mod reference;
mod report;
mod run;
mod session;
mod state;
mod template;
mod weights;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rapt_core::{Arch, DType, Executor, Queue, Workspace};
use rapt_cpu::gemm::{PackedLayout, PackedMatrix, Strided};
use rapt_graph::{Binding, Fact, Graph, OpError, ValueId};
use rapt_pt2::{Archive, Call, Payload, Program, StorageId, Symbols};

use crate::engine::{Engine, default_engine};
use host::Host;
use plan::{Buffer, Place, Plan};
use weights::Weights;

pub use bound::{Bound, Input, InputForm, Output, OutputForm};
pub use error::ModelError;
pub use port::Port;
pub use rapt_graph::Precision;
pub use rapt_pt2::{Call as ModelCall, Key as CallKey, Kind as CallKind, Tree as CallTree};
pub use report::{Check, Explanation};
pub use session::Session;
pub use template::Template;
pub use weights::Weight;

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

/// Bindings that are kept, and plans; the oldest goes when another comes.
const BINDINGS: usize = 64;
/// Bytes of constants that the plans of other bindings keep beside one: the oldest plans go when there are more.
const PLAN_BYTES: usize = 64 << 20;

/// An exported program, ready to run. Clones share everything.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
    /// Whose threads run it; `None` is the default engine, which is asked when it is needed.
    engine: Option<Arc<Engine>>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("inputs", &self.inner.inputs).field("outputs", &self.inner.outputs).finish()
    }
}

struct Inner {
    weights: Weights,
    program: Arc<Program>,
    graph: Arc<Graph>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    /// A binding that the program was verified at: the sizes of its export, where they are known.
    example: Option<Arc<Binding>>,
    /// Shared with the models of other weights.
    bindings: Arc<Mutex<Vec<Arc<Binding>>>>,
    /// What was bound last: calls of one form follow one another.
    recent: Mutex<Option<(Vec<InputForm>, Arc<Binding>)>>,
    plans: Mutex<Vec<Arc<Plan>>>,
    /// Packed weights, by where they lie.
    packed: Mutex<Vec<(PackedKey, Arc<PackedMatrix>)>>,
    /// Of each node whose results depend on weights alone: those.
    folded: Mutex<Folded>,
    /// Arenas that no run uses at present.
    arenas: Mutex<Vec<Workspace>>,
}

/// A matrix of weights: address of the storage, first element, strides and sizes.
type PackedKey = (usize, i64, [i64; 2], [i64; 2]);

/// Results of nodes.
type Folded = BTreeMap<usize, Vec<(ValueId, Arc<Workspace>)>>;

impl Model {
    /// Loads an archive that `torch.export.save` wrote. The file is mapped: it must not be altered while the model is used.
    /// Every weight is read once, and its checksum compared.
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
    /// As [`Model::open`]; [`ModelError::MissingState`] for a program that has parameters, buffers or constants:
    /// [`Template`] takes those.
    pub fn from_json(json: &[u8]) -> Result<Model, ModelError> {
        Template::from_json(json)?.with(Weights::None)
    }

    /// What is known of an archive without running it: whether it is served, and if not, everything that is missing.
    ///
    /// # Errors
    /// [`ModelError::Archive`] for what is no archive.
    pub fn check(path: impl AsRef<Path>) -> Result<Check, ModelError> {
        let archive = Archive::open(path)?;
        let program = archive.program().clone();
        Ok(Check::new(&program, Model::of_archive(archive)))
    }

    fn of_archive(archive: Archive) -> Result<Model, ModelError> {
        let template = Template::of_archive(archive.program().clone())?;
        // An altered weight would be a wrong result. Packing reads the same bytes afterwards, from memory.
        archive.check_storages()?;
        template.with(Weights::of_archive(archive)?)
    }

    /// The same program on an engine of one's own, which lives at least as long. The archive, plans and packed weights are
    /// shared with this model.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use rapt::{Engine, Model};
    /// let engine = Arc::new(Engine::new(Some(2))?);
    /// let model = Model::open("model.pt2")?.on(engine); // on two threads
    /// # Ok::<(), rapt::ModelError>(())
    /// ```
    #[must_use]
    pub fn on(&self, engine: Arc<Engine>) -> Model {
        Model { inner: Arc::clone(&self.inner), engine: Some(engine) }
    }

    /// The engine whose threads run this model: the one of [`Model::on`], else the default one.
    ///
    /// # Errors
    /// [`rapt_core::Error::Option`] if it is the default one and an environment variable holds nonsense.
    pub fn engine(&self) -> Result<&Engine, ModelError> {
        match &self.engine {
            Some(engine) => Ok(engine),
            None => Ok(default_engine()?),
        }
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

    /// What runs for the sizes of the export on this model's engine, in words: a table for people. [`Bound::explain`] says it
    /// for other sizes and threads.
    #[must_use]
    pub fn explain(&self) -> Explanation {
        Explanation::new(self, None)
    }

    /// The model for inputs of these forms: symbols have values, every size is a number, every guard holds.
    ///
    /// # Errors
    /// [`ModelError`] for a wrong count, kind, dtype, rank or size, and for a guard that does not hold.
    pub fn bind(&self, inputs: &[InputForm]) -> Result<Bound, ModelError> {
        self.bind_to(inputs, Host::of(self.engine()?))
    }

    /// The same for somebody else's threads, which also pack what is not packed yet: for [`Session::run_on`].
    ///
    /// # Errors
    /// As [`Model::bind`]; [`rapt_core::Error::Unsupported`] for a queue of a GPU.
    pub fn bind_on(&self, inputs: &[InputForm], queue: &Queue<'_>) -> Result<Bound, ModelError> {
        self.bind_to(inputs, Host::on(self.engine()?, queue)?)
    }

    fn bind_to(&self, inputs: &[InputForm], host: Host<'_>) -> Result<Bound, ModelError> {
        let binding = self.inner.bind(inputs)?;
        Bound::new(self.clone(), &binding, host)
    }

    /// Runs the program on these inputs, on the threads of its engine. What it keeps (a cache in a buffer) starts as the archive
    /// has it, and is forgotten: [`Model::session`] keeps it.
    ///
    /// # Errors
    /// As [`Model::bind`], and [`ModelError`] for what only the values show. Nothing was written, but where a worker panicked.
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
    /// Where a parameter, buffer or constant lies among the weights; `None` for an input of the caller.
    fn payload(&self, place: usize) -> Result<Option<&Payload>, ModelError> {
        let Some(name) = self.graph.inputs[place].source.state() else { return Ok(None) };
        let found = self.program.signature.inputs.get(place).and_then(|input| self.weights.payload(input));
        found.map(Some).ok_or_else(|| ModelError::MissingState { name: name.to_owned() })
    }

    fn bind(&self, inputs: &[InputForm]) -> Result<Arc<Binding>, ModelError> {
        let recent = || self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, binding)) = recent().as_ref().filter(|(forms, _)| forms == inputs) {
            return Ok(Arc::clone(binding));
        }
        let facts: Vec<Fact> = inputs.iter().map(InputForm::fact).collect();
        if facts.len() != self.inputs.len() {
            let names = self.inputs.iter().map(|port| port.name.clone()).collect();
            return Err(ModelError::InputCount { expected: self.inputs.len(), got: facts.len(), names });
        }
        let symbols = self.graph.solve(&facts).map_err(|error| self.named(error))?;
        let binding = self.binding(&symbols).map_err(|error| match error {
            // The program itself says that it does not take these sizes.
            ModelError::Graph(rapt_graph::Error::Node { node, target, cause: cause @ OpError::Assertion { .. } }) => {
                ModelError::Values { node, target, cause }
            }
            error => error,
        })?;
        *recent() = Some((inputs.to_vec(), Arc::clone(&binding)));
        Ok(binding)
    }

    /// The error of a run, whose inputs were checked before: what a node says is of their values.
    fn of_values(&self, error: rapt_graph::Error) -> ModelError {
        match error {
            rapt_graph::Error::Node { node, target, cause } => ModelError::Values { node, target, cause },
            error => self.named(error),
        }
    }

    /// The bytes of a storage of the weights.
    fn storage(&self, id: StorageId) -> &[u8] {
        self.weights.storage(id)
    }

    /// A constant matrix `[k, n]`, packed once by these threads; and whether every plan shares it.
    fn packed(
        &self,
        layout: PackedLayout,
        w: &Place,
        buffer: &Buffer,
        executor: &dyn Executor,
    ) -> Result<(Arc<PackedMatrix>, bool), ModelError> {
        let (base, is_shared) = match buffer {
            Buffer::Archive(id) => (self.storage(*id).as_ptr(), true),
            // One plan's own goes with it.
            Buffer::Constant(memory) => {
                let folded = self.folded.lock().unwrap_or_else(PoisonError::into_inner);
                let is_shared = folded.values().flatten().any(|(_, known)| Arc::ptr_eq(known, memory));
                (memory.as_ptr(), is_shared)
            }
            _ => return Err(ModelError::Plan { why: "weights that are not constant are packed in each run".into() }),
        };
        let two = |numbers: &[i64]| [numbers[0], numbers[1]];
        let key = (base as usize, w.meta.offset, two(&w.meta.strides), two(&w.meta.shape));
        let lock = || self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |(known, matrix): &&(PackedKey, Arc<PackedMatrix>)| *known == key && *matrix.layout() == layout;
        if is_shared && let Some((_, known)) = lock().iter().find(is_same) {
            return Ok((Arc::clone(known), true));
        }
        let matrix = Strided {
            ptr: base.wrapping_offset(w.offset_bytes()),
            k_stride: w.meta.strides[0] as isize,
            n_stride: w.meta.strides[1] as isize,
        };
        // Without the lock: a thread of the executor may run this model too before it comes back.
        // SAFETY: the place was verified to lie in its storage, which lives as long as the model.
        let new = Arc::new(unsafe { PackedMatrix::pack(layout, matrix, executor)? });
        if !is_shared {
            return Ok((new, false));
        }
        let mut packed = lock();
        if let Some((_, known)) = packed.iter().find(is_same) {
            return Ok((Arc::clone(known), true));
        }
        packed.push((key, Arc::clone(&new)));
        Ok((new, true))
    }

    /// An arena that no run uses, or a new one.
    fn arena(&self) -> Workspace {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Keeps an arena for the next run.
    fn keep_arena(&self, arena: Workspace) {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner).push(arena);
    }

    /// The bytes of packed weights.
    fn packed_bytes(&self) -> usize {
        let packed = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        packed.iter().map(|(_, matrix)| matrix.len_bytes()).sum()
    }

    /// The plan of a binding for so many threads, made once.
    fn plan(&self, binding: &Arc<Binding>, host: Host<'_>) -> Result<Arc<Plan>, ModelError> {
        let lock = || self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let (threads, arch): (usize, Arch) = (host.threads(), host.engine.caps().arch);
        let is_same =
            |plan: &&Arc<Plan>| plan.threads == threads && plan.arch == arch && plan.binding.symbols == binding.symbols;
        if let Some(known) = lock().iter().find(is_same) {
            return Ok(Arc::clone(known));
        }
        let written = bound::written(&self.graph, binding);
        let plan = Arc::new(Plan::new(self, binding, &written, host)?);
        let mut plans = lock();
        let bytes = |plans: &[Arc<Plan>]| plans.iter().map(|plan| plan.own_bytes).sum::<usize>();
        while plans.len() >= BINDINGS || bytes(&plans) > PLAN_BYTES {
            plans.remove(0);
        }
        plans.push(Arc::clone(&plan));
        Ok(plan)
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
