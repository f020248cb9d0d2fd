//! A model for inputs of given forms, and one run of it.

use std::sync::Arc;

use rapt_core::{DType, Device, View, ViewMut, Workspace};
use rapt_graph::{Binding, Fact, Graph, Meta, Output as GraphOutput, ValueId};

use super::host::Host;
use super::memory::{self, Strided};
use super::plan::{Buffer, Place, Plan};
use super::run::Frame;
use super::state::State;
use super::{Explanation, Model, ModelError, Port};
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

    /// Refuses what is not in host memory.
    pub(super) fn check_device(&self, port: &Port) -> Result<(), ModelError> {
        let device = match self {
            Input::Read(view) => view.device(),
            Input::Write(view) => view.device(),
            _ => Device::Cpu,
        };
        if device == Device::Cpu {
            return Ok(());
        }
        Err(ModelError::Device { input: port.name.clone(), got: device })
    }

    /// Address, strides in elements, and the bytes reached, of a tensor.
    fn lies(&mut self) -> Option<Lies> {
        Some(match self {
            Input::Read(view) => {
                let (lo, hi) = view.reach_bytes();
                Lies { ptr: view.as_ptr().cast_mut(), strides: view.strides().to_vec(), reach: (lo, hi) }
            }
            Input::Write(view) => {
                let (lo, hi) = view.reach_bytes();
                Lies { ptr: view.as_mut_ptr(), strides: view.strides().to_vec(), reach: (lo, hi) }
            }
            _ => return None,
        })
    }
}

/// How a caller's tensor lies.
struct Lies {
    ptr: *mut u8,
    strides: Vec<isize>,
    reach: (isize, isize),
}

