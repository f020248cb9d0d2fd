"""PyTorch's flash kernels answered by Rapt: for graphs that carry their ops, and as "RAPT" among PyTorch's flash implementations.

    torch.nn.attention.activate_flash_attention_impl("RAPT")     PyTorch's flash kernel is Rapt's, on CPU and on NVIDIA GPUs
    torch.nn.attention.restore_flash_attention_impl()            it is PyTorch's own again

`scaled_dot_product_attention` goes on choosing as it does; what it gives to flash arrives here. Importing enters the name and
activates nothing. `register_backend` takes the CPU op too, so it is counted: the last one to leave gives it back.
What Rapt does not serve (dropout, here gradients on a GPU) is PyTorch's own kernel's, and counted with its reason.
"""

import contextlib
import math
import threading

import torch
from rapt import _native

from . import _autograd, _flash_codes, _outputs, _stock
from ._dispatcher import Held
from ._stats import count_fallback, count_served

NAME = "RAPT"
_CPU, _CUDA = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"

# Without `get_kernel` (torch < 2.9) there is no way back to PyTorch's flash kernel once it is replaced: it stays, unmarked.
TAKES_FLASH = hasattr(torch.library, "get_kernel")
# How whoever hands a request over to PyTorch's own kernel marks it on the CPU: a dropout_p below 0, which PyTorch asks only
# whether it is > 0, and which graphs keep. (-0.0 would not do: the dispatcher drops arguments equal to their default.)
COUNTED = -1.0 if TAKES_FLASH else 0.0  # this hand-over is counted
TRACED = -2.0 if TAKES_FLASH else 0.0  # this one is part of a graph: to be decided when it runs
# The mark of a node that PyTorch makes for what Rapt has computed: its gradients are Rapt's too.
RECORDED = _native.TORCH_RECORDED

_handing_over = threading.local()


@contextlib.contextmanager
def handing_over():
    """What arrives at a flash op inside was refused and counted already: the GPU's kernels take no mark in dropout_p."""
    _handing_over.now = True
    try:
        yield
    finally:
        _handing_over.now = False


# --- the ops -----------------------------------------------------------------------------------------------------------------


def _flash_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """`_scaled_dot_product_flash_attention_for_cpu` -> (out, lse)."""

    def own(dropout_p):
        return _cpu.stock.call_boxed(
            _CPU_KEYS, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )  # fmt: skip

    if _cpu.is_idle():
        return own(0.0 if dropout_p < 0.0 else dropout_p)
    if dropout_p == COUNTED:
        return own(0.0)
    dropout_p = max(0.0, dropout_p)
    # PyTorch's kernel of this op drops nothing and refuses to: that is not Rapt's to serve.
    reason = "dropout"
    if dropout_p == 0.0:
        reason, _, _ = _native.torch_decide(query, key, value, attn_mask, dropout_p, is_causal, scale, True)
    if reason is not None:
        count_fallback(reason)
        return own(dropout_p)
    out = _outputs.new(query, query.shape, "query" if _stock.ask().follows_query else "bshd")
    batch, heads, q_len, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = torch.empty((batch, q_len, heads), dtype=lse_dtype).transpose(1, 2)
    causal = "top_left" if is_causal else None
    _native.run_into(query, key, value, out, lse, mask=attn_mask, causal=causal, scale=scale)
    # PyTorch writes 0 where every key is masked, and its backward kernel reads exp(-inf - lse).
    lse.masked_fill_(lse == -math.inf, 0.0)
    count_served()
    return out, lse


