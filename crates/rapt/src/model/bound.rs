//! A model for inputs of given forms, and one run of it.

use std::sync::Arc;

use rapt_core::{DType, Device, View, ViewMut};
use rapt_graph::{
    Binding, Cells, Fact, Graph, Interpreter, Item, Meta, Output as GraphOutput, Precision, Tensor, ValueId,
};

use super::state::State;
use super::{Model, ModelError, cells};
use crate::Shape;

/// What an input is, but for its numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum InputForm {
    /// A tensor of this dtype and these sizes.
    Tensor {
        /// The dtype.
        dtype: DType,
        /// The sizes.
        shape: Vec<usize>,
    },
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// `None`.
    None,
}

impl InputForm {
    pub(super) fn fact(&self) -> Fact {
        match self {
            InputForm::Tensor { dtype, shape } => {
                let shape: Vec<i64> = shape.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect();
                Fact::Tensor(Meta::contiguous(*dtype, &shape))
            }
            InputForm::Int(n) => Fact::Int(*n),
            InputForm::Float(x) => Fact::Float(*x),
            InputForm::Bool(b) => Fact::Bool(*b),
            InputForm::None => Fact::None,
        }
    }
}

/// An input of a run.
#[derive(Debug)]
pub enum Input<'a> {
    /// A tensor that is read.
    Read(View<'a>),
    /// A tensor that the program may write, where it does that.
    Write(ViewMut<'a>),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// `None`.
    None,
}

impl<'a> From<View<'a>> for Input<'a> {
    fn from(view: View<'a>) -> Self {
        Input::Read(view)
    }
}

impl<'a> From<ViewMut<'a>> for Input<'a> {
    fn from(view: ViewMut<'a>) -> Self {
        Input::Write(view)
    }
}

impl Input<'_> {
    /// What it is, but for its numbers.
    #[must_use]
    pub fn form(&self) -> InputForm {
        match self {
            Input::Read(view) => InputForm::Tensor { dtype: view.dtype(), shape: view.shape().to_vec() },
            Input::Write(view) => InputForm::Tensor { dtype: view.dtype(), shape: view.shape().to_vec() },
            Input::Int(n) => InputForm::Int(*n),
            Input::Float(x) => InputForm::Float(*x),
            Input::Bool(b) => InputForm::Bool(*b),
            Input::None => InputForm::None,
        }
    }

    fn device(&self) -> Device {
        match self {
            Input::Read(view) => view.device(),
            Input::Write(view) => view.device(),
            _ => Device::Cpu,
        }
    }

    /// The elements in row-major order.
    fn bytes(&mut self) -> Result<Vec<u8>, ModelError> {
        Ok(match self {
            Input::Read(view) => cells::gather(view),
            Input::Write(view) => {
                let (dtype, shape, strides, extent) = (view.dtype(), *view.shape(), *view.strides(), view.extent());
                // SAFETY: the memory of a view that may be written, read before anything is written to it.
                let same = unsafe {
                    View::from_raw_parts("input", view.as_mut_ptr(), dtype, shape, strides, view.device(), extent)
                }?;
                cells::gather(&same)
            }
            _ => Vec::new(),
        })
    }
}

/// What a result is, but for its numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum OutputForm {
    /// A tensor of this dtype and these sizes.
    Tensor {
        /// The dtype.
        dtype: DType,
        /// The sizes.
        shape: Vec<usize>,
        /// How PyTorch's own result lies; a place for it need not.
        strides: Vec<isize>,
    },
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// `None`.
    None,
}

/// A result.
#[derive(Debug)]
pub enum Output {
    /// A tensor of its own, row-major.
    Tensor(crate::Tensor),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// `None`.
    None,
}

/// A model for inputs of given forms: every size is a number, and every node is verified.
#[derive(Clone, Debug)]
pub struct Bound {
    model: Model,
    binding: Arc<Binding>,
    outputs: Vec<OutputForm>,
    written: Vec<ValueId>,
}

