//! A certificate: what was proven about one run, with the numbers that it rests on.
//!
//! ```text
//! in bounds    lo..hi, the bytes that a tensor's shape and strides reach, lie in the bytes of its storage
//! injective    an output names as many addresses as it has elements
//! disjoint     no output shares a byte with another operand
//! codes        of an operand that is quantized: format, granularity, bytes of codes and of scales
//! coverage     tasks · rows = batch · num_q_heads · q_len, and the items cut each task's rows and keys without gap or overlap
//! ```
//!
//! Every line is computed from the operands and the plan when the certificate is asked for; nothing is remembered. Where a
//! producer does not tell its storage, the span of shape and strides is the storage, and the certificate says `declared`.
//! Deliberately absent: a claim about values. That a kernel keeps to its cut is what the tests prove, not a certificate.

use std::fmt;

use crate::operands::{prove_disjoint, prove_injective};
use crate::thousands::thousands;
use crate::{CodesSpec, Device, Error, Extent, Operands, Plan, Result, Shape, TensorSpec, View, Work};

/// A tensor and the storage that it lies in. Bytes count from the tensor's first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InBounds {
    /// The tensor.
    pub tensor: &'static str,
    /// Its elements, at most `u128::MAX`; more than addresses where strides are 0.
    pub elements: u128,
    /// The bytes that shape and strides reach, `lo..hi`.
    pub bytes: (isize, isize),
    /// The bytes of its storage, `lo..hi`; `None` if the producer told nothing: declared, not proven.
    pub storage: Option<(isize, isize)>,
    /// What the address of every element is a multiple of.
    pub align_bytes: usize,
}

/// An output that names every address once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Injective {
    /// The output.
    pub tensor: &'static str,
    /// Its elements, and so its addresses.
    pub elements: u128,
    /// Steps of the search; 0: each stride steps past all that smaller ones reach.
    pub steps: usize,
}

/// An output and an operand without a byte in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Disjoint {
    /// The output.
    pub tensor: &'static str,
    /// The other operand.
    pub other: &'static str,
    /// Steps of the search; 0: the bytes that they reach lie apart.
    pub steps: usize,
}

/// Every row of out is written, and once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Coverage {
    /// Rows of out: `batch · num_q_heads · q_len`.
    pub rows: u128,
    /// Items of the plan.
    pub items: usize,
    /// The cut; `None` where nothing is attended, and every row is filled without one.
    pub work: Option<Work>,
    /// Partial results that are combined into one row.
    pub parts: usize,
}

/// An operand whose numbers are formed where its codes are loaded: no tensor of them is made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizedFact {
    /// The operand.
    pub tensor: &'static str,
    /// The format of its codes, which elements share a scale, and the bytes of both.
    pub codes: CodesSpec,
    /// Bytes of codes, each counted once.
    pub code_bytes: u128,
    /// Bytes of scales and zero points, each counted once.
    pub scale_bytes: u128,
    text: String,
}

/// Checked facts about one run. `Display` prints them a line each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Certificate {
    /// Every operand, inputs first.
    pub in_bounds: Vec<InBounds>,
    /// Every output.
    pub injective: Vec<Injective>,
    /// Every output with every other operand.
    pub disjoint: Vec<Disjoint>,
    /// Every operand that is quantized.
    pub quantized: Vec<QuantizedFact>,
    /// Every row of out.
    pub coverage: Coverage,
    /// Where all of them lie.
    pub device: Device,
}

fn elements(shape: &Shape) -> u128 {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |product: u128, &n| product.saturating_mul(n as u128)) }
}

fn in_bounds(tensor: &'static str, view: &View<'_>) -> Result<InBounds> {
    let (lo, hi) = view.reach_bytes();
    let (shape, strides) = (*view.shape(), *view.strides());
    let align_bytes = view.dtype().size_bytes().max(1);
    if lo != hi && !view.address().is_multiple_of(align_bytes) {
        return Err(Error::Unaligned { tensor, dtype: view.dtype(), align_bytes });
    }
    let storage = match view.extent() {
        Extent::Declared => None,
        Extent::Proven { address, len_bytes } => {
            let from = address as i128 - view.address() as i128;
            let to = from + len_bytes as i128;
            let clamp = |n: i128| isize::try_from(n).unwrap_or(if n < 0 { isize::MIN } else { isize::MAX });
            let (storage_lo, storage_hi) = (clamp(from), clamp(to));
            if lo != hi && ((lo as i128) < from || hi as i128 > to) {
                return Err(Error::OutOfExtent { tensor, shape, strides, lo, hi, storage_lo, storage_hi });
            }
            Some((storage_lo, storage_hi))
        }
    };
    Ok(InBounds { tensor, elements: elements(&shape), bytes: (lo, hi), storage, align_bytes })
}

