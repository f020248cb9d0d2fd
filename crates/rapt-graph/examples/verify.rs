//! Verifies archives: `cargo run -p rapt-graph --example verify -- m.pt2 ...`.
//!
//! Operators that are not served are taken out: their results become inputs of the stated form, so that all else is verified.

use rapt_graph::{Error, Graph};
use rapt_pt2::{Archive, InputSpec, Program};

fn main() {
    for path in std::env::args().skip(1) {
        let archive = match Archive::open(&path) {
            Ok(archive) => archive,
            Err(error) => {
                println!("{path}: {error}");
                continue;
            }
        };
        let mut program = archive.program().clone();
        let graph = Graph::new(&program).or_else(|error| {
            let Error::MissingOps { ops } = error else { return Err(error) };
            println!("{path}: {} operators are taken out", ops.len());
            for (target, ..) in &ops {
                take_out(&mut program, target);
            }
            Graph::new(&program)
        });
        match graph.and_then(|graph| graph.verify().map(|symbols| (graph.nodes.len(), symbols))) {
            Ok((nodes, symbols)) => println!("{path}: {nodes} nodes agree at {symbols:?}"),
            Err(error) => println!("{path}: FAILS: {error}"),
        }
    }
}

fn take_out(program: &mut Program, target: &str) {
    let graph = &mut program.graph;
    let (gone, kept): (Vec<_>, Vec<_>) = graph.nodes.drain(..).partition(|node| node.target == target);
    graph.nodes = kept;
    for argument in gone.into_iter().flat_map(|node| node.outputs) {
        let arguments = match argument {
            rapt_pt2::Argument::Tensors(names) => names.into_iter().map(rapt_pt2::Argument::Tensor).collect(),
            other => vec![other],
        };
        for argument in arguments {
            program.signature.inputs.push(InputSpec::User(argument.clone()));
            graph.inputs.push(argument);
        }
    }
}
