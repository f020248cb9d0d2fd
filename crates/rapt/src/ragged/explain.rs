//! What would run for sequences of different lengths: which kernel serves which of them.
//!
//! ```text
//! host   a plan for each sequence; those of one kernel with one set of tiles are a part
//! GPU    one plan for all, in which the device tells them apart by lengths that the host has not seen: `Plan::parts`
//! ```

use std::fmt;
use std::sync::Arc;

use rapt_core::{Device, Kernel, Options, Plan, Result};
use rapt_cpu::Batch;
use rapt_quant::QuantError;

use super::cache::KvCacheTensors;
use super::varlen::VarlenTensors;
use crate::Engine;

/// What would run for sequences of different lengths. `Display` prints a table of each part.
#[derive(Clone, Debug)]
pub struct RaggedPlan {
    parts: Vec<RaggedPart>,
    workspace_bytes: usize,
}

/// Sequences that one kernel serves, or on a GPU one plan.
#[derive(Clone, Debug)]
pub struct RaggedPart {
    sequences: Vec<usize>,
    plan: Arc<Plan>,
}

impl RaggedPart {
    /// Which sequences, by their place in the call, in order.
    #[must_use]
    pub fn sequences(&self) -> &[usize] {
        &self.sequences
    }

    /// The plan of that of them which has the most work; on a GPU that of all.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The kernels that attend, each once.
    fn kernels(&self) -> Vec<Kernel> {
        let parts = self.plan.parts();
        if parts.is_empty() {
            vec![self.plan.key().kernel]
        } else {
            parts.iter().filter_map(|part| part.kernel).collect()
        }
    }
}

/// Whether sequences of two plans are served alike.
fn alike(a: &Plan, b: &Plan) -> bool {
    (a.key(), a.block_m(), a.block_n()) == (b.key(), b.block_m(), b.block_n())
}

impl RaggedPlan {
    /// Of the plans of each sequence, which share `threads`.
    ///
    /// # Errors
    /// As [`Batch::new`].
    fn on_host(plans: Vec<Arc<Plan>>, threads: usize) -> Result<Self> {
        let workspace_bytes = Batch::new(&plans, threads)?.workspace_bytes();
        let mut parts: Vec<RaggedPart> = Vec::new();
        for (sequence, plan) in plans.into_iter().enumerate() {
            match parts.iter_mut().find(|part| alike(&part.plan, &plan)) {
                Some(part) => {
                    part.sequences.push(sequence);
                    if plan.cost().flops > part.plan.cost().flops {
                        part.plan = plan;
                    }
                }
                None => parts.push(RaggedPart { sequences: vec![sequence], plan }),
            }
        }
        Ok(RaggedPlan { parts, workspace_bytes })
    }

    /// Of one plan for so many sequences.
    fn on_device(plan: Arc<Plan>, sequences: usize) -> Self {
        let workspace_bytes = plan.workspace_bytes();
        RaggedPlan { parts: vec![RaggedPart { sequences: (0..sequences).collect(), plan }], workspace_bytes }
    }

    /// Which sequences are served alike, in the order of the first of each.
    #[must_use]
    pub fn parts(&self) -> &[RaggedPart] {
        &self.parts
    }

    /// How many sequences there are.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.parts.iter().map(|part| part.sequences.len()).sum()
    }

    /// The kernels that attend, each once.
    #[must_use]
    pub fn kernels(&self) -> Vec<Kernel> {
        let mut all: Vec<Kernel> = Vec::new();
        for kernel in self.parts.iter().flat_map(RaggedPart::kernels) {
            if !all.contains(&kernel) {
                all.push(kernel);
            }
        }
        all
    }

    /// Scratch memory of the whole call.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }
}

/// Runs of neighbours that are written out; of the others only how many there are.
const MOST_RUNS: usize = 8;

/// `0 to 2, 5`.
fn in_runs(sequences: &[usize]) -> String {
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for &n in sequences {
        match runs.last_mut() {
            Some([_, last]) if *last + 1 == n => *last = n,
            _ => runs.push([n, n]),
        }
    }
    let words = |&[first, last]: &[usize; 2]| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first} to {last}"),
    };
    let written: Vec<String> = runs.iter().take(MOST_RUNS).map(words).collect();
    let beyond: usize = runs.iter().skip(MOST_RUNS).map(|[first, last]| last - first + 1).sum();
    let rest = if beyond > 0 { format!(" and {beyond} more") } else { String::new() };
    written.join(", ") + &rest
}

impl fmt::Display for RaggedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.sequences();
        writeln!(f, "sequences        {all}")?;
        writeln!(f, "workspace_bytes  {}", self.workspace_bytes)?;
        for part in &self.parts {
            let kernels: Vec<&str> = part.kernels().into_iter().map(Kernel::name).collect();
            let (kernels, own) = (kernels.join(" and "), part.sequences.len());
            match part.plan.spec().device {
                Device::Cpu => {
                    writeln!(
                        f,
                        "\n{kernels} serves {own} of {all} sequences: {}. That with the most work:",
                        in_runs(&part.sequences)
                    )?;
                }
                _ => writeln!(f, "\n{kernels} serve all sequences, as the device finds their lengths:")?,
            }
            part.plan.explain().fmt(f)?;
        }
        Ok(())
    }
}

impl Engine {
    /// What [`varlen_attention`](Engine::varlen_attention) would run on so many threads, or on a GPU what
    /// [`plan_varlen`](Engine::plan_varlen) plans. Nothing is computed or written.
    ///
    /// # Errors
    /// As those functions.
    pub fn explain_varlen(&self, tensors: VarlenTensors<'_>, options: &Options, threads: usize) -> Result<RaggedPlan> {
        if let Device::Cuda(_) = tensors.q.device() {
            let plan = self.plan_varlen(&tensors, options)?;
            let sequences = tensors.cu_seqlens_q.shape()[0] - 1;
            return Ok(RaggedPlan::on_device(plan, sequences));
        }
        RaggedPlan::on_host(self.plan_each(&tensors.cut(options)?.specs, threads)?, threads)
    }

    /// What [`attention_with_kvcache`](Engine::attention_with_kvcache) would run on so many threads, or on a GPU what
    /// [`plan_with_kvcache`](Engine::plan_with_kvcache) plans. Nothing is computed or written.
    ///
    /// # Errors
    /// As those functions.
    pub fn explain_with_kvcache(
        &self,
        tensors: KvCacheTensors<'_>,
        options: &Options,
        threads: usize,
    ) -> Result<RaggedPlan, QuantError> {
        if let Device::Cuda(_) = tensors.q.device() {
            let plan = self.plan_with_kvcache(&tensors, options)?;
            return Ok(RaggedPlan::on_device(plan, tensors.q.shape()[0]));
        }
        let prepared = self.prepare(tensors, options, threads)?;
        Ok(RaggedPlan::on_host(prepared.plans, threads)?)
    }
}

#[cfg(test)]
mod tests {
    use super::in_runs;

    #[test]
    fn neighbours_are_written_as_runs() {
        for (sequences, text) in [
            (vec![], ""),
            (vec![3], "3"),
            (vec![0, 1], "0, 1"),
            (vec![0, 1, 2, 5, 7, 8, 9], "0 to 2, 5, 7 to 9"),
            ((0..40).step_by(2).collect(), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ] {
            assert_eq!(in_runs(&sequences), text);
        }
    }
}
