//! What a run launches on copies of its tensors: the plan of the same request where they are copied to.

use crate::{Cost, KernelKey, Launch, LaunchPlan, Plan, PlanPart, Spec, Work};

/// A launch plan on copies, of a backend whose kernels cannot reach the tensors where they lie. `bytes_copied` of its cost counts both ways.
#[derive(Clone, Debug, PartialEq)]
pub struct Copied {
    on_copies: Plan,
    place: String,
    cost: Cost,
}

impl Copied {
    /// A plan for `spec` that copies `bytes` to `place` and back, and runs `on_copies` there.
    #[must_use]
    pub fn plan(spec: Spec, on_copies: Plan, place: String, bytes: usize) -> Plan {
        let (key, cost) = (*on_copies.key(), Cost { bytes_copied: bytes, ..*on_copies.cost() });
        Plan::new(spec, key, Copied { on_copies, place, cost })
    }

    /// The plan of the copies.
    #[must_use]
    pub fn on_copies(&self) -> &Plan {
        &self.on_copies
    }
}

impl LaunchPlan for Copied {
    fn block_m(&self) -> usize {
        self.on_copies.block_m()
    }
    fn block_n(&self) -> usize {
        self.on_copies.block_n()
    }
    fn num_splits(&self) -> usize {
        self.on_copies.num_splits()
    }
    fn items(&self) -> usize {
        self.on_copies.items()
    }
    fn threads(&self) -> usize {
        self.on_copies.threads()
    }
    fn workspace_bytes(&self) -> usize {
        self.on_copies.workspace_bytes()
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        self.on_copies.kv_in_place()
    }
    fn work(&self) -> Option<Work> {
        self.on_copies.work()
    }
    fn launch(&self) -> Option<Launch> {
        self.on_copies.launch()
    }
    fn parts(&self, _: &Spec) -> Vec<PlanPart> {
        self.on_copies.parts()
    }
    fn why(&self, _: &Spec, _: &KernelKey) -> String {
        format!("{}; tensors of the host are copied to {} and back", self.on_copies.why(), self.place)
    }
    fn why_not_faster(&self, _: &Spec, _: &KernelKey) -> String {
        self.on_copies.why_not_faster()
    }
}
