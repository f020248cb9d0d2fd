"""Correct attentions by others, which the auditor must not accuse falsely. Each imports what it needs when first called."""

import functools

import numpy as np


def einsum_numpy(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The formula by numpy.einsum, in the dtype of its inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    with np.errstate(all="ignore"):
        s = np.einsum("bhid,bhjd->bhij", q, k) * q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            s = np.where(np.tri(*s.shape[2:], dtype=bool), s, q.dtype.type(-np.inf))
        if attn_mask is not None:
            s = np.where(attn_mask, s, q.dtype.type(-np.inf)) if attn_mask.dtype == bool else s + attn_mask
        p = np.exp(s - s.max(-1, keepdims=True, initial=np.finfo(q.dtype).min))
        return np.einsum("bhij,bhjd->bhid", p / np.maximum(p.sum(-1, keepdims=True), np.finfo(q.dtype).tiny), v)


def einsum_torch(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The formula by torch.einsum, in the dtype of its inputs."""
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).tril().logical_not(), -torch.inf)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


def math_path(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """PyTorch's own math kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


@functools.cache
def _compiled():
    import torch

    def formula(q, k, v, attn_mask, is_causal: bool, scale: float):
        s = q @ k.transpose(-1, -2) * scale
        if is_causal:
            s = s.masked_fill(torch.ones(s.shape[-2], s.shape[-1], dtype=torch.bool).tril().logical_not(), -torch.inf)
        if attn_mask is not None:
            s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask
        return s.softmax(-1) @ v

    # Sizes, scales and strides vary from call to call: one graph for all of them where that can be.
    torch._dynamo.config.recompile_limit = 400
    torch._dynamo.config.accumulated_recompile_limit = 4000
    return torch.compile(formula, dynamic=True)


def compiled_formula(q, k, v, attn_mask=None, is_causal=False, scale=None):
    """The formula through torch.compile."""
    return _compiled()(q, k, v, attn_mask, is_causal, float(q.shape[-1] ** -0.5 if scale is None else scale))


@functools.cache
def _session(mask, causal, scale):
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    names = ["q", "k", "v", *(["mask"] if mask else [])]
    types = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL}
    dims = {name: [f"{name}{dim}" for dim in range(4)] for name in [*names, "out"]}
    inputs = [helper.make_tensor_value_info(n, types[mask] if n == "mask" else TensorProto.FLOAT, dims[n]) for n in names]
    node = helper.make_node("Attention", names, ["out"], is_causal=int(causal), scale=scale)
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, dims["out"])]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    # Its threads spin where they wait for one another: small calls would keep all cores busy.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def onnxruntime_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """ONNX's Attention (opset 23) by onnxruntime, float32."""
    if q.dtype != np.float32 or 0 in (*q.shape, *k.shape):
        raise TypeError("float32 of some elements")
    feeds = {"q": q, "k": k, "v": v}
    if attn_mask is not None:
        shape = np.broadcast_shapes(attn_mask.shape, (1, 1, q.shape[2], k.shape[2]))
        feeds["mask"] = np.broadcast_to(attn_mask, shape)
    feeds = {name: np.ascontiguousarray(x) for name, x in feeds.items()}
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    mask = None if attn_mask is None else str(attn_mask.dtype)
    return _session(mask, is_causal, scale).run(None, feeds)[0]
