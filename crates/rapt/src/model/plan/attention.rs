//! Attention by Rapt's kernels: on keys and values as they were before their heads were repeated, with masks that are known
//! by position said as options (`mask`).

use rapt_core::{Causal, DType, Device, Options, Shape, Spec, Strides, TensorForm};
use rapt_graph::ops::{Attention, Copy, Op};
use rapt_graph::{Node, Out, ValueId};

use super::super::ModelError;
use super::build::Builder;
use super::place::Place;
use super::{Kernel, Step};

impl Builder<'_> {
    /// An attention node, unless Rapt refuses it: then the definition computes it.
    pub(super) fn attention(&mut self, n: usize, node: &Node, op: &Attention) -> Result<bool, ModelError> {
        let (query, key, value) = (self.place(op.query)?, self.place(op.key)?, self.place(op.value)?);
        let Some(Some(out)) = node.outputs.first().map(|id| id.and_then(|id| self.places.of(id))) else {
            return Ok(false);
        };
        let lse = node.outputs.get(1).and_then(|id| id.and_then(|id| self.places.of(id)));
        let lengths = [query.meta.shape[query.meta.rank() - 2], key.meta.shape[key.meta.rank() - 2]];
        // Heads that were repeated for the kernel's sake are read once: grouped-query attention.
        let grouped = if op.enable_gqa { None } else { self.ungrouped(op.key).zip(self.ungrouped(op.value)) };
        let candidates = [grouped, Some((key, value))];
        let masks = self.masks(op, lengths);
        let forms = candidates.into_iter().flatten().flat_map(|kv| masks.iter().map(move |mask| (kv.clone(), mask)));
        for ((key, value), mask) in forms {
            let causal = if op.is_causal { Some(Causal::TopLeft) } else { mask.rule.causal };
            let options = Options { softmax_scale: op.scale, causal, window: mask.rule.window, ..Options::default() };
            let dense = mask.dense.clone();
            let places = [Some(query.clone()), Some(key), Some(value), dense, Some(out.clone()), lse.clone()];
            let Some(spec) = spec(&places, &options, op.enable_gqa) else { continue };
            let Ok(plan) = self.host.engine.plan_on_host(&spec, self.threads) else { continue };
            self.close_where_read(&places)?;
            // What was only made for this node is not: nobody else reads it.
            for (id, place) in [(op.key, &places[1]), (op.value, &places[2])] {
                if place.as_ref().map(|place| place.buffer) != self.places.buffer(id) {
                    self.forget_reader(id, n);
                }
            }
            for id in &mask.unread {
                self.forget_reader(*id, n);
            }
            let uses = places.iter().flatten().map(|place| place.buffer).collect();
            let kernel = Kernel::Attention { plan, places: Box::new(places) };
            self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
            return Ok(true);
        }
        Ok(false)
    }

    fn close_where_read(&mut self, places: &[Option<Place>; 6]) -> Result<(), ModelError> {
        let buffers: Vec<usize> = places.iter().flatten().map(|place| place.buffer).collect();
        self.close_where(|group| buffers.iter().any(|&buffer| group.makes(buffer)))
    }

    /// Keys or values before their heads were repeated: `[batch, num_kv_heads, kv_len, head_dim]`, where the program expanded
    /// a dimension after the heads and copied the result to `[batch, num_q_heads, …]`.
    fn ungrouped(&self, id: ValueId) -> Option<Place> {
        let graph = &self.inner.graph;
        let n = graph.nodes.iter().position(|node| node.outputs.contains(&Some(id)))?;
        let (Op::Copy(Copy::Reshape { input, .. } | Copy::Clone { input, .. }), Out::Fresh(_)) =
            (&graph.nodes[n].op, self.binding.outs[n].first()?)
        else {
            return self.before_view(n, id);
        };
        let from = self.places.of(*input)?;
        let whole = self.places.of(id)?;
        let [batch, heads, group, len, dim] = from.meta.shape[..] else { return None };
        if whole.meta.shape != [batch, heads * group, len, dim] || from.meta.strides[2] != 0 || group < 2 {
            return None;
        }
        let mut place = from;
        place.meta.shape.remove(2);
        place.meta.strides.remove(2);
        self.is_unwritten_since(n, place.buffer).then_some(place)
    }

    /// Whether no node after this one, of those that have their places, writes to a buffer.
    pub(super) fn is_unwritten_since(&self, n: usize, buffer: usize) -> bool {
        self.inner.graph.nodes[n + 1..].iter().all(|node| {
            let scattered =
                matches!(node.op, Op::Scatter(_)).then(|| node.outputs.first().copied().flatten()).flatten();
            [node.op.mutates(), scattered].into_iter().flatten().all(|id| self.places.buffer(id) != Some(buffer))
        })
    }

    /// The same where the copy and the view that merges the heads are two nodes.
    fn before_view(&self, n: usize, id: ValueId) -> Option<Place> {
        let graph = &self.inner.graph;
        let Out::View { of, .. } = self.binding.outs[n].first()? else { return None };
        let copy = graph.nodes.iter().position(|node| node.outputs.contains(&Some(*of)))?;
        let (Op::Copy(Copy::Clone { input, .. } | Copy::Contiguous { input, .. }), Out::Fresh(_)) =
            (&graph.nodes[copy].op, self.binding.outs[copy].first()?)
        else {
            return None;
        };
        let (mut place, whole) = (self.places.of(*input)?, self.places.of(id)?);
        let [batch, heads, group, len, dim] = place.meta.shape[..] else { return None };
        let merges = whole.meta.shape == [batch, heads * group, len, dim] && whole.meta.is_contiguous();
        if !merges || place.meta.strides[2] != 0 || group < 2 {
            return None;
        }
        place.meta.shape.remove(2);
        place.meta.strides.remove(2);
        self.is_unwritten_since(copy, place.buffer).then_some(place)
    }
}

/// The request for these places. Dimensions before the heads are one batch; `None` where they are not.
fn spec(places: &[Option<Place>; 6], options: &Options, enable_gqa: bool) -> Option<Spec> {
    let [Some(query), Some(key), Some(value), mask, Some(out), lse] = places else { return None };
    let heads = |place: &Place| place.meta.rank().checked_sub(3).map(|d| place.meta.shape[d]);
    // Without the option fewer heads are no groups: one head of keys broadcasts, which Rapt's groups are too.
    let groups = heads(query) != heads(key) || heads(query) != heads(value);
    if groups && !enable_gqa && heads(key) != heads(value) {
        return None;
    }
    let form = |place: &Place| form(place);
    let mut builder = Spec::builder(form(query)?, form(key)?, form(value)?, options);
    builder.out(form(out)?);
    let mask_form = mask.as_ref().map(form);
    if let Some(mask) = mask_form {
        builder.mask(Some(mask?));
    }
    if let Some(lse) = lse {
        builder.lse(form(lse)?);
    }
    builder.build().ok()
}

fn form(place: &Place) -> Option<TensorForm> {
    let strides: Vec<isize> = place.meta.strides.iter().map(|&stride| stride as isize).collect();
    let (shape, strides) = (Shape::new(&place.shape())?, Strides::new(&strides)?);
    let form = TensorForm::new(place.meta.dtype, shape, strides, Device::Cpu);
    Some(form.at(align_of(place.meta.dtype)))
}

/// An address that is only as aligned as every element is: what lies in the archive or with the caller may lie so.
fn align_of(dtype: DType) -> usize {
    dtype.size_bytes()
}
