//! Exported programs on Python's tensors: `rapt.load` and what it gives.
//!
//! Here a call is a flat list of leaves; `rapt._model` flattens arguments and rebuilds results, by the tree that the program
//! states. Results are of the kind of the first tensor among the leaves, owned and writable. A call runs on the threads that
//! `engine` says, as attention does.

mod template;
mod tree;

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};
use rapt::model::{Bound as Bind, Input, InputForm, Model, ModelError, Output, OutputForm, Port, Precision, Session};
use rapt::{DType, Device, ErrorKind, Queue, Shape, Strides, ViewMut};

use crate::api::context::Context;
use crate::engine::torch_pool::TorchPool;
use crate::engine::{Home, Owned};
use crate::errors::{Failure, Wording, guard, hints};
use crate::kind::Kind;
use crate::tensors::{self, Operand, Product, torch};

pub(crate) use template::PyTemplate;

/// What rapt-core calls the tensor that is read; messages get the input's own name.
const INPUT: &str = "INPUT";

fn guarded<T>(py: Python<'_>, body: impl FnOnce(&Cell<Wording>) -> Result<T, Failure>) -> PyResult<T> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || body(&wording))
}

/// The refusal of a model, with the expression that corrects it.
fn refusal(error: &ModelError, kind: Kind) -> Failure {
    let hint = match error {
        ModelError::Core(core) => return Failure::Rapt(core.clone()),
        ModelError::Dtype { input, expected, .. } => hints::cast(input, *expected, kind),
        ModelError::Device { input, .. } if kind == Kind::Torch => format!("`{input}.cpu()`"),
        ModelError::Device { input, .. } => format!("move {input} to host memory"),
        ModelError::ReadOnly { input } => format!("`{input}.copy()`"),
        _ => String::new(),
    };
    Failure::binding(error.kind(), error.to_string(), hint)
}

/// A failure on reading a tensor, with the input's name in place of rapt-core's.
fn renamed(failure: Failure, name: &str, kind: Kind) -> Failure {
    match failure {
        Failure::Rapt(error) => {
            let hint = hints::expression(&error, kind).replace(INPUT, name);
            Failure::binding(error.kind(), error.to_string().replace(INPUT, name), hint)
        }
        Failure::Binding { kind, message, hint } => {
            Failure::Binding { kind, message: message.replace(INPUT, name), hint: hint.replace(INPUT, name) }
        }
        python @ Failure::Python(_) => python,
    }
}

/// An exported program; see `rapt.Model`.
#[pyclass(frozen, module = "rapt._native", name = "Program")]
pub(crate) struct PyProgram {
    model: Model,
    owner: Owner,
}

/// The `Context` that loaded a program, if one did: its threads run the program's calls.
#[derive(Clone)]
struct Owner(Option<Arc<Owned>>);

impl Owner {
    fn of(context: Option<&Bound<'_, Context>>) -> Owner {
        Owner(context.map(|context| Arc::clone(&context.get().owned)))
    }

    fn home(&self) -> Result<Home, Failure> {
        self.0.as_ref().map_or(Ok(Home::Default), |owned| owned.home())
    }
}

/// Calls of a program that share what it keeps.
#[pyclass(frozen, module = "rapt._native", name = "ProgramSession")]
pub(crate) struct PySession {
    session: Mutex<Session>,
    owner: Owner,
}

impl PySession {
    /// The session, unless a call of another thread has it.
    fn taken(&self) -> Result<MutexGuard<'_, Session>, Failure> {
        match self.session.try_lock() {
            Ok(session) => Ok(session),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let message = "this session is in a call of another thread: its calls follow one another";
                Err(Failure::binding(ErrorKind::Option, message, "a session for each thread: `model.session()`"))
            }
        }
    }
}

