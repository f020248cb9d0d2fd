//! What a plan does, in words.

use std::collections::BTreeMap;

use rapt_pt2::StorageId;

use super::place::Buffer;
use super::product::Weights;
use super::{Kernel, Plan};

impl Plan {
    /// Rows of name and text: sizes, memory, and how often each kind of step occurs.
    pub(in crate::model) fn rows(&self, names: &dyn Fn(usize) -> String) -> Vec<(String, String)> {
        let mut rows: Vec<(String, String)> = Vec::new();
        let sizes: Vec<String> = self.binding.symbols.iter().map(|(name, n)| format!("{name} = {n}")).collect();
        let sizes = if sizes.is_empty() { "fixed".to_owned() } else { sizes.join(", ") };
        rows.push(("plan for sizes".into(), sizes));
        rows.push(("threads".into(), self.threads.to_string()));
        rows.push(("arena".into(), format!("{} bytes", self.arena_bytes)));
        rows.push(("scratch".into(), format!("{} bytes for each thread", self.scratch_bytes)));
        rows.push(("constants folded".into(), format!("{} bytes", self.constant_bytes())));
        let fused = self.steps.iter().filter(|step| step.nodes > 1);
        let nodes: usize = fused.clone().map(|step| step.nodes).sum();
        rows.push(("fused".into(), format!("{nodes} nodes in {} steps", fused.count())));
        let (direct, all) =
            (self.direct.iter().filter(|direct| **direct).count(), self.results.iter().flatten().count());
        rows.push(("results".into(), format!("{direct} of {all} made where they go, the others copied")));
        rows.push(("steps".into(), self.steps.len().to_string()));
        let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
        for step in &self.steps {
            *kinds.entry(step.kind(names)).or_default() += 1;
        }
        rows.extend(kinds.into_iter().map(|(kind, count)| (format!("  {kind}"), count.to_string())));
        rows
    }

    fn constant_bytes(&self) -> usize {
        let bytes = self.buffers.iter().map(|buffer| match buffer {
            Buffer::Constant(memory) => memory.len_bytes(),
            _ => 0,
        });
        bytes.sum()
    }

    /// The bytes of arena, scratch memory, constants, and packed matrices that no other plan has.
    pub(in crate::model) fn memory_bytes(&self) -> usize {
        self.arena_bytes + self.threads * self.scratch_bytes + self.constant_bytes() + self.own_packed_bytes
    }

    /// Whether a step is evaluated by its definition, on copies of its operands.
    pub(in crate::model) fn has_definitions(&self) -> bool {
        self.steps.iter().any(|step| matches!(step.kernel, Kernel::Node { .. }))
    }

    /// The storages that the program writes, of which a session has copies.
    pub(in crate::model) fn states(&self) -> impl Iterator<Item = StorageId> {
        self.buffers.iter().filter_map(|buffer| match buffer {
            Buffer::State(id) => Some(*id),
            _ => None,
        })
    }
}

impl super::Step {
    /// Which kernel, in a few words. `names` gives the operator of a node.
    fn kind(&self, names: &dyn Fn(usize) -> String) -> String {
        match &self.kernel {
            Kernel::Chain { .. } if self.nodes > 1 => "pointwise, fused".into(),
            Kernel::Chain { .. } => "pointwise or copy".into(),
            Kernel::Product { head, after, .. } => {
                format!(
                    "product, {}{}",
                    packed(&head.weights),
                    if after.is_some() { ", with what follows" } else { "" }
                )
            }
            Kernel::Batch(_) => "products of a batch".into(),
            Kernel::Attention { plan, .. } => {
                let spec = plan.spec();
                let causal = spec.causal.map_or(String::new(), |causal| format!(", causal {}", causal.name()));
                let side = |name: &str, n: Option<usize>| n.map_or(String::new(), |n| format!(", {n} {name}"));
                let window = side("to the left", spec.window.left) + &side("to the right", spec.window.right);
                let mask = if spec.mask.is_some() { ", dense mask" } else { "" };
                let grouped = if spec.q.shape[1] > spec.k.shape[1] { ", grouped" } else { "" };
                format!("attention, {}{causal}{window}{mask}{grouped}", plan.key().kernel.name())
            }
            Kernel::Rows { rows, .. } => {
                let name = format!("{:?}", rows.function());
                format!("rows, {}", name.split([' ', '{']).next().unwrap_or("function"))
            }
            Kernel::Conv(conv) => format!("convolution, {}", conv.weights.first().map_or("none", packed)),
            Kernel::Experts(experts) => {
                format!("products of groups, {}", experts.weights.first().map_or("none", packed))
            }
            Kernel::Move(_) => "moved by index".into(),
            Kernel::Strided { kernel, .. } => kernel.name().into(),
            Kernel::Node { .. } => format!("by definition, {}", names(self.node)),
        }
    }
}

fn packed(weights: &Weights) -> &'static str {
    match weights {
        Weights::Packed(_) => "packed weights",
        Weights::EachRun { .. } => "weights packed in each run",
        Weights::InCache(_) => "weights packed in the cache in each run",
    }
}
