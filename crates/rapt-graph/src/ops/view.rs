//! Views: operators whose result is their operand's storage in another form.

use crate::{Args, Eval, OpError, Out, Shapes, Tensor, ValueId};

/// A view.
#[derive(Clone, Debug, PartialEq)]
pub enum View {
    /// `transpose.int`: two dimensions change places.
    Transpose {
        /// The tensor.
        input: ValueId,
        /// The dimensions.
        dims: [i64; 2],
    },
}

impl View {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<View, OpError>> {
        Some(match target {
            "torch.ops.aten.transpose.int" => transpose(args),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        Ok(match self {
            View::Transpose { input, dims } => {
                let mut meta = shapes.meta(*input)?.clone();
                let (a, b) = (meta.dim(dims[0])?, meta.dim(dims[1])?);
                if !meta.shape.is_empty() {
                    meta.shape.swap(a, b);
                    meta.strides.swap(a, b);
                }
                vec![Out::View { of: *input, meta }]
            }
        })
    }

    // One form for every family: views write nothing and compute nothing.
    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, _: &dyn Eval, _: &[Tensor]) -> Result<(), OpError> {
        Ok(())
    }
}

fn transpose(args: &Args<'_>) -> Result<View, OpError> {
    Ok(View::Transpose { input: args.tensor("self")?, dims: [args.known_int("dim0")?, args.known_int("dim1")?] })
}
