"""Gradients: a call whose inputs require grad as one node of PyTorch's autograd, forward and backward Rapt's.

    forward    (out, lse) of the same kernel that serves the call without gradients: the same bits
    kept       the inputs, out and lse; probabilities are recomputed from lse; with dropout the draw too, two numbers
    backward   gradients of those inputs alone that ask for one, each of its input's dtype and sizes

`Attention` is the call of `rapt.attention`, `Sdpa` that of PyTorch's signature, whose leading dimensions broadcast: its pieces of four
dimensions are views (a broadcast is a stride of 0), and a gradient of what was broadcast is summed. Where something traces, both passes
end in ops of `torch.ops.rapt`, which compiled graphs then carry.

Deliberately absent: gradients of gradients, of ALiBi's slopes and of scales, and tensors of Apple's GPUs. Each is refused by name.
"""

import itertools
import math
import typing

import torch
from rapt import UnsupportedError, _native

from . import _dropout, _outputs
from ._stats import count_served

_modes = torch._C._len_torch_dispatch_stack
_is_traced = _native.torch_is_traced
_below = torch._C._AutoDispatchBelowAutograd
_functorch = torch._C._functorch

NO_GRAD = "Mend: `with torch.no_grad():`"


def needs_grad(tensors):
    """Whether grad mode is on and one of these (None among them) requires grad."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def empty_lse(q, layout):
    """An lse for q, `[batch, heads, q_len]` whatever the layout."""
    sizes = tuple(q.shape[:-1])
    if layout == "bshd" and len(sizes) >= 2:
        sizes = (*sizes[:-2], sizes[-1], sizes[-2])
    return torch.empty(sizes, dtype=accumulation(q), device=q.device)


def accumulation(tensor):
    """The dtype in which sums of this tensor's numbers are formed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _through_ops(*tensors):
    """Whether something that traces, or a mode, must see ops."""
    return _modes() or _is_traced(*tensors)