type PyPort = (String, Option<&'static str>, Vec<String>, bool);

fn port(port: &Port) -> PyPort {
    (port.name.clone(), port.dtype.map(DType::name), port.sizes.clone(), port.is_written)
}

#[pymethods]
impl PyProgram {
    /// The program of an archive that `torch.export.save` wrote, on the threads of a `Context` or of the module functions.
    #[staticmethod]
    #[pyo3(signature = (path, context = None))]
    fn open(py: Python<'_>, path: PathBuf, context: Option<&Bound<'_, Context>>) -> PyResult<Self> {
        guarded(py, |_| {
            let model = py.detach(|| Model::open(path)).map_err(|error| refusal(&error, Kind::Numpy))?;
            Ok(PyProgram { model, owner: Owner::of(context) })
        })
    }

    /// The same from the bytes of an archive.
    #[staticmethod]
    #[pyo3(signature = (bytes, context = None))]
    fn from_bytes(py: Python<'_>, bytes: &[u8], context: Option<&Bound<'_, Context>>) -> PyResult<Self> {
        guarded(py, |_| {
            let model = py.detach(|| Model::from_bytes(bytes)).map_err(|error| refusal(&error, Kind::Numpy))?;
            Ok(PyProgram { model, owner: Owner::of(context) })
        })
    }

    /// A program without weights, from the JSON of its schema.
    #[staticmethod]
    fn from_json(py: Python<'_>, json: &[u8]) -> PyResult<Self> {
        guarded(py, |_| {
            let model = py.detach(|| Model::from_json(json)).map_err(|error| refusal(&error, Kind::Numpy))?;
            Ok(PyProgram { model, owner: Owner(None) })
        })
    }

    /// Of each input: name, dtype, sizes, whether a call writes it.
    fn inputs(&self) -> Vec<PyPort> {
        self.model.inputs().iter().map(port).collect()
    }

    /// Of each result: name, dtype, sizes, False.
    fn outputs(&self) -> Vec<PyPort> {
        self.model.outputs().iter().map(port).collect()
    }

    /// (positional, keyword, output): how the exported model was called; None where the program does not say.
    fn call<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.model.call().map(|call| tree::of_call(py, call)).transpose()
    }

    /// Name and text of each row of `explain`: for a call with these leaves, else for the sizes of the export.
    #[pyo3(signature = (leaves = None))]
    fn explain(&self, py: Python<'_>, leaves: Option<&Bound<'_, PyList>>) -> PyResult<Vec<(String, String)>> {
        guarded(py, |wording| {
            let home = self.owner.home()?;
            if let Some(leaves) = leaves {
                let call = Call::read(py, wording, &home, &self.model, &leaves.iter().collect::<Vec<_>>())?;
                return Ok(call.bind(py, &home, &self.model)?.explain().rows().to_vec());
            }
            let model = home.model(&self.model);
            let mut rows = py.detach(|| model.explain().rows().to_vec());
            let place = rows.iter().position(|(name, _)| name == "threads");
            if let (Some(place), Some(threads)) = (place, home.torch_threads(py, Kind::Torch)?) {
                rows.insert(place + 1, ("threads for torch tensors".into(), threads.to_string()));
            }
            Ok(rows)
        })
    }

    /// The results for these leaves, in the order of the leaves of the output.
    fn run<'py>(&self, py: Python<'py>, leaves: &Bound<'py, PyList>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        guarded(py, |wording| {
            run(py, wording, &self.owner, &mut self.model.session(), &leaves.iter().collect::<Vec<_>>())
        })
    }

    /// The results by definition, for these leaves; with `float64` nothing is rounded, and floats are float64.
    fn reference<'py>(
        &self,
        py: Python<'py>,
        leaves: &Bound<'py, PyList>,
        float64: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let leaves: Vec<_> = leaves.iter().collect();
        guarded(py, |wording| by_definition(py, wording, &self.owner, &self.model.session(), &leaves, float64))
    }

    /// A session that starts as the archive has it.
    fn session(&self) -> PySession {
        PySession { session: Mutex::new(self.model.session()), owner: self.owner.clone() }
    }
}

