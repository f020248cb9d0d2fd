"""torch.nn.functional.scaled_dot_product_attention as PyTorch itself runs it: stock, or unlocked where the controller preloads the
answer to MKL's vendor check. Rapt's interfaces share what is here: both sides get the same tensors, options and timing.
"""

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import inputs
from peers import Prepared, Unsupported

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROUTES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def tensor(array, dtype):
    """`array` in torch's own memory, at the same strides."""
    made = torch.from_numpy(array)
    if array.dtype == inputs.np.uint16:
        made = made.view(torch.bfloat16)
    return made.clone(memory_format=torch.preserve_format)


class Tensors:
    """A row's inputs as torch tensors; `kv` has one (k, v) per rotated copy."""

    def __init__(self, row, copies):
        made = inputs.make(row)
        self.q = tensor(made.q, row.dtype)
        self.kv = [(tensor(made.k, row.dtype), tensor(made.v, row.dtype)) for _ in range(copies)]
        self.mask = None if made.mask is None else tensor(made.mask, row.dtype)
        self.numpy_mask = made.mask

    def sdpa_options(self, row):
        """Everything after q, k, v that torch's SDPA needs to compute this row."""
        options = {"enable_gqa": True} if row.num_kv_heads != row.num_q_heads else {}
        if inputs.plain_causal(row) and self.mask is None:
            return {**options, "is_causal": True}
        mask = inputs.combined_mask(row, self.numpy_mask)
        return options if mask is None else {**options, "attn_mask": tensor(mask, row.dtype)}


def calls(row, tensors, function, options):
    """One callable per copy of K and V; the *_copy layouts make theirs contiguous first, inside the call."""
    if row.layout == "permuted_copy":
        return [
            lambda q=tensors.q, k=k, v=v: function(q.contiguous(), k.contiguous(), v.contiguous(), **options) for k, v in tensors.kv
        ]
    if row.layout == "bshd_cache_copy":
        return [lambda q=tensors.q, k=k, v=v: function(q, k.contiguous(), v.contiguous(), **options) for k, v in tensors.kv]
    return [functools.partial(function, tensors.q, k, v, **options) for k, v in tensors.kv]


def grad_context(row):
    return torch.inference_mode if row.grad_mode == "inference" else torch.no_grad


def read(output):
    return output.float().numpy()


def tight(row, tensors, function, options):
    """For rows of kind "call": the call as a user would write it, and nothing else."""
    if row.kind != "call":
        return None
    k, v = tensors.kv[0]
    words = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"function(q, k, v{words})", {"function": function, "q": tensors.q, "k": k, "v": v}


class Engine:
    def __init__(self, threads, arguments):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def versions(self):
        return {"torch": torch.__version__}

    def prepare(self, row, copies):
        if row.kind == "train":
            from peers import torch_training  # which needs this module

            return torch_training.prepare(row)
        if row.kind == "add":
            a = torch.ones(4)
            return Prepared(
                [functools.partial(torch.add, a, a)], lambda: read(torch.add(a, a)), context=grad_context(row),
                tight=("add(a, a)", {"add": torch.add, "a": a}),
            )
        tensors = Tensors(row, copies)
        options = tensors.sdpa_options(row)
        function = torch.nn.functional.scaled_dot_product_attention
        made = calls(row, tensors, function, options)
        k, v = tensors.kv[0]
        if row.kind == "first":
            # Nothing may be asked of PyTorch before it is called.
            return Prepared(made, lambda: read(made[0]()), context=grad_context(row))
        try:
            route = ROUTES.get(torch._fused_sdp_choice(tensors.q, k, v, **options), "unknown")
        except (AttributeError, RuntimeError) as problem:
            route = "unknown"
            if "is_causal" in str(problem):
                raise Unsupported(str(problem)) from problem

        def math(queries):
            allowed = inputs.positional(row, queries)
            mask = tensors.mask
            if mask is not None and mask.shape[2] != 1:
                mask = mask[:, :, queries]
            if allowed is not None:
                mask = torch.from_numpy(allowed) if mask is None else mask & torch.from_numpy(allowed)
            with sdpa_kernel([SDPBackend.MATH]):
                return read(function(tensors.q[:, :, queries], k, v, attn_mask=mask, enable_gqa=options.get("enable_gqa", False)))

        return Prepared(
            made, lambda: read(made[0]()), note=route, context=grad_context(row),
            tight=tight(row, tensors, function, options), second_opinion=math,
        )
