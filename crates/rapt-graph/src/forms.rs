//! Results that PyTorch lays out in one way or another: the program says which.
//!
//! Tracing decides once what running decides at each call: whether a reshape is a view or a copy, which kernel computes attention, in
//! which format an image lies. Where sizes are 1, or happen to be equal, the two come to different answers; the strides of
//! dimensions of size 1, which PyTorch's rules read, are left to chance. Values do not depend on it, so the program's
//! statement is followed: later nodes rest on it. Deliberately absent: results in place, and any form that PyTorch gives in no case.

use crate::ops::{Copy, Formula, Norm, Op, Pointwise, Target, Write};
use crate::{Meta, Node, Out, Shapes, strides};

/// Another form that this result may have, if it is the stated one.
pub(crate) fn other(node: &Node, shapes: &dyn Shapes, out: &Out, stated: &Meta) -> Option<Meta> {
    let same = |form: Meta| form.agrees(stated).then_some(form);
    let open = || node.inputs.iter().any(|id| shapes.meta(*id).is_ok_and(|meta| meta.shape.contains(&1)));
    match (&node.op, out) {
        // A copy of a view starts in its storage where the view does, the first time that the tracer meets this form; at 0 later.
        (Op::Copy(Copy::Onto { input, target: Target::Fresh, .. }), Out::Fresh(form)) => {
            same(Meta { offset: shapes.meta(*input).ok()?.offset, ..form.clone() })
        }
        (Op::Scatter(scatter), Out::Fresh(form)) if matches!(scatter.write, Write::View { .. }) => {
            same(Meta { offset: shapes.meta(scatter.input).ok()?.offset, ..form.clone() })
        }
        (Op::Copy(Copy::Reshape { .. } | Copy::ReshapeAs { .. } | Copy::Flatten { .. }), Out::View { meta, .. }) => {
            same(Meta::contiguous(meta.dtype, &meta.shape))
        }
        // The kernel that records a gradient, for a mask that needs one, gives rows.
        (Op::Attention(_), Out::Fresh(form)) => same(Meta::contiguous(form.dtype, &form.shape)),
        // The tracer's lies as the input does; the kernel's is row-major or channels-last.
        (Op::Norm(Norm::OwnBatch { .. }), Out::Fresh(form)) if stated.offset == 0 && strides::is_dense(stated) => {
            same(Meta { strides: stated.strides.clone(), ..form.clone() })
        }
        (Op::Conv(_) | Op::Pool(_) | Op::Volume(_) | Op::Resample(_) | Op::Norm(_), Out::Fresh(form)) => {
            let rows = Meta::contiguous(form.dtype, &form.shape);
            let channels = Meta { strides: strides::channels_innermost(&form.shape), ..rows.clone() };
            [rows, channels].into_iter().filter(|_| open()).find_map(same)
        }
        // With and without gradients PyTorch counts the end among the bags' sizes or not.
        (Op::Bag(bag), Out::Fresh(form)) if form.rank() == 1 => {
            same(Meta::contiguous(form.dtype, &shapes.meta(bag.offsets).ok()?.shape))
        }
        // The tracer computes these by way of others, whose results lie by the operands in another order.
        (
            Op::Pointwise(Pointwise::Formula {
                op: Formula::LogAddExp | Formula::LogAddExp2 | Formula::Heaviside,
                target: Target::Fresh,
                ..
            })
            | Op::Special(_)
            | Op::Quantile(_)
            | Op::Margin(_),
            Out::Fresh(form),
        ) if stated.offset == 0 && strides::is_dense(stated) => {
            same(Meta { strides: stated.strides.clone(), ..form.clone() })
        }
        // Which operand is multiplied from the left, and which dimensions are summed, depends on sizes of 1.
        (Op::Einsum(_), Out::Fresh(form)) if open() && stated.offset == 0 && strides::is_dense(stated) => {
            same(Meta { strides: stated.strides.clone(), ..form.clone() })
        }
        _ => None,
    }
}
