//! Plans: the steps that compute a program for one binding of its symbols, and where every value lies.
//!
//! ```text
//! Graph + Binding ──► what is needed ──► constants folded ──► groups, kernels ──► one arena by liveness ──► Plan
//! ```
//! - What depends on constants alone is computed once, by the reference interpreter.
//! - Pointwise operations of one shape become one loop (`group`); those that follow a product run on its tiles while they are in
//!   the cache. Each result of a node is rounded to its dtype, fused or not.
//! - Views are forms over buffers and cost nothing. Results lie as the program says; the last step that makes one writes it where the
//!   caller wants it, if it is to lie so there.
//! - A cache that the program returns as the new content of a buffer is written in place.
//! - What has no kernel is evaluated by the interpreter's definition ([`Kernel::Node`]).
//!
//! Deliberately absent: pointers (`run` has them), and any rounding or promotion of its own.

mod along;
mod arena;
mod arrange;
mod attention;
mod batches;
mod build;
mod conv;
mod einsum;
mod experts;
mod fixed;
mod fold;
mod group;
mod images;
mod lower;
mod mask;
mod moments;
mod moves;
mod norms;
mod pad;
mod place;
mod product;
mod report;
mod rows;
mod strided;

use std::sync::Arc;

use rapt_core::{Arch, Plan as AttentionPlan};
use rapt_cpu::pointwise::Loop;
use rapt_cpu::rows::RowKernel;
use rapt_graph::{Binding, ValueId};

pub(super) use conv::Windows;
pub(super) use experts::Experts;
pub(super) use moves::Move;
pub(super) use place::{Buffer, Place};
pub(super) use product::{Batch, Head, InCache, Weights};

use super::host::Host;
use super::{Inner, ModelError};

/// What one step computes.
#[derive(Debug)]
pub(super) enum Kernel {
    /// A loop over tensors of one shape; of each operand the place.
    Chain {
        /// The loop.
        each: Box<Loop>,
        /// What it reads and writes.
        operands: Vec<Place>,
    },
    /// A product, whose sums go to a place or through a loop of two dimensions.
    Product {
        /// The product.
        head: Box<Head>,
        /// Where its rounded sums go, if nothing follows.
        out: Option<Place>,
        /// What follows: the loop, and its operands after the sums.
        after: Option<(Box<Loop>, Vec<Place>)>,
    },
    /// The products of a batch.
    Batch(Box<Batch>),
    /// Attention: q, k, v, mask, out, lse.
    Attention {
        /// What runs.
        plan: Arc<AttentionPlan>,
        /// The operands.
        places: Box<[Option<Place>; 6]>,
    },
    /// A function of rows: its operands, then the result.
    Rows {
        /// The kernel.
        rows: RowKernel,
        /// x, weight, bias, out.
        places: Box<[Option<Place>; 4]>,
    },
    /// A convolution: windows as rows, then a product for each image and group.
    Conv(Box<Windows>),
    /// Products of groups of rows, each with a matrix of its own.
    Experts(Box<Experts>),
    /// Elements moved by index.
    Move(Box<Move>),
    /// What takes tensors as they lie: reductions, order, windows.
    Strided {
        /// The kernel.
        kernel: Box<dyn rapt_cpu::strided::Kernel>,
        /// Its operands.
        operands: Vec<Place>,
    },
    /// A node, evaluated by its definition.
    Node {
        /// What it reads: each value with its place.
        reads: Vec<(ValueId, Place)>,
        /// Of each result that is a tensor of its own, or is written: its place, and for the latter the value.
        writes: Vec<Option<Place>>,
    },
}

/// One step.
#[derive(Debug)]
pub(super) struct Step {
    /// The node that it computes, or the first of them.
    pub(super) node: usize,
    /// How many nodes it computes.
    pub(super) nodes: usize,
    /// What it computes.
    pub(super) kernel: Kernel,
    /// The buffers that it reads or writes.
    pub(super) uses: Vec<usize>,
    /// What it writes that outlasts the run: put back where the run fails.
    pub(super) keeps: Vec<Place>,
    /// Whether it may fail: an index out of range, a division by zero, an assertion.
    pub(super) may_fail: bool,
}

/// Where a mutation that the signature declares goes: from, to.
pub(super) type Mutation = (Place, Place);

/// A program for one binding.
#[derive(Debug)]
pub(super) struct Plan {
    /// The binding.
    pub(super) binding: Arc<Binding>,
    /// The steps, in order.
    pub(super) steps: Vec<Step>,
    /// The buffers.
    pub(super) buffers: Vec<Buffer>,
    /// The bytes of the arena.
    pub(super) arena_bytes: usize,
    /// The scratch memory of one thread.
    pub(super) scratch_bytes: usize,
    /// The bytes of the constants that are this plan's own.
    pub(super) own_bytes: usize,
    /// Of these, packed matrices.
    own_packed_bytes: usize,
    /// The threads it was made for.
    pub(super) threads: usize,
    /// Whether a step has work for several of them.
    pub(super) is_shared: bool,
    /// The instruction set it was made for.
    pub(super) arch: Arch,
    /// Of each result that is a tensor: its place.
    pub(super) results: Vec<Option<Place>>,
    /// Of each result, whether it may be made where the caller wants it.
    pub(super) direct: Vec<bool>,
    /// What is copied at the end.
    pub(super) mutations: Vec<Mutation>,
    /// The caller's inputs that are written.
    pub(super) written_inputs: Vec<usize>,
}

impl Plan {
    /// The plan of a binding for the threads of a host, which pack the weights.
    ///
    /// # Errors
    /// [`ModelError`] where memory does not suffice.
    pub(super) fn new(
        inner: &Inner,
        binding: &Arc<Binding>,
        written: &[ValueId],
        host: Host<'_>,
    ) -> Result<Plan, ModelError> {
        build::plan(inner, binding, written, host)
    }
}
