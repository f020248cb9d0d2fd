//! Masks of attention as rules of position and padding, where that is proven.
//!
//! ```text
//! constant                      every element is looked at: all, causal, a window; otherwise it stays dense
//! constant & what is computed   the constant becomes a rule, the other operand is read as it is, with strides of 0
//! where(boolean, 0, −∞)         the boolean, as above: so PyTorch's own decomposition of attention has it
//! ```
//! The second is how transformers makes its masks: positions, which the sizes determine, and the padding that the caller gives as
//! `[batch, kv_len]`. Nothing is assumed of the padding's values. Other masks that are added stay dense, unless they are constant.

use rapt_core::{Causal, DType, Window};
use rapt_graph::ops::{Attention, Binary, Op, Operand, Pointwise, Target};
use rapt_graph::{Fact, Scalar, Shapes, ValueId};

use super::super::memory;
use super::build::Builder;
use super::place::{Buffer, Place};

/// Which keys each query sees, by position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) causal: Option<Causal>,
    pub(super) window: Window,
}

/// A mask as the kernels take it.
#[derive(Clone, Debug, Default)]
pub(super) struct Mask {
    pub(super) rule: Rule,
    /// What else decides.
    pub(super) dense: Option<Place>,
    /// What is not read in this form: the mask, or a part of it.
    pub(super) unread: Vec<ValueId>,
}

/// A mask that adds 0 where a boolean is true, and −∞ elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Condition {
    /// The node.
    n: usize,
    /// The boolean.
    pub(super) seen: ValueId,
    /// What is added where it is true, and elsewhere: still to be proven.
    added: [Operand; 2],
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// The rule that a mask of `q_len` rows and `kv_len` columns is, if it is one: proven for every element. `seen` has one or more
/// such masks.
fn rule(seen: &[bool], [q_len, kv_len]: [usize; 2]) -> Option<Rule> {
    let all = seen.iter().all(|&seen| seen);
    if all || q_len == 0 || kv_len == 0 {
        return all.then(Rule::default);
    }
    let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    // How far from a query the first and the last key lie that it sees, where a key lies beyond.
    let (mut first, mut last) = (None, None);
    for (i, row) in seen.chunks_exact(kv_len).take(q_len).enumerate() {
        let least = row.iter().position(|&seen| seen).filter(|&j| j > 0);
        let most = row.iter().rposition(|&seen| seen).filter(|&j| j + 1 < kv_len);
        first = first.or(least.map(|j| signed(j) - signed(i)));
        last = last.or(most.map(|j| signed(j) - signed(i)));
    }
    let across = signed(kv_len) - signed(q_len);
    let (causal, diagonal, right) = match last {
        Some(0) => (Some(Causal::TopLeft), 0, None),
        Some(last) if last == across => (Some(Causal::BottomRight), across, None),
        Some(last) => (None, 0, Some(usize::try_from(last).ok()?)),
        None => (None, 0, None),
    };
    let left = first.map(|first| usize::try_from(diagonal - first)).transpose().ok()?;
    let sees = |(at, &seen): (usize, &bool)| {
        let (i, j) = (signed(at / kv_len % q_len), signed(at % kv_len));
        let (after, before) = (last.is_none_or(|last| j - i <= last), first.is_none_or(|first| j - i >= first));
        seen == (after && before)
    };
    seen.iter().enumerate().all(sees).then_some(Rule { causal, window: Window { left, right } })
}