/// The inputs of the graph whose content a run changes: by the signature, or in place through any view.
pub(super) fn written(graph: &Graph, binding: &Binding) -> Vec<ValueId> {
    let declared = graph.outputs.iter().filter_map(|output| match output {
        GraphOutput::InputMutation { input, .. } => Some(*input),
        GraphOutput::BufferMutation { name, .. } => {
            graph.inputs.iter().find(|input| input.source.state() == Some(name)).and_then(|input| input.value)
        }
        _ => None,
    });
    let in_place = graph.nodes.iter().filter_map(|node| binding.storage(node.op.mutates()?));
    let mut written: Vec<ValueId> = declared.chain(in_place).collect();
    written.retain(|id| graph.inputs.iter().any(|input| input.value == Some(*id)));
    written.sort_unstable();
    written.dedup();
    written
}

impl Bound {
    pub(super) fn new(model: Model, binding: Arc<Binding>) -> Result<Bound, ModelError> {
        let graph = &model.inner.graph;
        let forms = graph.outputs.iter().filter_map(|output| match output {
            GraphOutput::Value(id) => Some(form(binding.fact(*id))),
            GraphOutput::Fixed(argument) => Some(fixed(argument)),
            GraphOutput::BufferMutation { .. } | GraphOutput::InputMutation { .. } => None,
        });
        let (outputs, written) = (forms.collect(), written(graph, &binding));
        Ok(Bound { model, binding, outputs, written })
    }

    /// The results' forms, in the order of [`Model::outputs`].
    #[must_use]
    pub fn outputs(&self) -> &[OutputForm] {
        &self.outputs
    }

