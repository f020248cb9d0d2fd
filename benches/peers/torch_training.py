"""One step of training: `scaled_dot_product_attention` and its gradients by q, k and v, through PyTorch's autograd. Stock PyTorch and
Rapt registered in it share all of it but the form of a ragged batch: Rapt takes a nested tensor; of PyTorch the quicker of that and one
call for each sequence.
"""

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import inputs
from peers import Prepared, quickest
from peers.torch_sdpa import Tensors, read, tensor


class Step:
    """A row's tensors. `leaves` are what gradients are taken by: [batch, heads, len, head_dim], of ragged batches [all rows, heads, head_dim]."""

    def __init__(self, row):
        self.row = row
        tensors, made = Tensors(row, 1), inputs.make(row)
        leaves = [tensors.q, *tensors.kv[0]]
        self.d_o = tensor(made.d_o, row.dtype)
        if row.is_ragged:
            leaves, self.d_o = [self.packed(x) for x in leaves], self.packed(self.d_o)
        self.leaves = [leaf.requires_grad_() for leaf in leaves]
        self.options = tensors.sdpa_options(row) | ({"dropout_p": row.dropout} if row.dropout else {})
        self.offsets = torch.tensor([0, *row.kept_keys]).cumsum(0) if row.is_ragged else None

    def packed(self, x):
        return torch.cat([x[b, :, :kept].transpose(0, 1) for b, kept in enumerate(self.row.kept_keys)])

    def attend(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.options)

    def nested(self):
        lengths = {"min_seqlen": min(self.row.kept_keys), "max_seqlen": max(self.row.kept_keys)}
        sequences = [torch.nested.nested_tensor_from_jagged(x, self.offsets, **lengths).transpose(1, 2) for x in self.leaves]
        return self.attend(*sequences).transpose(1, 2).values()

    def one_by_one(self):
        pairs = zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())
        return torch.cat([self.attend(*(x[a:b].transpose(0, 1)[None] for x in self.leaves))[0].transpose(0, 1) for a, b in pairs])

    def forms(self):
        """{name: the forward pass}, for PyTorch to choose from."""
        if self.row.is_ragged:
            return {"nested": self.nested, "a call for each sequence": self.one_by_one}
        return {"": lambda: self.attend(*self.leaves)}

    def run(self, forward):
        out = forward()
        return out, *torch.autograd.grad(out, self.leaves, self.d_o)

    def sampled(self, results, batch, kv_head):
        """f32 arrays (out, dq, dk, dv) of the query heads of one key head of one batch entry, [heads, len, head_dim]."""
        group = self.row.num_q_heads // self.row.num_kv_heads
        queries, keys = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
        if self.row.is_ragged:
            rows = slice(int(self.offsets[batch]), int(self.offsets[batch + 1]))
            return [read(x[rows, heads].transpose(0, 1).detach()) for x, heads in zip(results, (queries, queries, keys, keys))]
        return [read(x[batch, heads].detach()) for x, heads in zip(results, (queries, queries, keys, keys))]


def prepare(row, is_served=None):
    """`is_served` tells after a step whether it was Rapt's, raising what it was not; without it the step is PyTorch's own."""
    step = Step(row)
    forms = step.forms()
    made = {name: functools.partial(step.run, forward) for name, forward in forms.items()}
    with torch.enable_grad():
        if is_served or len(made) == 1:
            name = next(iter(made))
        else:
            name = min(made, key=lambda name: quickest(Prepared([made[name]], None)))

    def gradients():
        before = is_served() if is_served else None
        results = made[name]()
        if is_served:
            is_served(before)

        def judged(batch, kv_head):
            return all(bool(x.isfinite().all()) for x in results), step.sampled(results, batch, kv_head)

        return sum(x.nbytes for x in results), judged

    def second_opinion(batch, kv_head):
        with sdpa_kernel([SDPBackend.MATH]):
            return step.sampled(made[name](), batch, kv_head)

    # The math path holds several matrices of scores.
    has_math = not is_served and not row.is_ragged and row.batch * row.num_q_heads * row.q_len * row.kv_len <= 1 << 26
    return Prepared(
        [made[name]], None, note=name, context=torch.enable_grad, gradients=gradients, second_opinion=second_opinion if has_math else None,
    )  # fmt: skip