impl Builder<'_> {
    /// The forms of a mask, the most telling first.
    pub(super) fn masks(&self, op: &Attention, lengths: [i64; 2]) -> Vec<Mask> {
        let Some((id, place)) = op.attn_mask.and_then(|id| Some((id, self.places.of(id)?))) else {
            return vec![Mask::default()];
        };
        let mut forms = Vec::new();
        if op.is_causal {
            // PyTorch does not take both; what it would mean is left to the kernels.
        } else if let Some(rule) = self.rule_of(&place, lengths) {
            forms.push(Mask { rule, dense: None, unread: vec![id] });
        } else if let Some(condition) = self.condition(id).filter(|condition| self.is_proven(condition)) {
            let seen = self.taken_apart(condition.seen, lengths).or_else(|| self.boolean(condition));
            forms.extend(seen.map(|mut mask| {
                mask.unread.push(id);
                mask
            }));
        } else {
            forms.extend(self.taken_apart(id, lengths));
        }
        forms.push(Mask { rule: Rule::default(), dense: Some(place), unread: Vec::new() });
        forms
    }

    /// The rule that a constant mask is.
    fn rule_of(&self, mask: &Place, lengths: [i64; 2]) -> Option<Rule> {
        if !self.places.is_constant(mask.buffer) {
            return None;
        }
        let Buffer::Constant(memory) = &self.places.buffers[mask.buffer] else { return None };
        // SAFETY: the constant was computed for this form, and lives as long as the plan.
        let seen = unsafe { memory::seen(memory.as_ptr(), mask) }?;
        // A mask that is broadcast along queries or keys is no triangle, whatever its own elements are.
        if !mask.meta.shape.ends_with(&lengths) {
            return seen.iter().all(|&seen| seen).then(Rule::default);
        }
        let [q_len, kv_len] = lengths.map(usize::try_from);
        rule(&seen, [q_len.ok()?, kv_len.ok()?])
    }

    /// `constant & padding`, perhaps expanded: the rule that the constant is, and the padding.
    fn taken_apart(&self, id: ValueId, lengths: [i64; 2]) -> Option<Mask> {
        let (n, _, operands) = self.conjunction(id)?;
        let Fact::Tensor(whole) = self.binding.fact(id) else { return None };
        operands.into_iter().zip([1, 0]).find_map(|(constant, other)| {
            let rule = self.rule_of(&self.places.of(constant)?, lengths)?;
            let padding = self.places.of(operands[other])?;
            let is_kept = self.is_unwritten_since(n, padding.buffer);
            let dense = Some(padding.broadcast(&whole.shape));
            is_kept.then_some(Mask { rule, dense, unread: vec![id] })
        })
    }

    /// The boolean of a condition, as it is.
    fn boolean(&self, Condition { n, seen, .. }: Condition) -> Option<Mask> {
        let place = self.places.of(seen).filter(|place| self.is_unwritten_since(n, place.buffer))?;
        Some(Mask { rule: Rule::default(), dense: Some(place), unread: Vec::new() })
    }

    /// The node whose result a mask is, perhaps expanded, and that result.
    fn maker_of_mask(&self, mask: ValueId) -> Option<(usize, ValueId)> {
        let root = self.root(mask)?;
        let (of_mask, of_root) = (self.binding.meta(mask).ok()?, self.binding.meta(root).ok()?);
        if of_mask.rank() < of_root.rank() || !of_root.broadcast(&of_mask.shape).agrees(of_mask) {
            return None;
        }
        let n = self.inner.graph.nodes.iter().position(|node| node.outputs.contains(&Some(root)))?;
        (!self.is_mutated(root)).then_some((n, root))
    }

    /// The boolean that a mask is made of, if it is `where` of one.
    pub(super) fn condition(&self, mask: ValueId) -> Option<Condition> {
        let (n, root) = self.maker_of_mask(mask)?;
        let Op::Pointwise(Pointwise::Where { condition, a, b }) = &self.inner.graph.nodes[n].op else { return None };
        // The operands may widen the condition; what is read in place of the mask has its sizes.
        let same = self.binding.meta(*condition).ok()?.shape == self.binding.meta(root).ok()?.shape;
        same.then_some(Condition { n, seen: *condition, added: [*a, *b] })
    }

    /// Whether 0 is added where the condition holds, and −∞ elsewhere.
    fn is_proven(&self, condition: &Condition) -> bool {
        let adds = |operand: &Operand, number: f64| match operand {
            Operand::Number(Scalar::Float(x)) => *x == number,
            Operand::Number(_) => false,
            Operand::Tensor(id) => self.places.of(*id).is_some_and(|place| {
                let Buffer::Constant(memory) = &self.places.buffers[place.buffer] else { return false };
                // SAFETY: the constant was computed for this form, and lives as long as the plan.
                let numbers = unsafe { memory::tensor(memory.as_ptr(), &place) };
                is_float(place.meta.dtype) && numbers.floats().iter().all(|x| *x == number)
            }),
        };
        adds(&condition.added[0], 0.0) && adds(&condition.added[1], f64::NEG_INFINITY)
    }

    /// Where a mask is the conjunction of two booleans that are tensors, perhaps expanded: the node, its result, the operands.
    pub(super) fn conjunction(&self, mask: ValueId) -> Option<(usize, ValueId, [ValueId; 2])> {
        let (n, root) = self.maker_of_mask(mask)?;
        let graph = &self.inner.graph;
        let Op::Pointwise(Pointwise::Binary { op, a, b, alpha: None, target: Target::Fresh }) = &graph.nodes[n].op
        else {
            return None;
        };
        let (Binary::BitwiseAnd | Binary::LogicalAnd, Operand::Tensor(a), Operand::Tensor(b)) = (op, a, b) else {
            return None;
        };
        let is_bool = |id: ValueId| self.binding.meta(id).is_ok_and(|meta| meta.dtype == DType::Bool);
        [root, *a, *b].into_iter().all(is_bool).then_some((n, root, [*a, *b]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mask of a rule, by the definition of `Options`.
    fn seen(rule: Rule, [q_len, kv_len]: [usize; 2]) -> Vec<bool> {
        let signed = |n: usize| n.cast_signed();
        let d = if rule.causal == Some(Causal::BottomRight) { signed(kv_len) - signed(q_len) } else { 0 };
        let sees = |i: usize, j: usize| {
            let from = signed(j) - signed(i) - d;
            (rule.causal.is_none() || from <= 0)
                && rule.window.left.is_none_or(|left| from >= -signed(left))
                && rule.window.right.is_none_or(|right| from <= signed(right))
        };
        (0..q_len).flat_map(|i| (0..kv_len).map(move |j| (i, j))).map(|(i, j)| sees(i, j)).collect()
    }

    #[test]
    fn what_is_a_rule_is_found_and_lets_the_same_be_seen() {
        let (causals, bounds) =
            ([None, Some(Causal::TopLeft), Some(Causal::BottomRight)], [None, Some(0), Some(1), Some(3)]);
        for lengths in [[1, 1], [1, 5], [4, 4], [3, 7], [6, 2]] {
            for causal in causals {
                for (left, right) in bounds.into_iter().flat_map(|left| bounds.map(|right| (left, right))) {
                    let mask = seen(Rule { causal, window: Window { left, right } }, lengths);
                    if let Some(found) = rule(&mask, lengths) {
                        assert_eq!(seen(found, lengths), mask, "{causal:?} {left:?} {right:?} {lengths:?}: {found:?}");
                    } else {
                        // More queries than keys: some see nothing, and the last key may lie before the diagonal.
                        assert!(lengths[0] != lengths[1], "{causal:?} {left:?} {right:?} {lengths:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn one_element_that_differs_is_no_rule() {
        for causal in [Some(Causal::TopLeft), Some(Causal::BottomRight)] {
            let lengths = [4, 6];
            let whole = seen(Rule { causal, window: Window { left: Some(2), right: None } }, lengths);
            for at in 0..whole.len() {
                let mut mask = whole.clone();
                mask[at] = !mask[at];
                assert!(rule(&mask, lengths).is_none_or(|found| seen(found, lengths) == mask), "{at}");
            }
            let mut twice = [whole.clone(), whole].concat();
            twice[30] = !twice[30];
            assert_eq!(rule(&twice, lengths), None);
        }
    }
}
