//! A request of any rank as pieces of four dimensions: leading dimensions broadcast by strides of 0, outer ones looped over.

use rapt::{Error, ErrorKind, MAX_RANK, Shape, Strides};

use crate::errors::Failure;
use crate::tensors::{self, Operand};

/// A tensor with `rank` dimensions: its own ones last, sizes 1 and strides 0 before them.
#[derive(Clone, Copy)]
struct Aligned {
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
}

fn aligned(operand: &Operand, rank: usize) -> Result<Aligned, Failure> {
    let own = operand.shape.len();
    let Some(missing) = rank.checked_sub(own) else {
        let message = format!("{} has {own} dimensions ({}), q, k and v have {rank}", operand.name, operand.shape);
        let hint = format!("`{}[0]`", operand.name);
        return Err(Failure::binding(ErrorKind::Shape, message, hint));
    };
    let mut at = Aligned { shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
    at.shape[missing..rank].copy_from_slice(&operand.shape);
    at.strides[missing..rank].copy_from_slice(&operand.strides);
    Ok(at)
}

impl Aligned {
    /// The 4-D operand at one index of the outer dimensions (`rank − 4` of them), with `batch` and `heads` broadcast.
    fn inner(&self, operand: &Operand, rank: usize, outer: &[usize], lead: [usize; 2]) -> Operand {
        let (mut shape, mut strides) = ([1usize; 4], [0isize; 4]);
        let from = rank.saturating_sub(4);
        let missing = 4usize.saturating_sub(rank);
        shape[missing..].copy_from_slice(&self.shape[from..rank]);
        strides[missing..].copy_from_slice(&self.strides[from..rank]);
        for d in 0..2 {
            if shape[d] == 1 && lead[d] != 1 {
                (shape[d], strides[d]) = (lead[d], 0);
            }
        }
        let steps =
            outer.iter().enumerate().map(|(d, &at)| if self.shape[d] == 1 { 0 } else { at as isize * self.strides[d] });
        let offset = steps.fold(0isize, isize::wrapping_add).wrapping_mul(operand.dtype.size_bytes().cast_signed());
        let ptr = operand.ptr.wrapping_offset(offset);
        Operand { ptr, shape: Shape::from(shape), strides: Strides::from(strides), ..operand.alias() }
    }
}

/// The 4-D `operand` with batch 0.
fn without_batch(operand: Operand) -> Operand {
    let sizes = [0, operand.shape[1], operand.shape[2], operand.shape[3]];
    Operand { shape: Shape::from(sizes), ..operand }
}

/// The broadcast leading dimensions of q, k and v. With GQA the heads are left to rapt-core.
fn leading(q: &Aligned, k: &Aligned, v: &Aligned, rank: usize, gqa: bool) -> Result<[usize; MAX_RANK], Failure> {
    let mut lead = [1; MAX_RANK];
    let heads = rank - 2;
    for (d, broadcast) in lead.iter_mut().enumerate().take(heads) {
        let is_heads = d + 1 == heads;
        let sizes = [("q", q.shape[d]), ("k", k.shape[d]), ("v", v.shape[d])];
        if is_heads && gqa {
            *broadcast = q.shape[d];
            continue;
        }
        let (other, n) = sizes.into_iter().find(|(_, n)| *n != 1).unwrap_or(sizes[0]);
        *broadcast = n;
        if let Some((tensor, got)) = sizes.into_iter().find(|(_, got)| *got != 1 && *got != n) {
            if is_heads {
                let message =
                    format!("{tensor} has {got} heads, {other} has {n}: without enable_gqa they must be equal or 1");
                return Err(Failure::binding(ErrorKind::Shape, message, "`enable_gqa=True`"));
            }
            return Err(Error::SizeMismatch { tensor, size: "batch", got, other, expected: n }.into());
        }
    }
    Ok(lead)
}

/// Whether distinct indices have distinct addresses; a sufficient test, exact for every permutation and slice.
fn is_plainly_injective(out: &Operand) -> bool {
    let mut dims: Vec<(usize, usize)> = out
        .shape
        .iter()
        .zip(out.strides.iter())
        .filter(|(n, _)| **n > 1)
        .map(|(n, s)| (s.unsigned_abs(), *n))
        .collect();
    dims.sort_unstable();
    let mut reach = 0usize;
    dims.into_iter().all(|(stride, n)| {
        let free = stride > reach;
        reach = reach.saturating_add(stride.saturating_mul(n - 1));
        free
    })
}

/// The loop over outer dimensions checks each piece on its own; what holds between pieces is checked here.
pub(crate) fn check_whole_output(out: &mut Operand, inputs: &[&Operand]) -> Result<(), Failure> {
    if !is_plainly_injective(out) {
        return Err(Error::OutputOverlapsItself { tensor: "out", shape: out.shape, strides: out.strides }.into());
    }
    let view = out.view_mut()?;
    let (lo, hi) = view.reach_bytes();
    let written = (view.address().wrapping_add_signed(lo), view.address().wrapping_add_signed(hi));
    for input in inputs {
        let view = input.view()?;
        let (lo, hi) = view.reach_bytes();
        let read = (view.address().wrapping_add_signed(lo), view.address().wrapping_add_signed(hi));
        if lo != hi && written.0 < read.1 && read.0 < written.1 {
            return Err(Error::OutputOverlaps { tensor: "out", other: input.name }.into());
        }
    }
    Ok(())
}

/// What is read, as it was given.
pub(crate) type Inputs<'a> = (&'a Operand, &'a Operand, &'a Operand, Option<&'a Operand>);

/// A request brought to one rank, its leading dimensions broadcast.
pub(crate) struct Frame {
    rank: usize,
    q: Aligned,
    k: Aligned,
    v: Aligned,
    mask: Option<Aligned>,
    gqa: bool,
    lead: [usize; MAX_RANK],
    /// The sizes of the answer.
    pub(crate) out_shape: Shape,
}

impl Frame {
    /// Checks ranks and broadcasting.
    pub(crate) fn new((q, k, v, mask): Inputs<'_>, enable_gqa: bool) -> Result<Self, Failure> {
        for operand in [q, k, v] {
            if operand.shape.len() < 2 {
                let allowed = "at least 2 ([len, head_dim]) are asked";
                let (tensor, got, shape) = (operand.name, operand.shape.len(), operand.shape);
                return Err(Error::Rank { tensor, got, shape, allowed }.into());
            }
        }
        let rank = q.shape.len().max(k.shape.len()).max(v.shape.len());
        let (q_at, k_at, v_at) = (aligned(q, rank)?, aligned(k, rank)?, aligned(v, rank)?);
        let mask_at = mask.map(|mask| aligned(mask, rank)).transpose()?;
        let gqa = enable_gqa && rank >= 3;
        let lead = leading(&q_at, &k_at, &v_at, rank, gqa)?;
        if let (Some(mask), Some(at)) = (mask, &mask_at) {
            for (d, n) in lead.iter().enumerate().take(rank.saturating_sub(4)) {
                if at.shape[d] != 1 && at.shape[d] != *n {
                    let message = format!(
                        "mask of shape {} does not broadcast to the batch dimensions of q, k and v",
                        mask.shape
                    );
                    return Err(Failure::binding(ErrorKind::Shape, message, "a mask whose leading dimensions are 1"));
                }
            }
        }
        let mut out_shape = [0; MAX_RANK];
        out_shape[..rank - 2].copy_from_slice(&lead[..rank - 2]);
        (out_shape[rank - 2], out_shape[rank - 1]) = (q_at.shape[rank - 2], v_at.shape[rank - 1]);
        let out_shape = tensors::shape("out", &out_shape[..rank])?;
        Ok(Frame { rank, q: q_at, k: k_at, v: v_at, mask: mask_at, gqa, lead, out_shape })
    }

    /// The number of dimensions that are looped over.
    pub(crate) fn outer_rank(&self) -> usize {
        self.rank.saturating_sub(4)
    }

    /// Whether an empty outer dimension leaves no piece to run and no memory behind it.
    fn is_empty(&self) -> bool {
        self.lead[..self.outer_rank()].contains(&0)
    }

    /// The operands of one piece, each with four dimensions. The piece that stands for none has batch 0.
    pub(crate) fn piece(
        &self,
        (q, k, v, mask): Inputs<'_>,
        outer: &[usize],
    ) -> (Operand, Operand, Operand, Option<Operand>) {
        let Frame { rank, lead, .. } = *self;
        // Rank 2 has no heads, rank 3 no batch: their sizes are 1.
        let broadcast = [if rank >= 4 { lead[rank - 4] } else { 1 }, if rank >= 3 { lead[rank - 3] } else { 1 }];
        let heads_of = |at: &Aligned| if rank >= 3 { at.shape[rank - 3] } else { 1 };
        let kv_broadcast = |at: &Aligned| [broadcast[0], if self.gqa { heads_of(at) } else { broadcast[1] }];
        let emptied = |operand: Operand| if self.is_empty() { without_batch(operand) } else { operand };
        (
            emptied(self.q.inner(q, rank, outer, broadcast)),
            emptied(self.k.inner(k, rank, outer, kv_broadcast(&self.k))),
            emptied(self.v.inner(v, rank, outer, kv_broadcast(&self.v))),
            mask.zip(self.mask.as_ref())
                .filter(|_| !self.is_empty())
                .map(|(mask, at)| at.inner(mask, rank, outer, [1, 1])),
        )
    }

    /// The output of one piece.
    pub(crate) fn out_piece(&self, out: &Operand, outer: &[usize]) -> Result<Operand, Failure> {
        let piece = aligned(out, self.rank)?.inner(out, self.rank, outer, [1, 1]);
        Ok(if self.is_empty() { without_batch(piece) } else { piece })
    }
}

/// `operand` at `index` of its third-last dimension, which stays as a size of 1.
pub(crate) fn at_head(operand: &Operand, index: usize) -> Operand {
    let at = operand.shape.len() - 3;
    let mut sizes = [0; MAX_RANK];
    sizes[..operand.shape.len()].copy_from_slice(&operand.shape);
    sizes[at] = 1;
    let shape = Shape::new(&sizes[..operand.shape.len()]).unwrap_or(operand.shape);
    let step = operand.strides[at].wrapping_mul(index.cast_signed());
    let offset = step.wrapping_mul(operand.dtype.size_bytes().cast_signed());
    Operand { ptr: operand.ptr.wrapping_offset(offset), shape, ..operand.alias() }
}
