"""DTensors as q, k and v: each rank computes what it holds, and nothing is gathered.

Sharded by batch or heads, or replicated, a rank's parts are a call of their own. Sharded by tokens they are rows of `rapt.distributed.attention` (its ring) on the
group of that dimension of the mesh: contiguous as DTensor lays them, or, inside `torch.distributed.tensor.experimental.context_parallel`, in the
order of PyTorch's load balancer, which is zigzag. Gradients go by DTensor's own `to_local` and `from_local`.

Deliberately absent: an import of torch.distributed where nobody has one, masks that are DTensors, and placements that differ between q, k and v.
"""

import sys

import torch

from ._imports import when_imported
from ._stats import count_fallback

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


# --- inference tensors -------------------------------------------------------------------------------------------------------

# No kernel of autograd stands before DTensor then, which asks its handlers of ops.
_is_taken = False


def take():
    """DTensor's handler of the op is Rapt's, now or when DTensor is loaded."""
    global _is_taken
    _is_taken = True
    when_imported("torch.distributed.tensor", _put)


def leave():
    """DTensor is as before."""
    global _is_taken
    _is_taken = False
    of = class_of_dtensor()
    if of is not None:
        for handlers in _all_handlers(of):
            handlers.pop(_SDPA, None)


def _put(module):
    if _is_taken:
        for handlers in _all_handlers(module.DTensor):
            handlers.setdefault(_SDPA, _handler)


def _all_handlers(of):
    """Those that are asked, and those that context_parallel puts back when it is left."""
    parallel = sys.modules.get(_PARALLEL)
    return [of._op_dispatcher._custom_op_handlers] + ([] if parallel is None else [parallel.existing_custom_ops])


def _handler(op, args, options):
    if not torch.compiler.is_compiling():
        of_ranks = answer(*_named(*args, **options))
        if of_ranks is not None:
            return of_ranks
        count_fallback("tensor subclass DTensor")
    return op.decompose(*args, **options)


def _named(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


# --- the answer --------------------------------------------------------------------------------------------------------------


def class_of_dtensor():
    """The class, where somebody has loaded it."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return getattr(loaded, "DTensor", None)


def answer(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """The answer as a DTensor placed as `query` is; None where these are no DTensors or are not served."""
    of = class_of_dtensor()
    if of is None or not all(type(t) is of for t in (query, key, value)) or attn_mask is not None or dropout_p != 0.0:
        return None
    placements, mesh = query.placements, query.device_mesh
    if any(t.placements != placements or t.device_mesh != mesh or t.dim() != 4 for t in (query, key, value)):
        return None
    tokens = _tokens_dimension(placements, mesh, query, key)
    if tokens is False:
        return None
    q, k, v = (t.to_local() for t in (query, key, value))
    if tokens is None:
        out = _sdpa(q, k, v, is_causal, scale, enable_gqa)
    else:
        out = _ring(mesh.get_group(tokens), q, k, v, is_causal, scale, enable_gqa)
        if out is None:
            return None
    sizes = torch.Size((*query.shape[:-1], value.shape[-1]))
    return of.from_local(out, mesh, placements, run_check=False, shape=sizes, stride=_strides(sizes, out))


def _tokens_dimension(placements, mesh, query, key):
    """Which dimension of the mesh has the tokens: None is none, False that a placement is not served."""
    tokens = None
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim > 2 or type(placement).__name__ != "Shard":
            return False
        if placement.dim == 2:
            if tokens is not None:
                return False
            tokens = dimension
        elif placement.dim == 1 and any(t.shape[1] % mesh.size(dimension) for t in (query, key)):
            return False  # groups of heads would be cut
    return tokens


def _sdpa(q, k, v, is_causal, scale, enable_gqa):
    # The op, not the function: while context_parallel is entered the function makes DTensors of what it gets.
    return _SDPA(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def _ring(group, q, k, v, is_causal, scale, enable_gqa):
    from rapt import distributed

    is_refused = torch.is_grad_enabled() and not (q.is_cpu or q.is_cuda) and any(t.requires_grad for t in (q, k, v))
    heads = q.shape[1], k.shape[1]
    if is_refused or q.shape[0] != k.shape[0] or heads[0] != heads[1] and not enable_gqa or not heads[1] or heads[0] % heads[1]:
        return None
    causal = "top_left" if is_causal else None
    return distributed.attention(q, k, v, group=group, order=_order(), causal=causal, scale=scale)


def _order():
    """As tokens lie: as PyTorch's context_parallel has dealt them, where it is entered."""
    parallel = sys.modules.get(_PARALLEL)
    if parallel is None or _FLASH not in class_of_dtensor()._op_dispatcher._custom_op_handlers:
        return "contiguous"
    return "zigzag" if parallel._cp_options.enable_load_balance else "contiguous"


def _strides(sizes, local):
    """Strides of the whole, whose dimensions lie in memory as those of a part."""
    strides, step = [0] * len(sizes), 1
    for dimension in sorted(range(len(sizes)), key=lambda at: (local.stride(at), -at)):
        strides[dimension] = step
        step *= max(1, sizes[dimension])
    return tuple(strides)