    /// The values of the program's symbols.
    pub fn symbols(&self) -> impl Iterator<Item = (&str, i64)> {
        self.binding.symbols.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Whether a run writes this input of the caller.
    #[must_use]
    pub fn writes(&self, place: usize) -> bool {
        let input = self.model.inner.graph.user_inputs().nth(place);
        input.and_then(|input| input.value).is_some_and(|id| self.written.contains(&id))
    }

    /// Runs the program. `places` are where tensors of [`Bound::outputs`] go, in order: of the same dtype and sizes, with
    /// strides of their own; `None` for what is no tensor. They share no memory with the inputs.
    ///
    /// # Errors
    /// [`ModelError`]; then nothing was written.
    pub(super) fn run(
        &self,
        state: &mut State,
        inputs: &mut [Input<'_>],
        places: &mut [Option<ViewMut<'_>>],
    ) -> Result<(), ModelError> {
        self.check(inputs)?;
        self.check_places(places)?;
        let graph = &self.model.inner.graph;
        let mut interpreter = Interpreter::new(graph, Precision::Rounded);
        let held = state.give(&self.model, &mut interpreter)?;
        let mut items = Vec::with_capacity(inputs.len());
        for (input, source) in inputs.iter_mut().zip(graph.user_inputs()) {
            items.push(match input {
                Input::Int(n) => Item::Int(*n),
                Input::Float(x) => Item::Float(*x),
                Input::Bool(b) => Item::Bool(*b),
                Input::None => Item::None,
                tensor => match source.value.map(|id| self.binding.fact(id)) {
                    Some(Fact::Tensor(meta)) => Item::Tensor(as_stated(meta, &tensor.bytes()?)),
                    _ => Item::None,
                },
            });
        }
        let results = interpreter.run(&items).map_err(|error| self.model.inner.named(error))?;
        // From here on nothing fails.
        for (item, place) in results.iter().zip(places) {
            if let (Item::Tensor(tensor), Some(place)) = (item, place) {
                cells::scatter(&tensor.cast(place.dtype(), Precision::Rounded), place);
            }
        }
        for (place, (input, item)) in inputs.iter_mut().zip(&items).enumerate() {
            if let (true, Input::Write(view), Item::Tensor(tensor)) = (self.writes(place), input, item) {
                cells::scatter(&tensor.cast(view.dtype(), Precision::Rounded), view);
            }
        }
        state.keep(&self.written, &held);
        Ok(())
    }

    fn check(&self, inputs: &[Input<'_>]) -> Result<(), ModelError> {
        let ports = &self.model.inner.inputs;
        for (place, (input, port)) in inputs.iter().zip(ports).enumerate() {
            if input.device() != Device::Cpu {
                return Err(ModelError::Device { input: port.name.clone(), got: input.device() });
            }
            if self.writes(place) && matches!(input, Input::Read(_)) {
                return Err(ModelError::ReadOnly { input: port.name.clone() });
            }
        }
        let forms: Vec<InputForm> = inputs.iter().map(Input::form).collect();
        let binding = self.model.inner.bind(&forms)?;
        if binding.symbols != self.binding.symbols {
            let (expected, got) = (format!("{:?}", self.binding.symbols), format!("{:?}", binding.symbols));
            return Err(ModelError::InputKind { input: "the call".into(), expected, got });
        }
        Ok(())
    }

    fn check_places(&self, places: &[Option<ViewMut<'_>>]) -> Result<(), ModelError> {
        let ports = &self.model.inner.outputs;
        for ((place, expected), port) in places.iter().zip(&self.outputs).zip(ports) {
            let fits = match (place, expected) {
                (Some(view), OutputForm::Tensor { dtype, shape, .. }) => {
                    view.dtype() == *dtype && **view.shape() == **shape && view.device() == Device::Cpu
                }
                (None, OutputForm::Tensor { .. }) | (Some(_), _) => false,
                (None, _) => true,
            };
            if !fits {
                let got = place
                    .as_ref()
                    .map_or("none".into(), |view| format!("{} {} on {}", view.dtype(), view.shape(), view.device()));
                let expected = format!("{expected:?}");
                return Err(ModelError::OutputForm { output: port.name.clone(), expected, got });
            }
        }
        if places.len() != self.outputs.len() {
            let (expected, got) = (format!("{} results", self.outputs.len()), format!("{} places", places.len()));
            return Err(ModelError::OutputForm { output: "output".into(), expected, got });
        }
        Ok(())
    }

    /// The same into tensors of their own.
    pub(super) fn run_owned(&self, state: &mut State, inputs: &mut [Input<'_>]) -> Result<Vec<Output>, ModelError> {
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (form, port) in self.outputs.iter().zip(&self.model.inner.outputs) {
            outputs.push(match form {
                OutputForm::Tensor { dtype, shape, .. } => {
                    let sizes = Shape::new(shape).ok_or_else(|| ModelError::OutputForm {
                        output: port.name.clone(),
                        expected: format!("of {} dimensions", shape.len()),
                        got: format!("of at most {}", crate::MAX_RANK),
                    })?;
                    Output::Tensor(crate::Tensor::zeros(*dtype, sizes)?)
                }
                OutputForm::Int(n) => Output::Int(*n),
                OutputForm::Float(x) => Output::Float(*x),
                OutputForm::Bool(b) => Output::Bool(*b),
                OutputForm::None => Output::None,
            });
        }
        let mut places = Vec::with_capacity(outputs.len());
        for output in &mut outputs {
            places.push(match output {
                Output::Tensor(tensor) => Some(tensor.view_mut()?),
                _ => None,
            });
        }
        self.run(state, inputs, &mut places)?;
        drop(places);
        Ok(outputs)
    }
}

fn form(fact: &Fact) -> OutputForm {
    match fact {
        Fact::Tensor(meta) => OutputForm::Tensor {
            dtype: meta.dtype,
            shape: meta.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect(),
            strides: meta.strides.iter().map(|&n| isize::try_from(n).unwrap_or(0)).collect(),
        },
        Fact::Int(n) => OutputForm::Int(*n),
        Fact::Float(x) => OutputForm::Float(*x),
        Fact::Bool(b) => OutputForm::Bool(*b),
        Fact::None => OutputForm::None,
    }
}

fn fixed(argument: &rapt_pt2::Argument) -> OutputForm {
    match argument {
        rapt_pt2::Argument::Int(n) => OutputForm::Int(*n),
        rapt_pt2::Argument::Float(x) => OutputForm::Float(*x),
        rapt_pt2::Argument::Bool(b) => OutputForm::Bool(*b),
        _ => OutputForm::None,
    }
}

/// A tensor that lies as the program states, with these elements.
fn as_stated(meta: &Meta, elements: &[u8]) -> Tensor {
    let tensor = Tensor::zeros(meta.clone());
    match cells::of_bytes(meta.dtype, elements) {
        Cells::Float(numbers) => tensor.write_floats(Precision::Wide, numbers),
        Cells::Int(numbers) => tensor.write_ints(numbers),
    }
    tensor
}
