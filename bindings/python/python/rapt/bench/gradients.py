"""What the gradients of a row of kind backward are held against.

The definition's (rapt._reference.gradients), in f64 on the GPU, of the query heads of one key head of one batch entry, in blocks of
queries, so that long rows fit in memory: the last of both, which a mistake in an offset reaches first. The tolerance is that of
docs/reference/numerics.md from torch's own error on that slice: flash's, where it does not take the row the memory-efficient kernel's,
and else the math path's; with softcap that of the formula written in torch's operations. Of dq, dk and dv each has its limit; the error that is kept is the largest beside its own. Beside the slice
everything must be finite, and near what a peer that passed gives. Deliberately absent: timing.
"""

import warnings

from . import check, interleaved

NAMES = ("dq", "dk", "dv")
KERNELS = {"FLASH_ATTENTION": "torch flash", "EFFICIENT_ATTENTION": "torch efficient", "MATH": "torch's math path"}
SCORES = 1 << 25
"""Scores of a block: 256 MiB of f64 for each of the some ten matrices that the reference makes of them."""


class Judge:
    """The reference on a row's slice, and what is allowed beside it."""

    def __init__(self, gpu, row, tensors):
        from rapt import _reference

        self.gpu, self.row, self.rule = gpu, row, _reference
        self.group = row.num_q_heads // row.num_kv_heads
        self.want = [x.cpu().numpy() for x in self.of_definition(tensors)]
        peer, source = self.of_torch(tensors)
        dtype = check.DTYPES[row.dtype]
        self.limits = {
            name: interleaved.Limit(*_reference.limits(dtype, [x.double().cpu().numpy()], want), f"{source} on the slice")
            for name, x, want in zip(NAMES, peer, self.want)
        }  # fmt: skip

    def queries(self, x):
        """The slice of a tensor of query heads."""
        return x[-1:, -self.group :]

    def keys(self, x):
        """That of a tensor of key heads."""
        return x[-1:, -1:]

    def sliced(self, tensors):
        """(d_o, q, k, v)."""
        return self.queries(tensors.d_o), self.queries(tensors.q), *map(self.keys, tensors.kv[0])

    def mask(self, tensors, queries):
        """The whole mask of those queries, None where all is attended: bool, or additive in the row's dtype."""
        row = self.row
        mask = None if tensors.mask is None else tensors.mask[-1:]
        mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, queries]
        if row.causal == "none" and not row.window:
            return mask
        window, causal = (row.window - 1, None) if row.window else None, None if row.causal == "none" else row.causal
        seen = self.rule.positions(row.q_len, row.kv_len, causal, window, queries=queries, like=tensors.q)[None, None]
        if mask is None:
            return seen
        return mask & seen if row.mask.startswith("bool") or row.mask == "padding" else mask.masked_fill(~seen, float("-inf"))

    def of_definition(self, tensors):
        torch, row = self.gpu.torch, self.row
        d_o, q, k, v = (x.double() for x in self.sliced(tensors))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        block = max(1, SCORES // (self.group * row.kv_len))
        for first in range(0, row.q_len, block):
            queries = torch.arange(first, min(first + block, row.q_len), device=self.gpu.where)
            mask = self.mask(tensors, queries)
            mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
            made = self.rule.gradients(d_o[:, :, queries], q[:, :, queries], k, v, mask=mask, softcap=row.softcap or None)
            dq[:, :, queries] = made[0]
            dk += made[1]
            dv += made[2]
        return dq, dk, dv

    def of_torch(self, tensors):
        """(dq, dk, dv of the slice by the first of torch's kernels that takes it, the kernel)."""
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        torch, row = self.gpu.torch, self.row
        d_o, *qkv = self.sliced(tensors)
        if row.softcap:
            leaves = [x.detach().requires_grad_() for x in qkv]
            with torch.enable_grad():
                return torch.autograd.grad(self.capped(tensors, *leaves), leaves, d_o), "the formula in torch's operations"
        options = {"is_causal": row.causal == "top_left"}
        if tensors.mask is not None or row.window or row.causal == "bottom_right":
            options = {"attn_mask": self.mask(tensors, torch.arange(row.q_len, device=self.gpu.where))}
        if self.group > 1:
            options["enable_gqa"] = True
        refused = None
        for name, title in KERNELS.items():
            leaves = [x.detach().contiguous().requires_grad_() for x in qkv]
            try:
                with torch.enable_grad(), warnings.catch_warnings(), sdpa_kernel([getattr(SDPBackend, name)]):
                    warnings.simplefilter("ignore")  # why a kernel does not take the row
                    return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **options), leaves, d_o), title
            except RuntimeError as error:
                refused = error
        raise refused

    def capped(self, tensors, q, k, v):
        """Attention with softcap, in the storage dtype but for the softmax."""
        torch, cap = self.gpu.torch, self.row.softcap
        score = cap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / cap)
        mask = self.mask(tensors, torch.arange(self.row.q_len, device=self.gpu.where))
        if mask is not None:
            score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask
        return torch.softmax(score, -1, dtype=torch.float32).to(v.dtype) @ v

    def error(self, made):
        """How far gradients are off: of the one that is nearest to its limit."""
        if len(made) != len(NAMES) or not all(check.is_whole(x, shape, self.row) for x, shape in zip(made, check.written(self.row))):
            return check.Error(float("inf"), float("inf"), False, "dq, dk, dv")
        found = []
        for name, x, want, cut in zip(NAMES, made, self.want, (self.queries, self.keys, self.keys)):
            relative, worst_row, _ = self.rule.errors(cut(x).double().cpu().numpy(), want)
            limit = self.limits[name]
            found.append((max(relative / limit.relative, worst_row / limit.worst_row), check.Error(relative, worst_row, True, name)))
        return max(found, key=lambda one: one[0])[1]

    def allow(self, flash=None):
        """Nothing of the run: the limits are those of the slice."""

    def limit_of(self, error):
        return self.limits.get(error.of, self.limits["dq"])

    def apart(self, ours, peer):
        """Relative L2 of two answers, of the gradient where it is largest: every element was written, not only those of the slice."""
        return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(ours, peer))