#[pymethods]
impl PySession {
    /// As `Program.run`; what the program keeps stays here.
    fn run<'py>(&self, py: Python<'py>, leaves: &Bound<'py, PyList>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        guarded(py, |wording| run(py, wording, &self.owner, &mut *self.taken()?, &leaves.iter().collect::<Vec<_>>()))
    }

    /// As `Program.reference`, with what the session keeps, which stays as it is.
    fn reference<'py>(
        &self,
        py: Python<'py>,
        leaves: &Bound<'py, PyList>,
        float64: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let leaves: Vec<_> = leaves.iter().collect();
        guarded(py, |wording| by_definition(py, wording, &self.owner, &*self.taken()?, &leaves, float64))
    }

    /// Forgets what the calls so far have left.
    fn reset(&self, py: Python<'_>) {
        // A call that holds the session needs the interpreter to end.
        py.detach(|| self.session.lock().unwrap_or_else(PoisonError::into_inner).reset());
    }

    /// The bytes that the session holds beside the archive.
    #[getter]
    fn held_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.session.lock().unwrap_or_else(PoisonError::into_inner).held_bytes())
    }
}

/// What is known of an archive, served or not.
#[pyfunction]
pub(crate) fn program_check(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    guarded(py, |_| {
        let check = py.detach(|| Model::check(path)).map_err(|error| refusal(&error, Kind::Numpy))?;
        let facts = PyDict::new(py);
        facts.set_item("written_by", &check.written_by)?;
        facts.set_item("is_served", check.is_served())?;
        facts.set_item("missing", &check.missing)?;
        facts.set_item("refusal", check.refusal.as_ref().map(ToString::to_string))?;
        facts.set_item("ops", &check.ops)?;
        facts.set_item("inputs", check.inputs.iter().map(port).collect::<Vec<_>>())?;
        facts.set_item("outputs", check.outputs.iter().map(port).collect::<Vec<_>>())?;
        Ok(facts)
    })
}

/// The operators of a program in JSON that are not served, as torch names them; none where it is refused for something else.
#[pyfunction]
pub(crate) fn program_missing(py: Python<'_>, json: &[u8]) -> PyResult<Vec<String>> {
    guarded(py, |_| {
        let loaded = py.detach(|| Model::from_json(json));
        Ok(loaded.err().map(|error| error.missing_ops()).unwrap_or_default())
    })
}

/// A leaf of a call as it was read.
enum Leaf {
    Tensor(Box<Operand>),
    Int(i64),
    Float(f64),
    Bool(bool),
    None,
}

impl Leaf {
    fn form(&self) -> InputForm {
        match self {
            Leaf::Tensor(operand) => InputForm::Tensor { dtype: operand.dtype, shape: operand.shape.to_vec() },
            Leaf::Int(n) => InputForm::Int(*n),
            Leaf::Float(x) => InputForm::Float(*x),
            Leaf::Bool(b) => InputForm::Bool(*b),
            Leaf::None => InputForm::None,
        }
    }

    fn input(&mut self, is_written: bool) -> rapt::Result<Input<'_>> {
        Ok(match self {
            Leaf::Tensor(operand) => {
                if is_written && operand.writable {
                    Input::Write(operand.view_mut()?)
                } else {
                    Input::Read(operand.view()?)
                }
            }
            Leaf::Int(n) => Input::Int(*n),
            Leaf::Float(x) => Input::Float(*x),
            Leaf::Bool(b) => Input::Bool(*b),
            Leaf::None => Input::None,
        })
    }
}