impl Lies {
    fn span(&self) -> (usize, usize) {
        let at = |bytes| (self.ptr as usize).wrapping_add_signed(bytes);
        (at(self.reach.0), at(self.reach.1))
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
    plan: Arc<Plan>,
    outputs: Vec<OutputForm>,
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
    pub(super) fn new(model: Model, binding: &Arc<Binding>, host: Host<'_>) -> Result<Bound, ModelError> {
        let graph = &model.inner.graph;
        let forms = graph.outputs.iter().filter_map(|output| match output {
            GraphOutput::Value(id) => Some(form(binding.fact(*id))),
            GraphOutput::Fixed(argument) => Some(fixed(argument)),
            GraphOutput::BufferMutation { .. } | GraphOutput::InputMutation { .. } => None,
        });
        let outputs = forms.collect();
        let plan = model.inner.plan(binding, host)?;
        Ok(Bound { model, plan, outputs })
    }

    /// The results' forms, in the order of [`Model::outputs`].
    #[must_use]
    pub fn outputs(&self) -> &[OutputForm] {
        &self.outputs
    }

    /// The values of the program's symbols.
    pub fn symbols(&self) -> impl Iterator<Item = (&str, i64)> {
        self.plan.binding.symbols.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How many threads share the work of a run, at most: what is too small for them takes fewer.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.plan.threads
    }

    /// What runs, in words: a table for people.
    #[must_use]
    pub fn explain(&self) -> Explanation {
        Explanation::new(&self.model, Some(&self.plan))
    }

    /// Whether a run writes this input of the caller.
    #[must_use]
    pub fn writes(&self, place: usize) -> bool {
        self.plan.written_inputs.contains(&place)
    }

    /// Runs the program. `places` are where tensors of [`Bound::outputs`] go, in order: of the same dtype and sizes, with
    /// strides of their own; `None` for what is no tensor. They share no memory with the inputs.
    ///
    /// # Errors
    /// [`ModelError`]; then nothing was written.
    pub(super) fn run(
        &self,
        host: Host<'_>,
        state: &mut State,
        inputs: &mut [Input<'_>],
        places: &mut [Option<ViewMut<'_>>],
    ) -> Result<(), ModelError> {
        self.check(inputs)?;
        self.check_places(places)?;
        let inner = &*self.model.inner;
        let mut given = self.given(inputs)?;
        let mut arena = inner.arena();
        arena.ensure(self.plan.arena_bytes + self.plan.threads * self.plan.scratch_bytes)?;
        let mut frame = self.frame(host, state, &given, &mut arena)?;
        let direct = self.direct(inputs, places);
        for ((place, result), _) in
            places.iter_mut().zip(&self.plan.results).zip(&direct).filter(|(_, direct)| **direct)
        {
            if let (Some(view), Some(result)) = (place, result) {
                frame.bases[result.buffer] = view.as_mut_ptr();
            }
        }
        // SAFETY: every buffer is where the plan takes it to be: `given` has the inputs as the program states them, the state and
        // the archive their storages, the arena its parts.
        unsafe {
            frame.run()?;
            // From here on nothing fails.
            for ((place, result), _) in
                places.iter_mut().zip(&self.plan.results).zip(direct).filter(|(_, direct)| !direct)
            {
                if let (Some(view), Some(result)) = (place, result) {
                    let strides: Vec<isize> = view.strides().to_vec();
                    let to = Strided { ptr: view.as_mut_ptr(), strides: &strides };
                    let from = Strided { ptr: frame.at(result), strides: &memory::strides(result) };
                    memory::copy(&result.shape(), result.size(), from, to);
                }
            }
            self.mutate(&frame);
            for given in given.iter_mut().flatten() {
                given.put_back();
            }
        }
        inner.keep_arena(arena);
        Ok(())
    }

    /// Of each result, whether it is made where the caller wants it: it is to lie there as the program says, apart from the inputs.
    fn direct(&self, inputs: &mut [Input<'_>], places: &mut [Option<ViewMut<'_>>]) -> Vec<bool> {
        let lies: Vec<(usize, usize)> = inputs.iter_mut().filter_map(|input| Some(input.lies()?.span())).collect();
        let one = |((place, result), &direct): ((&mut Option<ViewMut<'_>>, &Option<Place>), &bool)| {
            let (Some(view), Some(result), true) = (place, result, direct) else { return false };
            let lies_so = |((&n, &stride), &own): ((&i64, &i64), &isize)| n == 1 || stride as isize == own;
            let address = view.as_mut_ptr() as usize;
            let end = address.wrapping_add_signed(view.reach_bytes().1);
            result.meta.shape.iter().zip(&result.meta.strides).zip(view.strides().iter()).all(lies_so)
                && lies.iter().all(|&(lo, hi)| end <= lo || hi <= address)
        };
        places.iter_mut().zip(&self.plan.results).zip(&self.plan.direct).map(one).collect()
    }

    /// Makes the mutations that the signature declares. All contents are read before any is written: one may be a view of
    /// another.
    unsafe fn mutate(&self, frame: &Frame<'_>) {
        let contents: Vec<Vec<u8>> = self
            .plan
            .mutations
            .iter()
            .map(|(from, _)| {
                let shape = from.shape();
                let mut bytes = vec![0u8; shape.iter().product::<usize>() * from.size()];
                let to = Strided { ptr: bytes.as_mut_ptr(), strides: &memory::row_major(&shape) };
                // SAFETY: promised by the caller: the frame's places are there.
                unsafe {
                    memory::copy(
                        &shape,
                        from.size(),
                        Strided { ptr: frame.at(from), strides: &memory::strides(from) },
                        to,
                    );
                };
                bytes
            })
            .collect();
        for ((_, to), mut bytes) in self.plan.mutations.iter().zip(contents) {
            let shape = to.shape();
            let from = Strided { ptr: bytes.as_mut_ptr(), strides: &memory::row_major(&shape) };
            // SAFETY: as above.
            unsafe {
                memory::copy(&shape, to.size(), from, Strided { ptr: frame.at(to), strides: &memory::strides(to) });
            };
        }
    }

    /// The inputs as the program states them: where they lie, or copied.
    fn given(&self, inputs: &mut [Input<'_>]) -> Result<Vec<Option<Given>>, ModelError> {
        let lies: Vec<Option<Lies>> = inputs.iter_mut().map(Input::lies).collect();
        // What the program writes must be seen by no other input.
        let overlaps = |place: usize, own: &Lies| {
            let (lo, hi) = own.span();
            self.plan.written_inputs.iter().filter(|other| **other != place).any(|&other| {
                lies.get(other).and_then(Option::as_ref).is_some_and(|other| {
                    let (other_lo, other_hi) = other.span();
                    lo < other_hi && other_lo < hi
                })
            })
        };
        let mut given = Vec::with_capacity(lies.len());
        for ((place, own), source) in lies.iter().enumerate().zip(self.model.inner.graph.user_inputs()) {
            let stated = source.value.map(|id| self.plan.binding.fact(id));
            given.push(match (own, stated) {
                (Some(own), Some(Fact::Tensor(stated))) => {
                    let strides = stated.shape.iter().zip(&stated.strides).zip(&own.strides);
                    let is_so = stated.shape.contains(&0)
                        || strides.into_iter().all(|((&n, &stride), &own)| n == 1 || stride as isize == own);
                    if is_so && !overlaps(place, own) {
                        Some(Given::in_place(own.ptr))
                    } else if stated.is_loose() && !is_so {
                        // The copy would lose numbers, or be as large as whoever wrote the program pleases.
                        return Err(ModelError::Graph(rapt_graph::Error::InputStrides {
                            name: source.name.clone(),
                            expected: stated.strides.clone(),
                            got: own.strides.iter().map(|&stride| stride as i64).collect(),
                        }));
                    } else {
                        Some(Given::copied(own, stated, self.writes(place))?)
                    }
                }
                _ => None,
            });
        }
        Ok(given)
    }

    fn frame<'a>(
        &'a self,
        host: Host<'a>,
        state: &mut State,
        given: &[Option<Given>],
        arena: &mut Workspace,
    ) -> Result<Frame<'a>, ModelError> {
        let inner = &*self.model.inner;
        let base = arena.as_mut_ptr();
        let mut bases = Vec::with_capacity(self.plan.buffers.len());
        for buffer in &self.plan.buffers {
            bases.push(match buffer {
                Buffer::Archive(id) => inner.storage(*id).as_ptr().cast_mut(),
                Buffer::State(id) => state.storage(inner, *id)?,
                Buffer::Input(place) => given[*place].as_ref().map_or(std::ptr::null_mut(), |given| given.ptr),
                Buffer::Constant(memory) => memory.as_ptr().cast_mut(),
                Buffer::Arena { at, .. } => base.wrapping_add(*at),
            });
        }
        Ok(Frame { inner, plan: &self.plan, host, bases, scratch: base.wrapping_add(self.plan.arena_bytes) })
    }

    fn check(&self, inputs: &[Input<'_>]) -> Result<(), ModelError> {
        let ports = &self.model.inner.inputs;
        for (place, (input, port)) in inputs.iter().zip(ports).enumerate() {
            input.check_device(port)?;
            if self.writes(place) && matches!(input, Input::Read(_)) {
                return Err(ModelError::ReadOnly { input: port.name.clone() });
            }
        }
        let forms: Vec<InputForm> = inputs.iter().map(Input::form).collect();
        let binding = self.model.inner.bind(&forms)?;
        if binding.symbols != self.plan.binding.symbols {
            let (expected, got) = (format!("{:?}", self.plan.binding.symbols), format!("{:?}", binding.symbols));
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
    pub(super) fn run_owned(
        &self,
        host: Host<'_>,
        state: &mut State,
        inputs: &mut [Input<'_>],
    ) -> Result<Vec<Output>, ModelError> {
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
        self.run(host, state, inputs, &mut places)?;
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

/// An input of the caller as the program states it.
struct Given {
    /// The first element.
    ptr: *mut u8,
    /// The copy that it lies in, and where it came from, if it is to be written there in the end.
    copy: Option<Workspace>,
    back: Option<Back>,
}

/// Where a copy goes in the end.
struct Back {
    to: *mut u8,
    strides: Vec<isize>,
    shape: Vec<usize>,
    stated: Vec<isize>,
    size: usize,
}

impl Given {
    fn in_place(ptr: *mut u8) -> Given {
        Given { ptr, copy: None, back: None }
    }

    /// A copy with the strides that the program states.
    fn copied(own: &Lies, stated: &Meta, is_written: bool) -> Result<Given, ModelError> {
        let shape: Vec<usize> = stated.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
        let strides: Vec<isize> = stated.strides.iter().map(|&stride| stride as isize).collect();
        let size = stated.dtype.size_bytes();
        let start = Meta { offset: 0, ..stated.clone() };
        let elements = start.extent().and_then(|extent| usize::try_from(extent).ok()).unwrap_or(0);
        let mut copy = Workspace::new();
        copy.ensure((elements * size).max(1))?;
        let to = Strided { ptr: copy.as_mut_ptr(), strides: &strides };
        // SAFETY: the view vouches for its elements; the copy has room for the stated form.
        unsafe { memory::copy(&shape, size, Strided { ptr: own.ptr, strides: &own.strides }, to) };
        let back = Back { to: own.ptr, strides: own.strides.clone(), shape, stated: strides, size };
        Ok(Given { ptr: copy.as_mut_ptr(), copy: Some(copy), back: is_written.then_some(back) })
    }

    /// Writes a copy back to the caller's tensor, where the program wrote it.
    ///
    /// # Safety
    /// The caller's tensor may be written.
    unsafe fn put_back(&mut self) {
        let (Some(_), Some(back)) = (&self.copy, &self.back) else { return };
        let from = Strided { ptr: self.ptr, strides: &back.stated };
        let to = Strided { ptr: back.to, strides: &back.strides };
        // SAFETY: promised by the caller; the copy has the same elements.
        unsafe { memory::copy(&back.shape, back.size, from, to) };
    }
}
