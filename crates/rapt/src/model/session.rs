//! Calls that share what a program keeps.

use std::sync::Arc;

use rapt_core::{Queue, ViewMut};

use super::host::Host;
use super::state::State;
use super::{Bound, Input, InputForm, Model, ModelError, Output};

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

    /// What the calls so far have left.
    pub(super) fn state(&self) -> &State {
        &self.state
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
    /// As [`Model::run`]; the session keeps what it had, but where a worker panicked.
    pub fn run(&mut self, inputs: &mut [Input<'_>]) -> Result<Vec<Output>, ModelError> {
        let forms: Vec<InputForm> = inputs.iter().map(Input::form).collect();
        let host = Host::of(self.model.engine()?);
        self.model.bind_to(&forms, host)?.run_owned(host, &mut self.state, inputs)
    }

    /// Runs a bound model on the threads of its engine into memory of the caller: `places` has a tensor of the same dtype and
    /// sizes, with any strides, for each tensor of [`Bound::outputs`], and `None` for what is no tensor. It shares no memory with
    /// the inputs.
    ///
    /// # Errors
    /// As [`Session::run`]; [`ModelError::OutputForm`] for a place of another dtype or shape; [`ModelError::OtherModel`] for
    /// the binding of another program.
    pub fn run_into(
        &mut self,
        bound: &Bound,
        inputs: &mut [Input<'_>],
        places: &mut [Option<ViewMut<'_>>],
    ) -> Result<(), ModelError> {
        self.check(bound)?;
        bound.run(Host::of(bound.model().engine()?), &mut self.state, inputs, places)
    }

    /// The same on somebody else's threads: as many as [`Model::bind_on`] was told, if the queue has them.
    ///
    /// # Errors
    /// As [`Session::run_into`]; [`rapt_core::Error::Unsupported`] for a queue of a GPU. After
    /// [`rapt_core::Error::WorkerPanicked`] and [`rapt_core::Error::WorkLeftUndone`] places, written inputs and what the session
    /// keeps are unspecified.
    pub fn run_on(
        &mut self,
        bound: &Bound,
        inputs: &mut [Input<'_>],
        places: &mut [Option<ViewMut<'_>>],
        queue: &Queue<'_>,
    ) -> Result<(), ModelError> {
        self.check(bound)?;
        bound.run(Host::on(bound.model().engine()?, queue)?, &mut self.state, inputs, places)
    }

    /// Refuses the binding of another program: its storages are not those of this session.
    fn check(&self, bound: &Bound) -> Result<(), ModelError> {
        if Arc::ptr_eq(&self.model.inner, &bound.model().inner) { Ok(()) } else { Err(ModelError::OtherModel) }
    }

    /// Forgets what the calls so far have left: the session is as it began.
    pub fn reset(&mut self) {
        self.state = State::default();
    }

    /// The number of bytes that the session holds beside the archive.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.state.held_bytes()
    }
}
