//! Operators that PyTorch orders by tokens: they become plain nodes, and the tokens go.
//!
//! ```text
//! t1, _ = with_effects(t0, aten._linalg_check_errors, info, 'linalg.inv', is_matrix=False)
//! ─►  aten._linalg_check_errors(info=info, api_name='linalg.inv', is_matrix=False)
//! ```
//!
//! A token is an empty tensor, an input and a result of the program that no caller sees. Nodes run in their order as it is.
//! Deliberately absent: every other operator with effects, whose program keeps its tokens and is refused.

use crate::schema::{Argument, Graph, GraphSignature, InputSpec, NamedArgument, Node, OutputSpec};

const WITH_EFFECTS: &str = "torch.ops.higher_order.with_effects";
const CHECK: &str = "torch.ops.aten._linalg_check_errors.default";
/// The names of what a check takes by position.
const OPERANDS: [&str; 2] = ["info", "api_name"];

/// Takes the tokens out of a program all of whose effects are known; others stay as they are.
pub(crate) fn without_tokens(graph: &mut Graph, signature: &mut GraphSignature) {
    let fits = graph.inputs.len() == signature.input_specs.len() && graph.outputs.len() == signature.output_specs.len();
    if !fits || !graph.nodes.iter().all(|node| node.target != WITH_EFFECTS || is_check(node)) {
        return;
    }
    let inputs: Vec<bool> = signature.input_specs.iter().map(|spec| !matches!(spec, InputSpec::Token { .. })).collect();
    let outputs: Vec<bool> = signature.output_specs.iter().map(|spec| !matches!(spec, OutputSpec::Token(_))).collect();
    let Graph { inputs: values, outputs: results, tensor_values, .. } = graph;
    for (kept, value) in inputs.iter().zip(&*values).chain(outputs.iter().zip(&*results)) {
        if let (false, Argument::AsTensor(token)) = (kept, value) {
            tensor_values.0.remove(&token.name);
        }
    }
    keep(values, &inputs);
    keep(&mut signature.input_specs, &inputs);
    keep(results, &outputs);
    keep(&mut signature.output_specs, &outputs);
    for node in graph.nodes.iter_mut().filter(|node| node.target == WITH_EFFECTS) {
        node.target = CHECK.to_owned();
        node.inputs.drain(..2);
        for (operand, name) in node.inputs.iter_mut().zip(OPERANDS) {
            operand.name = name.to_owned();
        }
        for output in std::mem::take(&mut node.outputs) {
            if let Argument::AsTensor(token) = output {
                graph.tensor_values.0.remove(&token.name);
            }
        }
    }
}

/// Whether a node with effects is a check of `info`, which gives a token and nothing else.
fn is_check(node: &Node) -> bool {
    let operands: Vec<&Argument> = node.inputs.iter().map(|NamedArgument { arg, .. }| arg).collect();
    let known = matches!(
        operands[..],
        [Argument::AsTensor(_), Argument::AsOperator(name), Argument::AsTensor(_), Argument::AsString(_), ..]
            if name == CHECK
    );
    known && matches!(node.outputs[..], [Argument::AsTensor(_)] | [Argument::AsTensor(_), Argument::AsNone(_)])
}

fn keep<T>(list: &mut Vec<T>, kept: &[bool]) {
    let mut kept = kept.iter();
    list.retain(|_| kept.next().is_none_or(|kept| *kept));
}