/// Reads a leaf; `source` is the first tensor of the call.
fn read<'py>(
    port: &Port,
    object: &Bound<'py, PyAny>,
    source: Option<&(Kind, Bound<'py, PyAny>)>,
) -> Result<Leaf, Failure> {
    if let Some(text) = &port.text {
        if object.is_instance_of::<PyString>() && object.extract::<String>()? == *text {
            return Ok(Leaf::None);
        }
        let message = format!("{} is {}, the program takes {text:?}", port.name, object.repr()?);
        return Err(Failure::binding(ErrorKind::Kind, message, ""));
    }
    if object.is_none() {
        return Ok(Leaf::None);
    }
    if let (Some(own), Some((kind, first))) = (tensors::kind_of(object)?, source) {
        if own != *kind {
            let (own, first) = (tensors::type_name(object), tensors::type_name(first));
            let message =
                format!("{} is a {own}, the call's first tensor is a {first}: all are of one kind", port.name);
            return Err(Failure::binding(ErrorKind::Kind, message, ""));
        }
        let operand =
            tensors::read(INPUT, object, *kind, first).map_err(|failure| renamed(failure, &port.name, *kind))?;
        if operand.device != Device::Cpu {
            return Err(refusal(&ModelError::Device { input: port.name.clone(), got: operand.device }, *kind));
        }
        if *kind == Kind::Torch {
            let one = std::iter::once((INPUT, object));
            torch::refuse_gradients(object.py(), one).map_err(|failure| renamed(failure, &port.name, *kind))?;
        }
        return Ok(Leaf::Tensor(Box::new(operand)));
    }
    if object.is_instance_of::<PyBool>() {
        return Ok(Leaf::Bool(object.extract()?));
    }
    if object.is_instance_of::<PyInt>() {
        let wide =
            |_| Failure::binding(ErrorKind::Shape, format!("{} is {object}: integers have 64 bits", port.name), "");
        return object.extract().map(Leaf::Int).map_err(wide);
    }
    if object.is_instance_of::<PyFloat>() {
        return Ok(Leaf::Float(object.extract()?));
    }
    let message = format!(
        "{} is a {}: allowed are numpy arrays, torch tensors, objects with __dlpack__, and numbers",
        port.name,
        tensors::type_name(object)
    );
    Err(Failure::binding(ErrorKind::Kind, message, ""))
}

/// The arguments of a call as they were read, and the threads that it runs on.
struct Call<'py> {
    /// The first tensor among them: results are of its kind.
    source: Option<(Kind, Bound<'py, PyAny>)>,
    leaves: Vec<Leaf>,
    torch: Option<TorchPool>,
}

