//! Who may depend on whom: `rapt-core ← { backends, rapt-shader ← { rapt-wgpu, rapt-metal }, rapt-pt2 ← rapt-graph, rapt-bridge } ← rapt-attention ← {bindings, cli}`.

use super::Finding;
use crate::metadata::{Kind, Workspace};

const CORE: &str = "rapt-core";
const FACADE: &str = "rapt-attention";
/// Stands alone: neither core nor any other crate of Rapt.
const LAYOUT: &str = "rapt-layout";
const TESTKIT: &str = "rapt-testkit";
/// What lies between core and façade. The reference is not a backend, but sits at the same height.
const MIDDLE: [&str; 11] = [
    "rapt-reference",
    "rapt-layout",
    "rapt-quant",
    "rapt-cpu",
    "rapt-cuda",
    BRIDGE,
    SHADER,
    WGPU,
    METAL,
    READER,
    GRAPH,
];
/// How a library uses a device that another one has.
const BRIDGE: &str = "rapt-bridge";
/// Texts of kernels, and the backends that have devices for them.
const SHADER: &str = "rapt-shader";
const WGPU: &str = "rapt-wgpu";
const METAL: &str = "rapt-metal";
/// Reads the programs that the graph is made of.
const READER: &str = "rapt-pt2";
const GRAPH: &str = "rapt-graph";
/// What only converts at the edge, or shows how the façade is used.
const EDGES: [&str; 5] = ["rapt-python", "rapt-python-vulkan", "rapt-c", "rapt-cli", "rapt-sentences"];
/// Runs where there are neither threads nor drivers, which the façade has: it takes the kernels themselves.
const WEB: &str = "rapt-web";
const OF_WEB: [&str; 4] = [CORE, "rapt-cpu", "rapt-reference", SHADER];
/// Foreign crates that speak Python or DLPack: bindings only.
const OF_BINDINGS: [&str; 4] = ["pyo3", "numpy", "dlpark", "dlpack"];

pub(super) fn check(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in workspace.members() {
        for (to, kind) in &package.declared {
            let refusal = refused(&package.name, to, *kind);
            findings.extend(refusal.map(|why| Finding::new(package.name.clone(), format!("depends on {to}: {why}"))));
        }
    }
    findings
}

