//! What is the same for all values of the symbols.

use rapt_graph::{Graph, Type, ValueId};

/// Of each value, whether it is the same for all values of the symbols: made of weights and of what is such a value itself.
pub(super) fn fixed(graph: &Graph) -> Vec<bool> {
    let mut fixed = vec![false; graph.values.len()];
    let is_number = |id: ValueId| match &graph.value(id).ty {
        Type::Tensor(meta) => {
            meta.sizes.iter().chain(&meta.strides).chain([&meta.storage_offset]).all(|expr| expr.constant().is_some())
        }
        Type::Int(expr) => expr.constant().is_some(),
        Type::Bool(_) | Type::Float(_) => true,
    };
    for input in &graph.inputs {
        if let (Some(id), Some(_)) = (input.value, input.source.state()) {
            fixed[id.0 as usize] = is_number(id);
        }
    }
    for node in &graph.nodes {
        let of_fixed = node.inputs.iter().all(|id| fixed[id.0 as usize]);
        for id in node.outputs.iter().flatten() {
            fixed[id.0 as usize] = of_fixed && is_number(*id);
        }
    }
    fixed
}
