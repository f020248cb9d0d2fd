//! Verifies archives: `cargo run -p rapt-graph --example verify -- m.pt2 ...`.

use rapt_graph::Graph;
use rapt_pt2::Archive;

fn main() {
    let mut failed = 0;
    for path in std::env::args().skip(1) {
        match verify(&path) {
            Ok(text) => println!("{path}: {text}"),
            Err(error) => {
                failed += 1;
                println!("{path}: {error}");
            }
        }
    }
    std::process::exit(failed.min(1));
}

fn verify(path: &str) -> Result<String, Box<dyn std::error::Error>> {
    let archive = Archive::open(path)?;
    let graph = Graph::new(archive.program())?;
    let bindings = graph.verify()?;
    Ok(format!("{} nodes agree at {bindings:?}", graph.nodes.len()))
}
