//! How much a program multiplies: two operations for each product and its sum, of the operators that are made of them.
//!
//! ```text
//! linear, mm, bmm, addmm, matmul   2 · elements of the result · length of a row of the first matrix
//! convolution                      2 · elements of the result · elements of a filter
//! attention                        2 · batch · heads · q_len · kv_len · (head_dim + head_dim_v), masked or not
//! ```
//! From the forms that the archive states. Deliberately absent: everything that is not a product of matrices.

use rapt::pt2::{Argument, Node, Program, Symbols};

/// The operations of a program's products for these symbols. A node with a size that the symbols do not give counts as none.
pub(super) fn flops(program: &Program, symbols: &Symbols) -> f64 {
    program.graph.nodes.iter().filter_map(|node| of_node(program, symbols, node)).sum()
}

fn of_node(program: &Program, symbols: &Symbols, node: &Node) -> Option<f64> {
    let (_, name) = node.target.split_once(".ops.")?;
    let sizes = |argument: &Argument| -> Option<Vec<f64>> {
        let Argument::Tensor(name) = argument else { return None };
        let meta = program.graph.tensors.get(name)?;
        meta.sizes.iter().map(|size| size.eval(symbols).ok().map(|size| size as f64)).collect()
    };
    let input = |names: &[&str]| {
        let found = node.inputs.iter().find(|input| names.contains(&input.name.as_str()));
        found.and_then(|input| sizes(&input.value))
    };
    let numel = |sizes: &[f64]| sizes.iter().product::<f64>();
    let out = sizes(node.outputs.first()?)?;
    Some(match name.split('.').nth(1)? {
        "linear" => 2.0 * numel(&out) * input(&["input"])?.last()?,
        "mm" | "bmm" | "matmul" | "mv" | "dot" => 2.0 * numel(&out) * input(&["self"])?.last()?,
        "addmm" => 2.0 * numel(&out) * input(&["mat1"])?.last()?,
        "baddbmm" => 2.0 * numel(&out) * input(&["batch1"])?.last()?,
        "grouped_mm_fallback" => 2.0 * numel(&out) * input(&["self", "input"])?.last()?,
        "conv1d" | "conv2d" | "conv3d" | "convolution" => {
            let filters = input(&["weight"])?;
            2.0 * numel(&out) * numel(filters.get(1..)?)
        }
        attention if attention.starts_with("scaled_dot_product") || attention.starts_with("_scaled_dot_product") => {
            let (q, k, v) = (input(&["query"])?, input(&["key"])?, input(&["value"])?);
            let rows = numel(q.get(..q.len().checked_sub(1)?)?);
            2.0 * rows * k.get(k.len().checked_sub(2)?)? * (q.last()? + v.last()?)
        }
        _ => return None,
    })
}