impl<'py> Call<'py> {
    fn read(
        py: Python<'py>,
        wording: &Cell<Wording>,
        home: &Home,
        model: &Model,
        leaves: &[Bound<'py, PyAny>],
    ) -> Result<Self, Failure> {
        let mut source = None;
        for object in leaves {
            if let Some(kind) = tensors::kind_of(object)? {
                source = Some((kind, object.clone()));
                break;
            }
        }
        let kind = source.as_ref().map_or(Kind::Numpy, |(kind, _)| *kind);
        wording.set(Wording { kind, ..wording.get() });
        if leaves.len() != model.inputs().len() {
            let names = model.inputs().iter().map(|port| port.name.clone()).collect();
            let error = ModelError::InputCount { expected: model.inputs().len(), got: leaves.len(), names };
            return Err(refusal(&error, kind));
        }
        let mut read_leaves = Vec::with_capacity(leaves.len());
        for (port, object) in model.inputs().iter().zip(leaves) {
            read_leaves.push(read(port, object, source.as_ref())?);
        }
        Ok(Call { source, leaves: read_leaves, torch: home.torch_pool(py, kind)? })
    }

    fn kind(&self) -> Kind {
        self.source.as_ref().map_or(Kind::Numpy, |(kind, _)| *kind)
    }

    /// The model for these arguments on the call's threads, which pack weights with the GIL released.
    fn bind(&self, py: Python<'py>, home: &Home, model: &Model) -> Result<Bind, Failure> {
        let forms: Vec<InputForm> = self.leaves.iter().map(Leaf::form).collect();
        let (model, executor) = (home.model(model), home.executor(self.torch.as_ref())?);
        py.detach(|| model.bind_on(&forms, &Queue::Host(executor))).map_err(|error| refusal(&error, self.kind()))
    }
}

/// One call: every check, then the results' memory, then the run.
fn run<'py>(
    py: Python<'py>,
    wording: &Cell<Wording>,
    owner: &Owner,
    session: &mut Session,
    leaves: &[Bound<'py, PyAny>],
) -> Result<Vec<Bound<'py, PyAny>>, Failure> {
    let (model, home) = (session.model().clone(), owner.home()?);
    let call = Call::read(py, wording, &home, &model, leaves)?;
    let bound = call.bind(py, &home, &model)?;
    let (kind, queue) = (call.kind(), Queue::Host(home.executor(call.torch.as_ref())?));
    let Call { source, leaves: mut read_leaves, torch: _ } = call;
    let mut products = Vec::with_capacity(bound.outputs().len());
    for form in bound.outputs() {
        products.push(match form {
            OutputForm::Tensor { dtype, shape, strides } => {
                Some(allocate(py, kind, source.as_ref().map(|(_, object)| object), *dtype, shape, strides)?)
            }
            _ => None,
        });
    }
    {
        let mut inputs = Vec::with_capacity(read_leaves.len());
        for (place, (leaf, port)) in read_leaves.iter_mut().zip(model.inputs()).enumerate() {
            let input = leaf.input(bound.writes(place));
            inputs.push(input.map_err(|error| renamed(Failure::Rapt(error), &port.name, kind))?);
        }
        check_written(&inputs, model.inputs(), kind)?;
        let mut places: Vec<Option<ViewMut<'_>>> = Vec::with_capacity(products.len());
        for product in &mut products {
            places.push(product.as_mut().map(|(_, operand)| operand.view_mut()).transpose()?);
        }
        let done = py.detach(|| session.run_on(&bound, &mut inputs, &mut places, &queue));
        done.map_err(|error| refusal(&error, kind))?;
    }
    let mut results = Vec::with_capacity(products.len());
    for (form, product) in bound.outputs().iter().zip(products) {
        results.push(match (form, product) {
            (_, Some((product, operand))) => {
                drop(operand);
                product.finish(py)?
            }
            (OutputForm::Int(n), _) => n.into_pyobject(py)?.into_any(),
            (OutputForm::Float(x), _) => x.into_pyobject(py)?.into_any(),
            (OutputForm::Bool(b), _) => PyBool::new(py, *b).to_owned().into_any(),
            _ => py.None().into_bound(py),
        });
    }
    Ok(results)
}