def _flash_cpu_backward(
    keyset, d_o, query, key, value, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None
):  # fmt: skip
    """`_scaled_dot_product_flash_attention_for_cpu_backward` -> (dq, dk, dv). Its forward was counted."""

    def own(dropout_p):
        return _cpu_backward.stock.call_boxed(
            keyset, d_o, query, key, value, out, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )  # fmt: skip

    if dropout_p == RECORDED:
        return _recorded_backward(d_o, query, key, value, out, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    is_own = _cpu_backward.is_idle() or dropout_p == COUNTED
    dropout_p = max(0.0, dropout_p)
    if is_own:
        return own(dropout_p)
    reason, _, _ = _native.torch_decide(query, key, value, attn_mask, dropout_p, is_causal, scale, True)
    if reason is not None:
        return own(dropout_p)
    made = [_outputs.new(of, of.shape, "bshd") for of in (query, key, value)]
    causal = "top_left" if is_causal else None
    _native.backward_into(d_o, query, key, value, out, lse, *made, mask=attn_mask, causal=causal, scale=scale)
    return tuple(made)


def _flash_cpu_backward_of_autograd(keyset, *args, **options):
    """The same where autograd would record it."""
    dropout_p = args[6]
    if dropout_p == RECORDED:
        return _recorded_backward(*args, **options)
    _cpu_backward_of_autograd.is_idle()
    return _cpu_backward_of_autograd.stock.call_boxed(keyset, *args, **options)


def _flash_cpu_backward_on_cuda(_keyset, *args, **options):
    """The same on a GPU, where only nodes ask for it."""
    dropout_p = args[6]
    return _recorded_backward(*args, **options) if dropout_p == RECORDED else _no_kernel()


def _no_kernel(*_arguments, **_options):
    raise NotImplementedError("PyTorch's flash op of the CPU has no kernel for a GPU: there Rapt has it for nodes of autograd alone")


def _recorded_backward(d_o, query, key, value, out, lse, _dropout_p, is_causal, *, attn_mask=None, scale=None):
    """Gradients of a call that was recorded, whatever traces, batches or differentiates them."""
    if d_o is None:
        return None, None, None
    call = _autograd.Sdpa(False, is_causal, scale, True, None, [], 0.0, None)
    wanted = True, True, True, False
    return tuple(_autograd.gradients(call, wanted, d_o, None, query, key, value, attn_mask, out, lse)[:3])


def _flash_cuda(
    keyset, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):  # fmt: skip
    """`_scaled_dot_product_flash_attention` -> (out, lse, and what its backward kernel would need of dropout)."""

    def own():
        return _cuda.stock.call_boxed(
            keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
        )  # fmt: skip

    if getattr(_handing_over, "now", False):
        return own()
    # Which weights are dropped is the state that PyTorch's own kernel hands to its backward op.
    reason = "dropout"
    if dropout_p == 0.0:
        reason, _, _ = _native.torch_decide(query, key, value, None, 0.0, is_causal, scale, True, return_debug_mask)
    # The backward op of PyTorch's flash kernel reads the lse and the random state that its own forward writes.
    if reason is None and _autograd.needs_grad((query, key, value)):
        reason = "requires grad"
    if reason is not None:
        count_fallback(reason)
        return own()
    out = _outputs.new(query, (*query.shape[:-1], value.shape[-1]), "query")
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    causal = "top_left" if is_causal else None
    _native.run_into(query, key, value, out, lse, causal=causal, scale=scale)
    count_served()
    seed, offset = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


class _Flash(Held):
    """One of these ops; `stock` is PyTorch's own kernel, which a call is handed on to."""

    def __init__(self, name, key, kernel, with_keyset=True):
        super().__init__(getattr(torch.ops.aten, name).default)
        self.name, self.key, self.kernel, self.stock, self.with_keyset = name, key, kernel, None, with_keyset

    def put(self, library):
        if torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{self.name}", self.key):
            self.stock = torch.library.get_kernel(f"aten::{self.name}", self.key)
        library.impl(self.name, self.kernel, self.key, with_keyset=self.with_keyset, allow_override=True)


class _Backward(_Flash):
    """A backward op, which stays Rapt's while a node lives that was made for Rapt: its gradients may be asked for at any time."""

    def retire(self):
        if _native.torch_nodes() == 0:
            super().retire()


# Whoever is told the keys of a call waits a microsecond for them, and PyTorch's kernel of the CPU asks for none.
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_cpu = _Flash(_CPU, "CPU", _native.TorchFlash(_flash_cpu), with_keyset=False)
_cuda = _Flash(_CUDA, "CUDA", _flash_cuda)
_cpu_backward = _Backward(f"{_CPU}_backward", "CPU", _flash_cpu_backward)
_cpu_backward_of_autograd = _Backward(
    f"{_CPU}_backward", "AutogradCPU", _native.TorchFlashBackward(_flash_cpu_backward_of_autograd, "cpu")
)
_of_cpu = (_cpu, _cpu_backward, _cpu_backward_of_autograd)
# On a GPU the same ops are nobody's but Rapt's.
_of_backend = (
    *_of_cpu,
    _Flash(_CPU, "CUDA", _native.TorchFlash(_no_kernel), with_keyset=False),
    _Backward(f"{_CPU}_backward", "CUDA", _flash_cpu_backward_on_cuda),
    _Backward(f"{_CPU}_backward", "AutogradCUDA", _native.TorchFlashBackward(_flash_cpu_backward_on_cuda, "cuda")),
)

# What makes a node for what Rapt has computed.
RECORD = getattr(torch, _CPU, getattr(torch.ops.aten, _CPU)) if TAKES_FLASH else None


def take():
    """Make the flash ops of the CPU Rapt's, where there is a way back; on a GPU too, where they make nodes alone."""
    if TAKES_FLASH:
        for op in _of_backend:
            op.take()


def leave():
    """Take back one `take()`: the kernels stay, idle."""
    if TAKES_FLASH:
        for op in _of_backend:
            op.leave()


def retire():
    """Take the idle kernels out."""
    for op in _of_backend:
        op.retire()


# --- PyTorch's registry ------------------------------------------------------------------------------------------------------


class _Handle:
    """What PyTorch keeps while "RAPT" is active."""

    def __init__(self):
        self.held, self.codes = [], False
        try:
            for op in (*_of_cpu, _cuda) if _has_cuda() else _of_cpu:
                op.take()
                self.held.append(op)
            _flash_codes.take()
            self.codes = True
        except BaseException:
            self.remove()
            raise

    def remove(self):
        while self.held:
            op = self.held.pop()
            op.leave()
            op.retire()
        if self.codes:
            self.codes = False
            _flash_codes.leave()
            _flash_codes.retire()


def _has_cuda():
    """Whether this build of torch has the GPU's flash kernel."""
    return torch.version.cuda is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_CUDA}", "CUDA")


def register():
    """Enter "RAPT" among PyTorch's flash implementations, where this torch has such a list (2.11)."""
    enter = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if enter is not None and TAKES_FLASH:
        enter(NAME, register_fn=_Handle)
