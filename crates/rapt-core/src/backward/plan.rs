//! What will run for the gradients of a request.

use super::BackwardSpec;
use crate::{Explanation, KernelKey, LaunchPlan, Plan, Result};

/// What will run for a [`BackwardSpec`]. Made by a backend, never changed.
///
/// Its numbers and its explanation are those of a [`Plan`], whose spec is the forward one and whose direction is backward: no forward run takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct BackwardPlan {
    spec: BackwardSpec,
    plan: Plan,
}

impl BackwardPlan {
    /// A plan of `launch_plan`, which was decided for `spec`; backends only.
    #[must_use]
    pub fn new<L: LaunchPlan + PartialEq>(spec: BackwardSpec, key: KernelKey, launch_plan: L) -> Self {
        let plan = Plan::new(spec.forward().clone(), key, launch_plan);
        BackwardPlan { spec, plan }
    }

    /// The request.
    #[must_use]
    pub fn spec(&self) -> &BackwardSpec {
        &self.spec
    }

    /// Its numbers.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the backend whose type `L` is will launch.
    ///
    /// # Errors
    /// As [`Plan::launch_plan`].
    pub fn launch_plan<L: LaunchPlan>(&self) -> Result<&L> {
        self.plan.launch_plan()
    }

    /// Scratch memory that the run needs.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    /// The plan in words and numbers.
    #[must_use]
    pub fn explain(&self) -> Explanation<'_> {
        self.plan.explain()
    }
}