/// Why `from` may not depend on `to`, if it may not.
fn refused(from: &str, to: &str, kind: Kind) -> Option<&'static str> {
    if OF_BINDINGS.iter().any(|name| to == *name || to.starts_with(&format!("{name}-"))) {
        return (!["rapt-python", "rapt-python-vulkan", "rapt-c"].contains(&from))
            .then_some("only bindings know Python and DLPack");
    }
    if !to.starts_with("rapt-") {
        return None;
    }
    if to == TESTKIT {
        // The command line's self-test and xtask's tables need no testkit either: it holds generators for tests.
        return (kind != Kind::Dev).then_some("the testkit is a dev-dependency only");
    }
    if kind == Kind::Dev || [TESTKIT, "rapt-fuzz", "xtask"].contains(&from) {
        // Tests may look across: every backend is judged by the reference.
        return None;
    }
    match from {
        CORE => Some("core depends on no crate of Rapt"),
        LAYOUT => Some("the layout algebra depends on no crate of Rapt"),
        GRAPH if to == READER => None,
        WGPU | METAL if to == SHADER => None,
        _ if MIDDLE.contains(&from) => (to != CORE).then_some("backends see core only, never each other"),
        FACADE => (to != CORE && !MIDDLE.contains(&to)).then_some("the façade stands below bindings and command line"),
        // The package for Python has the command `rapt` too, and it is the same program.
        "rapt-python" if to == "rapt-cli" => None,
        WEB => (!OF_WEB.contains(&to)).then_some("browsers have no threads and no drivers"),
        // They reach the backends through the façade, which alone chooses one.
        _ if EDGES.contains(&from) => {
            (![CORE, FACADE].contains(&to)).then_some("bindings go through rapt-attention, the one place that chooses")
        }
        _ => Some("this crate has no place in the rule: give it one in xtask/src/tidy/dependencies.rs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_fires() {
        for (from, to, kind) in [
            ("rapt-core", "rapt-cpu", Kind::Normal),
            ("rapt-cpu", "rapt-reference", Kind::Normal),
            ("rapt-cpu", "rapt-attention", Kind::Normal),
            ("rapt-cpu", "rapt-cuda", Kind::Build),
            ("rapt-attention", "rapt-cli", Kind::Normal),
            ("rapt-attention", "rapt-testkit", Kind::Normal),
            ("rapt-cli", "rapt-testkit", Kind::Build),
            ("rapt-python", "rapt-cpu", Kind::Normal),
            ("rapt-cli", "rapt-reference", Kind::Normal),
            ("rapt-layout", "rapt-core", Kind::Normal),
            ("rapt-pt2", "rapt-graph", Kind::Normal),
            ("rapt-graph", "rapt-cpu", Kind::Normal),
            ("rapt-cpu", "rapt-graph", Kind::Normal),
            ("rapt-shader", "rapt-wgpu", Kind::Normal),
            ("rapt-wgpu", "rapt-cuda", Kind::Normal),
            ("rapt-metal", "rapt-wgpu", Kind::Normal),
            ("rapt-python", "rapt-metal", Kind::Normal),
            ("rapt-bridge", "rapt-wgpu", Kind::Normal),
            ("rapt-python-vulkan", "rapt-wgpu", Kind::Normal),
            ("rapt-python-vulkan", "rapt-python", Kind::Normal),
            ("rapt-cuda", "rapt-shader", Kind::Normal),
            ("rapt-python", "rapt-graph", Kind::Normal),
            ("rapt-web", "rapt-attention", Kind::Normal),
            ("rapt-web", "rapt-wgpu", Kind::Normal),
            ("rapt-surprise", "rapt-core", Kind::Normal),
            ("rapt-core", "pyo3", Kind::Normal),
            ("rapt-cli", "pyo3-ffi", Kind::Normal),
            ("rapt-cpu", "numpy", Kind::Dev),
            ("rapt-cli", "rapt-fuzz", Kind::Normal),
            ("rapt-cli", "rapt-python", Kind::Normal),
            ("rapt-c", "rapt-cli", Kind::Normal),
            ("rapt-attention", "rapt-fuzz", Kind::Normal),
        ] {
            assert!(refused(from, to, kind).is_some(), "{from} -> {to} {kind:?}");
        }
    }

    #[test]
    fn what_the_design_allows_passes() {
        for (from, to, kind) in [
            ("rapt-cpu", "rapt-core", Kind::Normal),
            ("rapt-cpu", "rapt-reference", Kind::Dev),
            ("rapt-cpu", "rapt-testkit", Kind::Dev),
            ("rapt-attention", "rapt-reference", Kind::Normal),
            ("rapt-attention", "rapt-cpu", Kind::Normal),
            ("rapt-attention", "rapt-layout", Kind::Normal),
            ("rapt-graph", "rapt-pt2", Kind::Normal),
            ("rapt-shader", "rapt-core", Kind::Normal),
            ("rapt-metal", "rapt-shader", Kind::Normal),
            ("rapt-wgpu", "rapt-shader", Kind::Normal),
            ("rapt-bridge", "rapt-core", Kind::Normal),
            ("rapt-attention", "rapt-bridge", Kind::Normal),
            ("rapt-python-vulkan", "rapt-attention", Kind::Normal),
            ("rapt-python-vulkan", "pyo3", Kind::Normal),
            ("rapt-pt2", "rapt-core", Kind::Normal),
            ("rapt-attention", "rapt-graph", Kind::Normal),
            ("rapt-attention", "rapt-pt2", Kind::Normal),
            ("rapt-python", "rapt-attention", Kind::Normal),
            ("rapt-python", "rapt-core", Kind::Normal),
            ("rapt-python", "pyo3", Kind::Normal),
            ("rapt-python", "rapt-cli", Kind::Normal),
            ("rapt-web", "rapt-cpu", Kind::Normal),
            ("rapt-web", "rapt-shader", Kind::Normal),
            ("rapt-testkit", "rapt-reference", Kind::Normal),
            ("rapt-core", "half", Kind::Normal),
            ("rapt-fuzz", "rapt-attention", Kind::Normal),
        ] {
            assert_eq!(refused(from, to, kind), None, "{from} -> {to} {kind:?}");
        }
    }
}
