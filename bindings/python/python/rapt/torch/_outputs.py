"""Outputs with the strides that PyTorch's own kernel would give, so that every `.view` legal after stock stays legal
(dimensions of size 1, and tensors without elements, are viewed the same whatever their strides).

Which order of dimensions that is, the native module decides; this file makes such tensors, of a trace or not.
"""

import torch


def broadcast(*shapes):
    """The common shape, or None. (`torch.broadcast_shapes` takes 15 µs.)"""
    rank = max(map(len, shapes))
    out = [1] * rank
    for shape in shapes:
        for d, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                if out[d] != 1 and out[d] != size:
                    return None
                out[d] = size
    return out


def shape_of(q, k, v, enable_gqa):
    """Shape of the answer to a valid request of these shapes: leading dimensions broadcast, heads by group with GQA."""
    leading = [q[:-2], k[:-2], v[:-2]]
    if enable_gqa:
        leading = [s[:-1] for s in leading]
    leading = broadcast(*leading)
    if enable_gqa:
        leading = (*leading, q[-3])
    return (*leading, q[-2], v[-1])


def _like_query(query, shape, dtype=None):
    """The dimensions in memory in the order of q's."""
    if tuple(shape) == tuple(query.shape):
        return torch.empty_like(query, dtype=dtype)
    order = sorted(range(4), key=lambda d: -query.stride(d))
    back = [order.index(d) for d in range(4)]
    return query.new_empty([shape[d] for d in order], dtype=dtype).permute(back)


def _bshd(query, shape, dtype=None):
    """[batch, q_len, heads, head_dim] in memory, whose batch a shape of three dimensions lacks."""
    *batch, heads, q_len, head_dim = shape
    return query.new_empty((*batch, q_len, heads, head_dim), dtype=dtype).transpose(-3, -2)


def _row_major(query, shape, dtype=None):
    return query.new_empty(shape, dtype=dtype)


_ORDERS = {"row_major": _row_major, "query": _like_query, "bshd": _bshd}


def new(query, shape, order, dtype=None):
    """An uninitialised tensor of this shape; `order` is "row_major", "query" or "bshd". Without a dtype it has q's."""
    return _ORDERS[order](query, shape, dtype)
