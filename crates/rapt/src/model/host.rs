//! Who plans a program and who runs it.

use rapt_core::{Error, Executor, Queue};

use super::ModelError;
use crate::Engine;

/// The engine whose memory and attention plans a program uses, and the threads that share its work.
#[derive(Clone, Copy)]
pub(super) struct Host<'a> {
    /// What the machine has, plans of attention, their scratch memory.
    pub(super) engine: &'a Engine,
    /// The threads: the engine's own, or somebody else's.
    pub(super) executor: &'a dyn Executor,
}

impl<'a> Host<'a> {
    /// The engine's own threads.
    pub(super) fn of(engine: &'a Engine) -> Host<'a> {
        Host { engine, executor: engine.executor() }
    }

    /// The threads of a queue.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a queue that is no host's.
    pub(super) fn on(engine: &'a Engine, queue: &Queue<'a>) -> Result<Host<'a>, ModelError> {
        match queue {
            Queue::Host(executor) => Ok(Host { engine, executor: *executor }),
            _ => Err(Error::unsupported("this queue", "programs run on the CPU", "use Queue::Host").into()),
        }
    }

    /// How many threads share the work.
    pub(super) fn threads(&self) -> usize {
        self.executor.threads().max(1)
    }
}
