//! Elements around a tensor, and copies of views in another shape: chains that copy.

use rapt_graph::Node;
use rapt_graph::ops::{Pad, Rearrange};

use super::super::ModelError;
use super::along::constant;
use super::build::Builder;
use super::group::{Group, Writer};
use super::place::Place;

impl Builder<'_> {
    /// `pad`: the number everywhere, then each combination of runs of the dimensions.
    pub(super) fn pad(&mut self, n: usize, node: &Node, op: &Pad) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let x = self.place(op.input)?;
        let (Ok((_, runs)), Ok(element)) = (op.runs(self.binding, &x.meta), op.element(self.binding, out.meta.dtype))
        else {
            return Ok(false);
        };
        self.close_for(&node.inputs)?;
        let covers =
            |(runs, size): (&Vec<_>, &i64)| matches!(runs[..], [rapt_graph::ops::Run { len, .. }] if len == *size);
        let is_all = runs.iter().zip(&out.meta.shape).all(covers);
        if let Some(element) = element.filter(|_| !is_all && out.meta.numel() > 0) {
            let shape = out.meta.shape.clone();
            let mut group = Group::new(shape.clone());
            let register = group.extend(&self.places, &shape, |writer| Ok(constant(writer, &element, out.meta.dtype)));
            let Some(register) = register else { return Ok(false) };
            self.store(n, &group, register, &out)?;
        }
        let mut blocks: Vec<(Place, Place)> = vec![(x, out)];
        for (d, runs) in runs.iter().enumerate() {
            let one = |(from, to): (Place, Place)| {
                runs.iter().map(move |run| {
                    let (mut from, to) = (from.clone(), to.narrowed(d, run.to, run.len));
                    from.meta.offset += run.from * from.meta.strides[d];
                    from.meta.strides[d] *= run.step;
                    from.meta.shape[d] = run.len;
                    (from, to)
                })
            };
            blocks = blocks.into_iter().flat_map(one).collect();
        }
        for (from, to) in blocks {
            self.copy_to(n, &from, &to)?;
        }
        Ok(true)
    }

    /// A copy of a view.
    pub(super) fn rearrange(&mut self, n: usize, node: &Node, op: &Rearrange) -> Result<bool, ModelError> {
        let Some((root, out)) = self.result(node) else { return Ok(false) };
        let x = self.place(op.input)?;
        let Ok((view, _)) = op.seen(self.binding, &x.meta) else { return Ok(false) };
        let from = Place { meta: view, ..x };
        let Some(to) = out.reshaped(&from.meta.shape) else { return Ok(false) };
        let shape = from.meta.shape.clone();
        self.grouped(n, node, (root, &to), &shape, |writer: &mut Writer<'_>| Ok(writer.place(&from)))
    }
}
