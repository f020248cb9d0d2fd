"""Attentions on torch tensors with one planted fault in the backward or in dropout. `sound` has none.

The formula in float32 (float64 of float64), forward and backward written out: what is masked is never multiplied, a row without a key is zeros and gives nothing.
"""

import torch


class Parts:
    """What a fault overrides."""

    def random(self, shape):
        """Uniform numbers in [0, 1), from torch's generator."""
        return torch.rand(shape)

    def kept(self, shape, p):
        """What each weight is multiplied by."""
        return (self.random(shape) >= p).double() / (1 - p) if p < 1 else torch.zeros(shape).double()

    def kept_again(self, kept, p):
        """The same in the backward."""
        return kept

    def arriving(self, d_o):
        return d_o

    def values(self, v, keep):
        """v as the backward multiplies it."""
        return v.nan_to_num()

    def alive(self, d_o, keep):
        """d_o of the rows that attend a key."""
        return torch.where(keep.any(-1, keepdim=True), d_o, 0)

    def probabilities(self, p, keep):
        return p

    def scale(self, scale):
        """The factor of dq and dk."""
        return scale

    def grouped(self, x, kv_heads):
        """The sum over the query heads of each key head."""
        return x.unflatten(1, (kv_heads, -1)).sum(2)

    def reduced(self, d_mask, shape):
        return d_mask.sum_to_size(shape)

    def finished(self, made):
        return made


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, q, k, v, mask, is_causal, scale, dropout_p):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        Q, K, V = q.to(wide), *(x.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scale = q.shape[3] ** -0.5 if scale is None else scale
        s = Q @ K.mT * scale
        keep = torch.ones(s.shape, dtype=torch.bool)
        if is_causal:
            keep = keep.tril()
        if mask is not None:
            keep = keep & (mask if mask.dtype == torch.bool else mask != -torch.inf)
            s = s if mask.dtype == torch.bool else s + torch.where(mask == -torch.inf, 0, mask)
        s = torch.where(keep, s, -torch.inf)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.sum(-1, keepdim=True)
        p = torch.where(keep, (s - torch.where(top == -torch.inf, 0, top)).exp(), 0)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
        kept = parts.kept(p.shape, dropout_p).to(wide) if dropout_p else torch.ones(())
        weights = p * kept
        out = weights @ V.nan_to_num()
        lost = (keep.to(wide) @ V.isnan().to(wide)) > 0
        out = torch.where(lost, torch.nan, out)
        ctx.save_for_backward(q, k, v, mask, p, keep, kept)
        ctx.rest = parts, scale, dropout_p, wide
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, mask, p, keep, kept = ctx.saved_tensors
        parts, scale, dropout_p, wide = ctx.rest
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        Q, K = q.to(wide), k.to(wide).repeat_interleave(group, 1)
        V = parts.values(v.to(wide), keep).repeat_interleave(group, 1)
        d_o = parts.alive(parts.arriving(d_o).to(wide), keep)
        kept, p = parts.kept_again(kept, dropout_p), parts.probabilities(p, keep)
        dp = (d_o @ V.mT) * kept
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        factor = parts.scale(scale)
        dq, dk, dv = ds @ K.nan_to_num() * factor, ds.mT @ Q.nan_to_num() * factor, (p * kept).mT @ d_o
        d_mask = None
        if mask is not None and mask.is_floating_point():
            d_mask = parts.reduced(ds, mask.shape).to(mask.dtype)
        made = parts.finished([dq, parts.grouped(dk, kv_heads), parts.grouped(dv, kv_heads)])
        return None, *(each.to(q.dtype) for each in made), d_mask, None, None, None


def _with(parts):
    """An attention whose backward has these parts, and that no import finds: it is audited in a fork, where torch is loaded already."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return _Attention.apply(parts, query, key, value, attn_mask, is_causal, scale, dropout_p)

    attention.__name__ = attention.__qualname__ = type(parts).__name__
    return attention


class scale_forgotten(Parts):
    def scale(self, scale):
        return 1.0


class one_head_of_a_group(Parts):
    def grouped(self, x, kv_heads):
        return x.unflatten(1, (kv_heads, -1))[:, :, 0]


class mask_gradient_of_one_batch(Parts):
    """Only the first of what a mask was broadcast over."""

    def reduced(self, d_mask, shape):
        shape = (1,) * (4 - len(shape)) + tuple(shape)
        return d_mask[tuple(slice(size) for size in shape)].reshape(shape[4 - len(shape) :]).sum_to_size(shape)


class masked_keys_weigh_a_little(Parts):
    def probabilities(self, p, keep):
        return torch.where(keep, p, 1e-9)


class nan_of_masked_values_spreads(Parts):
    def values(self, v, keep):
        return v


class dead_rows_give_what_arrives(Parts):
    def alive(self, d_o, keep):
        return d_o


class strides_of_d_o_forgotten(Parts):
    """Read in memory order from its first element, where there are as many."""

    def arriving(self, d_o):
        if d_o.untyped_storage().nbytes() // d_o.element_size() - d_o.storage_offset() < d_o.numel():
            return d_o
        return d_o.as_strided(d_o.shape, torch.empty(d_o.shape).stride(), d_o.storage_offset())


class d_o_scaled_in_place(Parts):
    def arriving(self, d_o):
        return d_o.mul_(2) / 2


class shared_memory_of_d_o_read_once(Parts):
    """A stride of 0 taken for a size of 1, whose other elements are 0."""

    def arriving(self, d_o):
        for dim, stride in enumerate(d_o.stride()):
            if stride == 0 and d_o.shape[dim] > 1:
                d_o = torch.cat([d_o.narrow(dim, 0, 1), torch.zeros_like(d_o.narrow(dim, 1, d_o.shape[dim] - 1))], dim)
        return d_o


class sums_in_any_order(Parts):
    def finished(self, made):
        return [each * (1 + 1e-6 * torch.rand(each.shape, generator=_UNSEEDED)) for each in made]


class probability_of_eight_bits(Parts):
    def kept(self, shape, p):
        return (torch.randint(256, shape) >= round(256 * p)).double() / (1 - p) if p < 1 else torch.zeros(shape).double()


class kept_weights_unscaled(Parts):
    def kept(self, shape, p):
        return (torch.rand(shape) >= p).double()


class heads_drop_alike(Parts):
    def random(self, shape):
        return torch.rand(shape[0], 1, *shape[2:]).expand(shape)


class deaf_to_the_seed(Parts):
    def random(self, shape):
        return torch.rand(shape, generator=_UNSEEDED)


class one_mask_for_all_calls(Parts):
    def random(self, shape):
        return torch.rand(shape, generator=torch.Generator().manual_seed(1))


class backward_draws_again(Parts):
    def kept_again(self, kept, p):
        return self.kept(kept.shape, p).to(kept.dtype) if p else kept


_UNSEEDED = torch.Generator()
sound = _with(Parts())
FAULTS = {fault.__name__: _with(fault()) for fault in Parts.__subclasses__()}
