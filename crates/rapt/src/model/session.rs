//! Calls that share what a program keeps.

use rapt_core::ViewMut;

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
        self.state.held_bytes()
    }
}
