"""PyTorch's `scaled_dot_product_attention` becomes Rapt's on CPU, NVIDIA's GPUs and Apple's, for as long as it is registered.

`aten::scaled_dot_product_attention` is taken at two dispatch keys of each device: AutogradCPU, AutogradCUDA and AutogradMPS, where
ordinary tensors arrive, and CPU, CUDA and MPS, where inference tensors come straight. The native `TorchKernel` answers what models ask for;
all else comes to `_sdpa_cold`. Where a gradient is needed that records a node: that of PyTorch's flash op of the CPU (`_flash`), on a GPU
too, where it has the gradients that are asked for, else Rapt's own (`_autograd`). What Rapt does not serve goes to PyTorch's own (the composite kernel, which autograd sees
through). While something traces (fake or functional tensors, dispatch modes) it ends in Rapt's own op, which compiled graphs then carry: inductor would
otherwise decompose the aten op past us.

`aten::_scaled_dot_product_flash_attention_for_cpu` is taken too (`_flash`), for graphs that were decomposed before. PyTorch's own
composite kernel ends there as well, so every hand-over marks itself by a negative dropout_p. So is the flash op of codes (`_flash_codes`).

Nested tensors come to neither: PyTorch's Python takes them first (`_jagged`). DTensors come to the first, or to DTensor's own handlers (`_dtensor`).
"""

import contextlib

import torch
from rapt import DeviceError, _native
from rapt._native import TorchKernel

from . import _autograd, _compiled, _dropout, _dtensor, _flash, _flash_codes, _jagged, _transformers
from ._dispatcher import Held, lock
from ._stats import count_fallback

_modes = torch._C._len_torch_dispatch_stack
_OP = torch.ops.aten.scaled_dot_product_attention.default
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def own(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, mark):
    """PyTorch's own answer, gradients, autocast and transforms included."""
    if dropout_p == 0.0:
        dropout_p = mark
    return _OP._op_dk(
        _COMPOSITE, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _kernel(device, with_keyset):
    """The native kernel, which answers what models ask for: dense tensors, no gradient, nothing that traces. A request
    that PyTorch's own kernels are barred from goes the long way, where it is counted. On the GPU the strides of PyTorch's
    output depend on which of its kernels are allowed: while one is not, requests go the long way too."""
    allowed = ["flash", "math"]
    if device != "cpu":
        allowed = ["math", "flash", "mem_efficient", "cudnn"]
    flags = [getattr(torch._C, f"_get_{name}_sdp_enabled", None) for name in allowed]
    record = None if device == "mps" else _flash.RECORD
    return TorchKernel(_sdpa_cold, [flag for flag in flags if flag is not None], with_keyset, device, record)


# In inference mode nothing stands between torch.compile and the op; older torch (2.6) then decomposes it before it asks for
# a kernel. There the override is what it finds as the decomposition.
_DECOMPOSES_FIRST = not hasattr(torch.utils._python_dispatch, "autograd_would_have_decomposed")


def _decomposition(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    if _sdpa.count == 0:
        return own(*arguments, scale, enable_gqa, 0.0)
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    exporting = mode is not None and mode.export
    if exporting:
        return own(*arguments, scale, enable_gqa, _flash.TRACED)
    return _sdpa_cold(*arguments, scale=scale, enable_gqa=enable_gqa)


def _sdpa_cold(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Whatever the native kernel does not serve at once: traces, gradients, modes, and every request out of the ordinary."""
    if _sdpa.count == 0:
        return _hand_on(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    reason, order, traced = _native.torch_decide(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )  # fmt: skip
    if reason is None:
        if traced or _modes():
            options = {"scale": scale, "enable_gqa": enable_gqa}
            if dropout_p:
                options |= _dropout.words(dropout_p, _dropout.draw(query, in_graph=True))
            return torch.ops.rapt.scaled_dot_product_attention(query, key, value, attn_mask, is_causal, **options)
        try:
            if _autograd.needs_grad((query, key, value, attn_mask)):
                return _autograd.sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, order, dropout_p)
            return _native.torch_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, order, dropout_p, None)
        except DeviceError:
            # A GPU that Rapt does not serve (older than sm_80, no compiler): PyTorch's own kernel does.
            if query.device.type == "cpu":
                raise
            reason = f"device {query.device.type}"
    if not traced:
        of_ranks = _dtensor.answer(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if of_ranks is not None:
            return of_ranks
        count_fallback(reason)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.device.type != "cpu":
        with _flash.handing_over():
            return own(*arguments, 0.0)
    return own(*arguments, _flash.TRACED if traced else _flash.COUNTED)


def _hand_on(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """A call that comes while nobody is registered: PyTorch's own answer."""
    traced = bool(_modes()) or _native.torch_is_traced(query, key, value, attn_mask)
    _sdpa.is_idle(traced)
    if traced:
        return _OP(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return own(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, 0.0)


# --- counted registration ----------------------------------------------------------------------------------------------------


class _Sdpa(Held):
    def put(self, library):
        for key in ("CPU", "CUDA", "MPS"):
            above, below = _kernel(key.lower(), with_keyset=True), _kernel(key.lower(), with_keyset=False)
            library.impl("scaled_dot_product_attention", above, f"Autograd{key}", with_keyset=True)
            library.impl("scaled_dot_product_attention", below, key)
        if _DECOMPOSES_FIRST:
            _OP.py_kernels[_COMPOSITE] = _decomposition

    def taken_out(self):
        if _DECOMPOSES_FIRST:
            del _OP.py_kernels[_COMPOSITE]
        _flash.retire()
        _flash_codes.retire()


_sdpa = _Sdpa(_OP)
_mha_fastpath = True
_is_in_transformers = False


def _enter():
    global _mha_fastpath, _is_in_transformers
    _flash.take()
    _flash_codes.take()
    _mha_fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _jagged.take()
    _dtensor.take()
    _native.set_registered(True)
    _compiled.forget(registered=True)
    if not _is_in_transformers:
        _transformers.register_when_imported()
        _is_in_transformers = True


def _leave():
    _native.set_registered(False)
    _jagged.leave()
    _dtensor.leave()
    _flash.leave()
    _flash_codes.leave()
    if not torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(_mha_fastpath)
    _compiled.forget(registered=False)


def register_backend():
    """Make `torch.nn.functional.scaled_dot_product_attention` Rapt's on CPU, NVIDIA's GPUs and Apple's, in this whole process.

    Counted: n calls need n `unregister_backend()`. Also enters "rapt" into transformers, now or when it is imported.
    """
    with lock:
        _sdpa.take()
        if _sdpa.count == 1:
            try:
                _enter()
            except BaseException:
                _sdpa.leave()
                raise


def unregister_backend():
    """Take back one `register_backend()`. After the last PyTorch is as before; one more does nothing."""
    with lock:
        if _sdpa.count == 0:
            return
        _sdpa.leave()
        if _sdpa.count == 0:
            _leave()


class _Registered(contextlib.ContextDecorator):
    def __enter__(self):
        register_backend()

    def __exit__(self, *_error):
        unregister_backend()


_registered = _Registered()


def backend():
    """`with rapt.torch.backend():` Rapt is registered inside."""
    return _registered


def is_registered():
    """Whether PyTorch's `scaled_dot_product_attention` is Rapt's now."""
    return _sdpa.count > 0
