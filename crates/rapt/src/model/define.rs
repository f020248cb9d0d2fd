//! Nodes by their definition: the operators of rapt-graph's interpreter, one at a time.

use rapt_graph::ops::Op;
use rapt_graph::{Binding, Eval, Int, Meta, OpError, Out, Precision, Shapes, Tensor, ValueId};

/// The operands of one node.
struct Operands<'a> {
    binding: &'a Binding,
    tensors: Vec<(ValueId, Tensor)>,
}

impl Shapes for Operands<'_> {
    fn meta(&self, id: ValueId) -> Result<&Meta, OpError> {
        self.binding.meta(id)
    }

    fn int(&self, int: Int) -> Result<i64, OpError> {
        self.binding.int(int)
    }

    fn float(&self, id: ValueId) -> Result<f64, OpError> {
        self.binding.float(id)
    }

    fn bool(&self, id: ValueId) -> Result<bool, OpError> {
        self.binding.bool(id)
    }
}

impl Eval for Operands<'_> {
    fn tensor(&self, id: ValueId) -> Result<&Tensor, OpError> {
        self.tensors.iter().find(|(own, _)| *own == id).map(|(_, tensor)| tensor).ok_or(OpError::NotATensor(id))
    }

    fn precision(&self) -> Precision {
        Precision::Rounded
    }
}

/// The results of node `n`, each rounded once to its dtype; `None` for what is no tensor of its own. What a node writes in
/// place is the operand.
///
/// # Errors
/// [`OpError`] for what only the values show.
pub(super) fn node(
    binding: &Binding,
    n: usize,
    op: &Op,
    tensors: Vec<(ValueId, Tensor)>,
) -> Result<Vec<Option<Tensor>>, OpError> {
    let operands = Operands { binding, tensors };
    let mut results = Vec::new();
    for out in &binding.outs[n] {
        results.push(match out {
            Out::Fresh(meta) => Some(Tensor::zeros(meta.clone())),
            Out::Same(of) => operands.tensor(*of).ok().cloned(),
            Out::View { of, .. } => operands.tensor(*of).ok().cloned(),
            Out::Int(_) | Out::Float(_) | Out::Bool(_) => None,
        });
    }
    let outs: Vec<Tensor> = results.iter().flatten().cloned().collect();
    op.eval(&operands, &outs)?;
    Ok(results)
}
