//! What a program keeps from one call to the next: the storages of buffers that it writes.

use std::collections::BTreeMap;

use rapt_core::ViewMut;
use rapt_graph::{Cells, Interpreter, Meta, Tensor, ValueId};
use rapt_pt2::{Payload, StorageId};

use super::{Bound, Input, InputForm, Model, ModelError, Output, cells};

/// Calls of a model that share what it keeps. It starts as the archive has it.
#[derive(Debug)]
pub struct Session {
    model: Model,
    state: State,
}

impl Session {
    pub(super) fn new(model: Model) -> Session {
        Session { model, state: State::default() }
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// As [`Model::bind`].
    ///
    /// # Errors
    /// As [`Model::bind`].
    pub fn bind(&self, inputs: &[InputForm]) -> Result<Bound, ModelError> {
        self.model.bind(inputs)
    }

    /// Runs the program on these inputs. What it keeps stays in this session.
    ///
    /// # Errors
    /// As [`Model::run`]: nothing was written, and the session keeps what it had.
    pub fn run(&mut self, inputs: &mut [Input<'_>]) -> Result<Vec<Output>, ModelError> {
        let forms: Vec<InputForm> = inputs.iter().map(Input::form).collect();
        self.bind(&forms)?.run_owned(&mut self.state, inputs)
    }

    /// Runs a bound model into memory of the caller: `places` has a tensor of the same dtype and sizes, with any strides, for
    /// each tensor of [`Bound::outputs`], and `None` for what is no tensor. It shares no memory with the inputs.
    ///
    /// # Errors
    /// As [`Session::run`]; [`ModelError::OutputForm`] for a place of another dtype or shape.
    pub fn run_into(
        &mut self,
        bound: &Bound,
        inputs: &mut [Input<'_>],
        places: &mut [Option<ViewMut<'_>>],
    ) -> Result<(), ModelError> {
        bound.run(&mut self.state, inputs, places)
    }

    /// Forgets what the calls so far have left: the session is as it began.
    pub fn reset(&mut self) {
        self.state = State::default();
    }

    /// The number of bytes that the session holds beside the archive.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let len = |cells: &Cells| match cells {
            Cells::Float(numbers) => numbers.len(),
            Cells::Int(numbers) => numbers.len(),
        };
        self.state.written.values().map(|cells| len(cells) * 8).sum()
    }
}

/// The storages that were written.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    written: BTreeMap<StorageId, Cells>,
}

/// The tensors that a run was given, by their places among the graph's inputs.
pub(super) type Held = Vec<(ValueId, StorageId, Tensor)>;

impl State {
    /// Gives the interpreter every parameter, buffer and constant. Names that share a storage share it there too.
    pub(super) fn give(&self, model: &Model, interpreter: &mut Interpreter<'_>) -> Result<Held, ModelError> {
        let inner = &model.inner;
        let mut storages: BTreeMap<StorageId, Tensor> = BTreeMap::new();
        let mut held = Held::new();
        for (place, input) in inner.graph.inputs.iter().enumerate() {
            let (Some(name), Some((archive, payload))) = (input.source.state(), inner.payload(place)?) else {
                continue;
            };
            let whole = storages.entry(payload.storage).or_insert_with(|| {
                let cells = self.written.get(&payload.storage).cloned();
                let cells = cells.unwrap_or_else(|| cells::of_bytes(payload.dtype, archive.storage(payload.storage)));
                Tensor::new(meta(payload), cells)
            });
            let tensor = whole.view(meta(payload));
            interpreter.set(name, &tensor)?;
            if let Some(id) = input.value {
                held.push((id, payload.storage, tensor));
            }
        }
        Ok(held)
    }

    /// Keeps the storages of what was written.
    pub(super) fn keep(&mut self, written: &[ValueId], held: &Held) {
        for (_, storage, tensor) in held.iter().filter(|(id, ..)| written.contains(id)) {
            self.written.insert(*storage, tensor.storage());
        }
    }
}

fn meta(payload: &Payload) -> Meta {
    let numbers = |sizes: &[usize]| sizes.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect();
    Meta {
        dtype: payload.dtype,
        shape: numbers(&payload.sizes),
        strides: numbers(&payload.strides),
        offset: i64::try_from(payload.storage_offset).unwrap_or(i64::MAX),
    }
}