impl QuantizedFact {
    fn new((tensor, numbers, codes): (&'static str, &TensorSpec<4>, &CodesSpec)) -> Self {
        let (code_bytes, scale_bytes) = (codes.code_bytes(numbers), codes.scale_bytes());
        QuantizedFact { tensor, codes: *codes, code_bytes, scale_bytes, text: codes.in_words(numbers) }
    }
}

impl Coverage {
    /// # Errors
    /// [`Error::NotAsPlanned`] if the plan's cut leaves a row or a key out, or takes one twice.
    fn check(plan: &Plan) -> Result<Self> {
        let spec = plan.spec();
        let [batch, heads, q_len, _] = spec.out.shape;
        let rows = elements(&Shape::from([batch, heads, q_len]));
        let Some(work) = plan.work() else {
            let is_empty = spec.kv_len() == 0 || spec.out.shape.contains(&0);
            let none = Coverage { rows, items: plan.items(), work: None, parts: 1 };
            return if is_empty { Ok(none) } else { Err(uncovered("the cut of its rows, which is not stated,")) };
        };
        let Work { tasks, rows: per_task, rows_per_item, keys_per_item } = work;
        if rows_per_item == 0 || keys_per_item == 0 {
            return Err(uncovered("the size of its items"));
        }
        if (tasks as u128).saturating_mul(per_task as u128) != rows {
            return Err(uncovered("the number of rows that its tasks write"));
        }
        // Runs of one length from 0 on leave no gap and take nothing twice: only their number can be wrong.
        let parts = if plan.num_splits() > 1 { spec.kv_len().div_ceil(keys_per_item) } else { 1 };
        let items =
            (tasks as u128).saturating_mul(per_task.div_ceil(rows_per_item) as u128).saturating_mul(parts as u128);
        if parts != plan.num_splits() {
            return Err(uncovered("the number of parts of its keys"));
        }
        if items != plan.items() as u128 {
            return Err(uncovered("the number of its items"));
        }
        Ok(Coverage { rows, items: plan.items(), work: Some(work), parts })
    }
}

fn uncovered(what: &'static str) -> Error {
    Error::NotAsPlanned { tensor: "plan", what }
}

impl Plan {
    /// Proves again, with numbers, what a run of this plan on `operands` rests on.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for operands of another spec, or a plan whose items do not write every row once: a defect of its
    /// backend. Every other fact is an invariant of [`Operands`] and is found to hold again.
    pub fn certificate(&self, operands: &Operands<'_>) -> Result<Certificate> {
        operands.expect(self.spec())?;
        let tensors = operands.tensors();
        let outputs =
            || [Some(("out", &tensors.out)), tensors.lse.as_ref().map(|lse| ("lse", lse))].into_iter().flatten();
        let seen: Vec<(&'static str, View<'_>)> = outputs().map(|(name, out)| (name, out.as_view())).collect();
        let mut certificate = Certificate {
            in_bounds: Vec::new(),
            injective: Vec::new(),
            disjoint: Vec::new(),
            quantized: self.spec().quantized().map(QuantizedFact::new).collect(),
            coverage: Coverage::check(self)?,
            device: self.spec().device,
        };
        for (name, view) in tensors.inputs().chain(seen.iter().map(|(name, view)| (*name, view))) {
            certificate.in_bounds.push(in_bounds(name, view)?);
        }
        for (at, (name, out)) in outputs().enumerate() {
            let steps = prove_injective(name, out)?;
            certificate.injective.push(Injective { tensor: name, elements: elements(out.shape()), steps });
            // Each pair of outputs once.
            for (other, view) in tensors.inputs().chain(seen[..at].iter().map(|(name, view)| (*name, view))) {
                let steps = prove_disjoint(name, out, other, view)?;
                certificate.disjoint.push(Disjoint { tensor: name, other, steps });
            }
        }
        Ok(certificate)
    }
}

impl Certificate {
    /// Whether the storage of every operand is proven, none declared.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.in_bounds.iter().all(|fact| fact.storage.is_some())
    }

    /// The facts in rows of a name and a text: what `explain` prints.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = Vec::new();
        for InBounds { tensor, elements, bytes: (lo, hi), storage, .. } in &self.in_bounds {
            let extent = match storage {
                Some((from, to)) => format!("of a storage of {from}..{to}: proven"),
                None => "of a storage that its producer does not tell: declared, not proven".to_owned(),
            };
            rows.push((
                "in bounds",
                format!("{tensor}: {} elements in bytes {lo}..{hi} {extent}", thousands(*elements)),
            ));
        }
        for Injective { tensor, elements, steps } in &self.injective {
            let n = thousands(*elements);
            rows.push(("injective", format!("{tensor}: {n} elements at {n} addresses ({steps} steps)")));
        }
        for Injective { tensor, .. } in &self.injective {
            let others: Vec<String> = self
                .disjoint
                .iter()
                .filter(|fact| fact.tensor == *tensor)
                .map(|fact| format!("{} ({} steps)", fact.other, fact.steps))
                .collect();
            rows.push(("disjoint", format!("{tensor} shares no byte with {}", others.join(", "))));
        }
        for fact in &self.quantized {
            rows.push(("codes", format!("{}: {}", fact.tensor, fact.text)));
        }
        let Coverage { rows: all, items, work, parts } = self.coverage;
        let text = match work {
            None => format!("{} rows, filled: nothing is attended", thousands(all)),
            Some(Work { tasks, rows, rows_per_item, keys_per_item }) => {
                let parts = if parts > 1 { format!(", {parts} parts of {keys_per_item} keys") } else { String::new() };
                format!(
                    "{} rows = {} tasks × {} rows, each written once; {} items of {rows_per_item} rows{parts}",
                    thousands(all),
                    thousands(tasks),
                    thousands(rows),
                    thousands(items),
                )
            }
        };
        rows.push(("coverage", text));
        rows
    }
}

impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, text) in self.rows() {
            writeln!(f, "{name:9}  {text}")?;
        }
        Ok(())
    }
}
