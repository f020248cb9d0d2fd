//! Where results go: to a tensor of their own, or into an operand.

use crate::{Meta, OpError, Out, Shapes, ValueId};

/// Where an operation puts its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A tensor of its own.
    Fresh,
    /// Its first operand: the forms with `_` behind their name.
    Input,
}

impl Target {
    /// The operator's name without the underscore of its form in place, and where that form writes. `__and__` is no such form;
    /// `__iand__` is one of `__and__`.
    pub(super) fn of(name: &str) -> (&str, Target) {
        match name {
            "__iand__" => ("__and__", Target::Input),
            "__ior__" => ("__or__", Target::Input),
            "__ixor__" => ("__xor__", Target::Input),
            "__ilshift__" => ("__lshift__", Target::Input),
            "__irshift__" => ("__rshift__", Target::Input),
            _ if name.ends_with("__") => (name, Target::Fresh),
            _ => name.strip_suffix('_').map_or((name, Target::Fresh), |base| (base, Target::Input)),
        }
    }

    /// What is written, of an operation on `input`.
    pub(super) fn mutates(self, input: ValueId) -> Option<ValueId> {
        (self == Target::Input).then_some(input)
    }

    /// The result of an operation whose result has this form; in place, the operand must have its shape.
    ///
    /// # Errors
    /// [`OpError::Shape`].
    pub(super) fn out(self, input: ValueId, shapes: &dyn Shapes, form: Meta) -> Result<Out, OpError> {
        match self {
            Target::Fresh => Ok(Out::Fresh(form)),
            Target::Input if shapes.meta(input)?.shape == form.shape => Ok(Out::Same(input)),
            Target::Input => {
                let own = &shapes.meta(input)?.shape;
                Err(OpError::Shape(format!("a result of shape {:?} is not written to shape {own:?}", form.shape)))
            }
        }
    }
}