# --- the node ----------------------------------------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *inputs):
        out, lse = call.forward(*inputs)
        # The draw is kept as the others are: what a checkpoint computes again has its own.
        ctx.call = call if call.draw is None else call._replace(draw=None)
        ctx.save_for_backward(call.draw, *inputs, out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if call.gives_lse else out

    @staticmethod
    def backward(ctx, d_o, d_lse=None):
        wanted = ctx.needs_input_grad[1:]
        if d_o is None and d_lse is None:
            return (None,) * (1 + len(wanted))
        draw, *saved = ctx.saved_tensors
        if d_o is None:
            d_o = torch.zeros_like(saved[-2])
        call = ctx.call if draw is None else ctx.call._replace(draw=draw)
        return None, *gradients(call, wanted, d_o, d_lse, *saved)


class _Once(torch.autograd.Function):
    """Gradients, which cannot be differentiated."""

    @staticmethod
    def forward(_ctx, compute, *_tensors):
        return tuple(compute())

    @staticmethod
    def backward(_ctx, *_arriving):
        raise UnsupportedError(
            "the gradients of attention are not differentiated a second time. "
            "Mend: `with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):` around the call of "
            "`torch.nn.functional.scaled_dot_product_attention`, which is PyTorch's math path then"
        )


def once(compute, tensors):
    """The gradients that `compute()` gives, which depend on `tensors`: to differentiate them again is an error."""
    return list(_Once.apply(compute, *tensors))


def gradients(call, wanted, *tensors):
    """A gradient for each of `wanted`, None where it is False; `tensors` are d_o, d_lse, the inputs, out and lse."""
    if needs_grad(tensors):  # create_graph=True
        return once(lambda: call.backward(wanted, *tensors), tensors)
    vmap = _vmap_of(tensors[0]) or _vmap_of(tensors[1])
    return call.backward(wanted, *tensors) if vmap is None else _one_by_one(vmap, call, wanted, *tensors)


class _Vmap(typing.NamedTuple):
    """A vmap around a backward: `torch.autograd.grad(is_grads_batched=True)`, which has classes of its own, or torch.func's."""

    level: int
    is_legacy: bool

    def unbound(self, tensor):
        """`tensor` as many, or in a tuple of its own."""
        if tensor is None or _vmap_of(tensor) != self:
            return (tensor,)
        if self.is_legacy:
            return torch._remove_batch_dim(tensor, self.level, 1, 0).unbind()
        return _functorch.get_unwrapped(tensor).unbind(_functorch.maybe_get_bdim(tensor))

    def bound(self, tensors):
        """Those of which it is to make one."""
        add = torch._add_batch_dim if self.is_legacy else _functorch._add_batch_dim
        return add(torch.stack(tensors), 0, self.level)


def _vmap_of(tensor):
    if tensor is None or _native.torch_is_plain(tensor):
        return None
    if _functorch.is_legacy_batchedtensor(tensor):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        return _Vmap(level, True)
    return _Vmap(_functorch.maybe_get_level(tensor), False) if _functorch.is_batchedtensor(tensor) else None


def _one_by_one(vmap, call, wanted, d_o, d_lse, *saved):
    """What arrives is many, of which each has its gradients."""
    many = [vmap.unbound(tensor) for tensor in (d_o, d_lse)]
    count = max(map(len, many))
    many = zip(*(each * (count // len(each)) for each in many))
    made = zip(*(gradients(call, wanted, *arriving, *saved) for arriving in many))
    return [None if of[0] is None else vmap.bound(of) for of in made]


def _spread(wanted, made):
    """The list `made` of what is wanted, with None where nothing is."""
    made = iter(made)
    return tuple(next(made) if is_wanted else None for is_wanted in wanted)


# --- rapt.attention ----------------------------------------------------------------------------------------------------------


class Attention(typing.NamedTuple):
    """A call of `rapt.attention`; its inputs are q, k, v, mask and sinks."""

    gives_lse: bool
    options: dict  # in the words of `torch.ops.rapt.attention`, without mask, sinks, out_dtype and those of dropout
    out_dtype: object
    dropout_p: float
    draw: object

    def forward(self, q, k, v, mask, sinks):
        options = {"mask": mask, "sinks": sinks, **self.options}
        if _through_ops(q, k, v):
            options |= _dropout.words(self.dropout_p, self.draw)
            with _below():
                return torch.ops.rapt.attention_lse(q, k, v, **options, out_dtype=self.out_dtype)
        layout = options.get("layout", "bhsd")
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=self.out_dtype or q.dtype, device=q.device)
        lse = empty_lse(q, layout)
        _native.run_into(q, k, v, out, lse, **window_of(options), dropout=_dropout.native(self.dropout_p, self.draw))
        return out, lse

    def backward(self, wanted, d_o, d_lse, q, k, v, mask, sinks, out, lse):
        options = {"mask": mask, "sinks": sinks, **self.options, **_dropout.words(self.dropout_p, self.draw)}
        given = d_o, d_lse, q, k, v, out, lse, list(wanted)
        if _through_ops(d_o, q, k):
            with _below():
                return _spread(wanted, torch.ops.rapt.attention_backward(*given, **options))
        return _spread(wanted, attention_backward(*given, **options))


def window_of(options):
    """`options` with the window as Python has it."""
    left, right = options.pop("window_left", None), options.pop("window_right", None)
    return {**options, "window": None if left is None and right is None else (left, right)}


def attention(q, k, v, *, mask=None, sinks=None, causal=None, window=None, out=None, out_dtype=None, return_lse=False,
              tolerance=None, device=None, **options):  # fmt: skip
    """`rapt.attention` where an input requires grad."""
    for name, given in (("out", out), ("tolerance", tolerance), ("device", device)):
        if given is not None:
            raise UnsupportedError(f"{name} with inputs that require grad: such a call keeps no graph. Mend: `{name}=None`, or {NO_GRAD[6:]}")
    if not all(type(given) in (torch.Tensor, torch.nn.Parameter) for given in (q, k, v)):
        raise UnsupportedError(f"codes have no gradient, and an input requires grad. {NO_GRAD}")
    left, right = (None, None) if window is None else window
    causal = {True: "top_left", False: None}.get(causal, causal)
    options = {**options, "causal": causal, "window_left": left, "window_right": right}
    return differentiable(q, k, v, mask=mask, sinks=sinks, out_dtype=out_dtype, gives_lse=bool(return_lse), **options)


def differentiable(q, k, v, *, gives_lse, mask=None, sinks=None, out_dtype=None, dropout_p=0.0, dropout_draw=None, **options):
    """The node of `torch.ops.rapt.attention` (and `attention_lse`)."""
    _dropout.expect_draw(dropout_p, dropout_draw)
    for name, given in options.items():
        if isinstance(given, torch.Tensor) and given.requires_grad:
            raise UnsupportedError(f"{name} requires grad, and no gradient of it is computed. Mend: `{name}.detach()`")
    if options.get("compute", "exact") != "exact":
        raise UnsupportedError('an approximation has no gradient, and an input requires grad. Mend: `compute="exact"`')
    return _Node.apply(Attention(gives_lse, options, out_dtype, dropout_p, dropout_draw), q, k, v, mask, sinks)


def attention_backward(d_o, d_lse, q, k, v, out, lse, wanted, *, mask=None, sinks=None, dropout_p=0.0, dropout_draw=None, **options):
    """Gradients of those of q, k, v, mask and sinks that are `wanted`: a list."""
    _dropout.expect_draw(dropout_p, dropout_draw)
    made = _empty_like(wanted, q, k, v, mask, sinks)
    dq, dk, dv, d_mask, d_sinks = _spread(wanted, made)
    _native.backward_into(
        d_o, q, k, v, out, lse, dq, dk, dv, d_lse=d_lse, d_mask=d_mask, d_sinks=d_sinks, mask=mask, sinks=sinks, **window_of(options),
        dropout=_dropout.native(dropout_p, dropout_draw),
    )  # fmt: skip
    return made


def fake_attention_backward(_d_o, _d_lse, q, k, v, _out, _lse, wanted, *, mask=None, sinks=None, **_options):
    return _empty_like(wanted, q, k, v, mask, sinks)


def _empty_like(wanted, *inputs):
    return [torch.empty_like(of) for is_wanted, of in zip(wanted, inputs) if is_wanted]


# --- PyTorch's signature -----------------------------------------------------------------------------------------------------


class Sdpa(typing.NamedTuple):
    """A call of `scaled_dot_product_attention`; its inputs are query, key, value and attn_mask."""

    gives_lse: bool
    is_causal: bool
    scale: float
    enable_gqa: bool
    order: str  # of the answer's dimensions in memory
    made: list  # (out, lse) where they are there: taken from here, since whatever stays would keep its own graph
    dropout_p: float
    draw: object

    def forward(self, query, key, value, mask):
        if self.made:
            return self.made.pop()
        words = {"scale": self.scale, "enable_gqa": self.enable_gqa, **_dropout.words(self.dropout_p, self.draw)}
        if _through_ops(query, key, value):
            with _below():
                return torch.ops.rapt.scaled_dot_product_attention_lse(query, key, value, mask, self.is_causal, **words)
        answer = sdpa_lse(query, key, value, mask, self.is_causal, **words, order=self.order)
        count_served()
        return answer

    def backward(self, wanted, d_o, d_lse, query, key, value, mask, out, lse):
        given = d_o, d_lse, query, key, value, mask, out, lse, list(wanted), self.is_causal
        words = {"scale": self.scale, "enable_gqa": self.enable_gqa, **_dropout.words(self.dropout_p, self.draw)}
        if _through_ops(d_o, query, key):
            with _below():
                return _spread(wanted, torch.ops.rapt.scaled_dot_product_attention_backward(*given, **words))
        return _spread(wanted, sdpa_backward(*given, **words))


def sdpa(query, key, value, mask, is_causal, scale, enable_gqa, order, dropout_p=0.0, draw=None, gives_lse=False):
    """A request that was decided to be served, on tensors of which one requires grad. Counted as served. Without a draw dropout takes one."""
    if dropout_p and draw is None:
        draw = _dropout.draw(query)
    return _Node.apply(Sdpa(gives_lse, is_causal, scale, enable_gqa, order, [], dropout_p, draw), query, key, value, mask)


def recorded(out, lse, query, key, value, mask, is_causal, scale, enable_gqa, dropout_p, draw):
    """The node of a call that the native kernel has computed."""
    return _Node.apply(Sdpa(False, is_causal, scale, enable_gqa, None, [(out, lse)], dropout_p, draw), query, key, value, mask)


def sdpa_lse(query, key, value, mask, is_causal, *, scale, enable_gqa, order, dropout_p=0.0, dropout_draw=None):
    """(out, lse)."""
    shape = _outputs.shape_of(query.shape, key.shape, value.shape, enable_gqa)
    out = _outputs.new(query, shape, order)
    lse = torch.empty(shape[:-1], dtype=accumulation(query), device=query.device)
    causal = "top_left" if is_causal else None
    if _is_one_piece(query, key, value, mask, enable_gqa):
        dropout = _dropout.native(dropout_p, dropout_draw)
        _native.run_into(query, key, value, out, lse, mask=mask, causal=causal, scale=scale, dropout=dropout)
        return out, lse
    frame = _Frame(shape, key.shape, value.shape, enable_gqa)
    q, k, v = frame.whole_q(query), frame.whole_kv(key), frame.whole_kv(value)
    for at in frame.pieces():
        _native.run_into(
            at.rows(q), at.keys(k), at.keys(v), at.rows(out), at.rows(lse[..., None])[..., 0], mask=at.own(mask), causal=causal, scale=scale,
            dropout=_dropout.native(dropout_p, dropout_draw, at.entries),
        )  # fmt: skip
    return out, lse


def sdpa_backward(
    d_o, d_lse, query, key, value, mask, out, lse, wanted, is_causal=False, *, scale=None, enable_gqa=False, dropout_p=0.0, dropout_draw=None
):  # fmt: skip
    """Gradients of those of query, key, value and mask that are `wanted`: a list."""
    _dropout.expect_draw(dropout_p, dropout_draw)
    causal = "top_left" if is_causal else None
    if _is_one_piece(query, key, value, mask, enable_gqa):
        made = _empty_like(wanted, query, key, value, mask)
        dq, dk, dv, d_mask = _spread(wanted, made)
        _native.backward_into(
            d_o, query, key, value, out, lse, dq, dk, dv, d_lse=d_lse, d_mask=d_mask, mask=mask, causal=causal, scale=scale,
            dropout=_dropout.native(dropout_p, dropout_draw),
        )  # fmt: skip
        return made
    frame = _Frame(out.shape, key.shape, value.shape, enable_gqa)
    if not frame.by_head and key.dim() > 2 and value.dim() > 2 and key.shape[-3] == value.shape[-3] == 1:
        # One head of keys for all is one group, whose sums are the kernel's.
        frame = _Frame(out.shape, key.shape, value.shape, True)
    given = query, key, value, mask
    sums = [is_wanted and frame.sums(of, n) for n, (is_wanted, of) in enumerate(zip(wanted, given))]
    if not query.is_cpu and query.itemsize < 4 and any(sums):
        # Kernels of GPUs round what they write: sums over what was broadcast are float32's of copies.
        d_o, out, query, key, value = (t.float() for t in (d_o, out, query, key, value))
        mask, sums = mask if mask is None or mask.dtype == torch.bool else mask.float(), wanted
    kinds = [_Made(of, is_sum) if is_wanted else None for is_wanted, of, is_sum in zip(wanted, given, sums)]
    q, k, v = frame.whole_q(query), frame.whole_kv(key), frame.whole_kv(value)
    for at in frame.pieces():
        inputs = at.rows(q), at.keys(k), at.keys(v), at.own(mask)
        parts = [None if made is None else made.part(at, of) for made, of in zip(kinds, inputs)]
        _native.backward_into(
            at.rows(d_o), *inputs[:3], at.rows(out), at.rows(lse[..., None])[..., 0], *parts[:3], d_mask=parts[3], mask=inputs[3],
            d_lse=None if d_lse is None else at.rows(d_lse[..., None])[..., 0],
            causal=causal, scale=scale, dropout=_dropout.native(dropout_p, dropout_draw, at.entries),
        )  # fmt: skip
        for made, part in zip(kinds, parts):
            if made is not None:
                made.add(at, part)
    return [made.finish() for made in kinds if made is not None]


def fake_sdpa_backward(_d_o, _d_lse, query, key, value, mask, _out, _lse, wanted, _is_causal=False, **_options):
    return _empty_like(wanted, query, key, value, mask)


def _is_one_piece(query, key, value, mask, enable_gqa):
    """Whether a call is one of the kernels as it is: four dimensions, of which none broadcasts."""
    q, k, v = query.shape, key.shape, value.shape
    if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] and k[:2] == v[:2]):
        return False
    return (enable_gqa or q[1] == k[1]) and (mask is None or mask.dim() == 4)


class _Made:
    """The gradient by `of`, which pieces write, each its part of it. One that is a sum is made in the accumulation dtype, piece after piece, and rounded once."""

    def __init__(self, of, is_sum):
        self.of, self.is_sum = of, is_sum
        self.whole = torch.zeros(of.shape, dtype=accumulation(of), device=of.device) if is_sum else torch.empty_like(of)

    def part(self, at, operand):
        """Where the kernel writes at this piece, of which `operand` is the input."""
        own = at.own(self.whole)
        if not self.is_sum:
            return own
        return own.new_empty(own.shape if own.is_cpu else operand.shape)

    def add(self, at, part):
        if self.is_sum:
            own = at.own(self.whole)
            own += part.sum_to_size(own.shape)

    def finish(self):
        return torch.empty_like(self.of).copy_(self.whole) if self.is_sum else self.whole


def _four(tensor):
    missing = 4 - tensor.dim()
    return tensor[(None,) * missing] if missing > 0 else tensor


class _Frame:
    """A call of any rank as pieces of four dimensions, as the native module cuts one that asks for no gradient."""

    def __init__(self, shape, key, value, enable_gqa):
        self.lead, self.gqa = tuple(shape[:-2]), enable_gqa
        # Heads of keys that serve groups of another size than heads of values do.
        self.by_head = enable_gqa and key[-3] != value[-3]

    def whole_q(self, query):
        """With all leading dimensions."""
        return query.expand(*self.lead, *query.shape[-2:])

    def whole_kv(self, tensor):
        """With all leading dimensions, its own heads among them where groups share one."""
        if self.gqa:
            return tensor.expand(*self.lead[:-1], *tensor.shape[-3:])
        return tensor.expand(*self.lead, *tensor.shape[-2:])

    def _sizes(self, tensor):
        return [1] * (len(self.lead) + 2 - tensor.dim()) + list(tensor.shape)

    def sums(self, tensor, n):
        """Whether the gradient by query, key, value or mask (`n`) is a sum of what kernels write: where several pieces have one part of it, or none has, and on a
        GPU where a piece broadcasts it over batch entries or heads. What a piece broadcasts in host memory its kernel sums, and what it broadcasts of a mask."""
        sizes = self._sizes(tensor)
        if any(size == 1 != whole for whole, size in zip(self.lead[:-2], sizes)) or (self.by_head and sizes[-3] != self.lead[-1]):
            return True
        if tensor.is_cpu or n == 3:
            return False
        inner = self.lead[-2:-1] if n > 0 and self.gqa else self.lead[-2:]
        return any(whole != size for whole, size in zip(inner, sizes[-2 - len(self.lead[-2:]) :]))

    def pieces(self):
        """One piece after another. Dropout numbers their batch entries as the native module does: those of a head apart are behind those of the last."""
        batch, entries = math.prod(self.lead[-2:-1]), math.prod(self.lead[:-1])
        heads = range(self.lead[-1]) if self.by_head else (None,)
        for number, outer in enumerate(itertools.product(*map(range, self.lead[:-2]))):
            for head in heads:
                yield _Piece(self.lead, outer, head, number * batch + (head or 0) * entries)


class _Piece(typing.NamedTuple):
    """Views of one piece; None of None."""

    lead: tuple
    outer: tuple
    head: object
    entries: int  # before its first batch entry

    def rows(self, tensor):
        """Of a tensor of queries, with all leading dimensions."""
        return None if tensor is None else self._cut(tensor, self.head)

    def keys(self, tensor):
        """Of keys or values."""
        return self._cut(tensor, None if self.head is None else self.head * tensor.shape[-3] // self.lead[-1])

    def own(self, tensor):
        """Of a tensor that may lack dimensions or have sizes of 1."""
        if tensor is None:
            return None
        tensor = tensor[(None,) * (len(self.lead) + 2 - tensor.dim())]
        outer = tuple(0 if size == 1 else at for size, at in zip(tensor.shape, self.outer))
        head = None if self.head is None else self.head * tensor.shape[-3] // self.lead[-1]
        return self._replace(outer=outer)._cut(tensor, head)

    def _cut(self, tensor, head):
        four = _four(tensor[self.outer] if self.outer else tensor)
        return four if head is None else four[:, head : head + 1]