/// Refuses an input that the program writes and that shares memory with another one, or has one place for two elements: what
/// the program was exported for is other memory, and PyTorch's own answer would be another.
fn check_written(inputs: &[Input<'_>], ports: &[Port], kind: Kind) -> Result<(), Failure> {
    let refused = |name: &str, what: String| {
        let copy = if kind == Kind::Torch { "clone" } else { "copy" };
        Failure::binding(ErrorKind::Layout, format!("{name} is written, and {what}"), format!("`{name}.{copy}()`"))
    };
    for (at, (input, port)) in inputs.iter().zip(ports).enumerate() {
        let Input::Write(written) = input else { continue };
        if rapt::prove_injective(INPUT, written).is_err() {
            return Err(refused(&port.name, "several of its elements are one place in memory".into()));
        }
        for (place, (other, of)) in inputs.iter().zip(ports).enumerate() {
            let shared = match other {
                Input::Read(view) => rapt::prove_disjoint(INPUT, written, INPUT, view).is_err(),
                Input::Write(view) if place != at => {
                    rapt::prove_disjoint(INPUT, written, INPUT, &view.as_view()).is_err()
                }
                _ => false,
            };
            if shared {
                return Err(refused(&port.name, format!("shares memory with {}", of.name)));
            }
        }
    }
    Ok(())
}

/// One call by definition.
fn by_definition<'py>(
    py: Python<'py>,
    wording: &Cell<Wording>,
    owner: &Owner,
    session: &Session,
    leaves: &[Bound<'py, PyAny>],
    float64: bool,
) -> Result<Vec<Bound<'py, PyAny>>, Failure> {
    let mut call = Call::read(py, wording, &owner.home()?, session.model(), leaves)?;
    let (kind, precision) = (call.kind(), if float64 { Precision::Wide } else { Precision::Rounded });
    let outputs = {
        let mut inputs = Vec::with_capacity(call.leaves.len());
        for (leaf, port) in call.leaves.iter_mut().zip(session.model().inputs()) {
            let input = leaf.input(false);
            inputs.push(input.map_err(|error| renamed(Failure::Rapt(error), &port.name, kind))?);
        }
        py.detach(|| session.reference(&mut inputs, precision)).map_err(|error| refusal(&error, kind))?
    };
    let first = call.source.as_ref().map(|(_, object)| object);
    let mut results = Vec::with_capacity(outputs.len());
    for output in outputs {
        results.push(match output {
            Output::Tensor(tensor) => {
                let from = tensor.view()?;
                let strides = from.strides().to_vec();
                let (product, mut operand) = allocate(py, kind, first, tensor.dtype(), tensor.shape(), &strides)?;
                let bytes = tensor.shape().numel().unwrap_or(0) * tensor.dtype().size_bytes();
                // SAFETY: both are row-major, of one dtype and shape.
                unsafe { operand.view_mut()?.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), bytes) };
                drop(operand);
                product.finish(py)?
            }
            Output::Int(n) => n.into_pyobject(py)?.into_any(),
            Output::Float(x) => x.into_pyobject(py)?.into_any(),
            Output::Bool(b) => PyBool::new(py, b).to_owned().into_any(),
            Output::None => py.None().into_bound(py),
        });
    }
    Ok(results)
}

/// Memory for a result, of the kind of the call's first tensor. torch's lie as PyTorch's own would, where that has no gaps.
fn allocate<'py>(
    py: Python<'py>,
    kind: Kind,
    first: Option<&Bound<'py, PyAny>>,
    dtype: DType,
    shape: &[usize],
    strides: &[isize],
) -> Result<(Product<'py>, Operand), Failure> {
    let sizes = Shape::new(shape).ok_or_else(|| {
        let message = format!("a result has {} dimensions; at most {} are served", shape.len(), rapt::MAX_RANK);
        Failure::binding(ErrorKind::Shape, message, "")
    })?;
    let Some(first) = first else {
        // A program without tensors among its inputs.
        let array = py.import("numpy")?.call_method1("empty", (0,))?;
        return tensors::allocate("output", Kind::Numpy, &array, Device::Cpu, dtype, sizes);
    };
    if kind == Kind::Torch
        && is_dense(shape, strides)
        && let Some(strides) = Strides::new(strides)
    {
        let (object, operand) = torch::empty_strided(first, "output", dtype, &sizes, &strides)?;
        return Ok((Product::Ready(object), operand));
    }
    tensors::allocate("output", kind, first, Device::Cpu, dtype, sizes)
}

/// Whether a tensor fills its memory without gaps and without meeting itself, in some order of its dimensions.
fn is_dense(shape: &[usize], strides: &[isize]) -> bool {
    let mut dims: Vec<(isize, usize)> =
        strides.iter().copied().zip(shape.iter().copied()).filter(|d| d.1 != 1).collect();
    dims.sort_unstable();
    let mut expected = 1isize;
    !shape.contains(&0)
        && dims.into_iter().all(|(stride, size)| {
            let fits = stride == expected;
            expected = expected.saturating_mul(size.cast_signed());
            fits
        })
}
