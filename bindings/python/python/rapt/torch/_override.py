"""PyTorch's `scaled_dot_product_attention` becomes Rapt's on CPU and GPU, for as long as it is registered.

`aten::scaled_dot_product_attention` is taken at two dispatch keys of each device: AutogradCPU and AutogradCUDA, where ordinary
tensors arrive, and CPU and CUDA, where inference tensors come straight. The native `TorchKernel` answers what models ask for;
all else comes to `_sdpa_cold`. Where a gradient is needed that hands on to PyTorch's own (the composite kernel, which autograd
sees through), else no graph is recorded. While something traces (fake or functional tensors, dispatch modes) it ends in Rapt's
own op, which compiled graphs then carry: inductor would otherwise decompose the aten op past us.

`aten::_scaled_dot_product_flash_attention_for_cpu` is taken too (`_flash`), for graphs that were decomposed before. PyTorch's own
composite kernel ends there as well, so every hand-over marks itself by a negative dropout_p.
"""

import contextlib
import sys
import threading

import torch
from rapt import DeviceError
from rapt._native import TorchKernel

from . import _flash, _ops, _route, _strides, _transformers
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


def _kernel(on_gpu, with_keyset):
    """The native kernel, which answers what models ask for: dense tensors, no gradient, nothing that traces. A request
    that PyTorch's own kernels are barred from goes the long way, where it is counted. On the GPU the strides of PyTorch's
    output depend on which of its kernels are allowed: while one is not, requests go the long way too."""
    allowed = [torch._C._get_flash_sdp_enabled, torch._C._get_math_sdp_enabled]
    if on_gpu:
        allowed = [torch._C._get_math_sdp_enabled, *_route.FUSED]
    empty_out = _strides.empty_out_cuda if on_gpu else _strides.empty_out
    return TorchKernel(_sdpa_cold, empty_out, allowed, torch.autograd.forward_ad, with_keyset, on_gpu)


# In inference mode nothing stands between torch.compile and the op; older torch (2.6) then decomposes it before it asks for
# a kernel. There the override is what it finds as the decomposition.
_DECOMPOSES_FIRST = not hasattr(torch.utils._python_dispatch, "autograd_would_have_decomposed")


def _decomposition(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    exporting = mode is not None and mode.export
    if exporting:
        return own(*arguments, scale, enable_gqa, _flash.TRACED)
    return _sdpa_cold(*arguments, scale=scale, enable_gqa=enable_gqa)


def _sdpa_cold(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Whatever the native kernel does not serve at once: traces, gradients, modes, and every request out of the ordinary."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    traced = _ops.is_traced(*tensors)
    if traced:
        # Plain constants may stand beside fake tensors; any other subclass has its own idea of an op.
        reason = _flash.why_not_plain([t for t in tensors if not _ops.is_traced(t)])
    else:
        reason = _flash.why_not_plain(tensors)
    if reason is None:
        reason = _route.fallback_reason(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )  # fmt: skip
    if reason is None:
        if traced or _modes():
            return torch.ops.rapt.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        try:
            return _ops.serve(query, key, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa)
        except DeviceError:
            # A GPU that Rapt does not serve (older than sm_80, no compiler): PyTorch's own kernel does.
            if query.device.type != "cuda":
                raise
            reason = "device cuda"
    if not traced:
        count_fallback(reason)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.device.type == "cuda":
        with _flash.handing_over():
            return own(*arguments, 0.0)
    return own(*arguments, _flash.TRACED if traced else _flash.COUNTED)


# --- counted registration ----------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_count = 0
_library = None
_mha_fastpath = True


def _cache_tag():
    from rapt import __version__

    return f"rapt-{__version__}"


def _drop_compiled(add):
    """Forget what was compiled under the other kernel, in memory and (by another key) on disk, and the kernels that torch's
    Python dispatcher has looked up (tracing goes through it; a new registration does not clear its cache)."""
    _OP._dispatch_cache.clear()
    try:
        from torch.compiler import config
    except ImportError:  # torch < 2.7
        config = None
    if config is not None and hasattr(config, "cache_key_tag"):
        parts = [p for p in config.cache_key_tag.split("+") if p and p != _cache_tag()]
        config.cache_key_tag = "+".join([*parts, _cache_tag()] if add else parts)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _activate():
    global _library, _mha_fastpath
    _strides.stock()
    library = torch.library.Library("aten", "IMPL")
    try:
        for key, on_gpu in (("CPU", False), ("CUDA", True)):
            above, below = _kernel(on_gpu, with_keyset=True), _kernel(on_gpu, with_keyset=False)
            library.impl("scaled_dot_product_attention", above, f"Autograd{key}", with_keyset=True)
            library.impl("scaled_dot_product_attention", below, key)
        _flash.take_cpu()
        if _DECOMPOSES_FIRST:
            _OP.py_kernels[_COMPOSITE] = _decomposition
    except BaseException:
        library._destroy()
        raise
    _library = library
    _mha_fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _drop_compiled(add=True)


def _deactivate():
    global _library
    _library._destroy()
    _library = None
    _flash.leave_cpu()
    if _DECOMPOSES_FIRST:
        del _OP.py_kernels[_COMPOSITE]
    if not torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(_mha_fastpath)
    _drop_compiled(add=False)


def register_backend():
    """Make `torch.nn.functional.scaled_dot_product_attention` Rapt's on CPU and GPU, in this whole process.

    Counted: n calls need n `unregister_backend()`. Also enters "rapt" into transformers, now or when it is imported.
    """
    global _count
    with _lock:
        if _count == 0:
            _activate()
            _transformers.register_when_imported()
        _count += 1


def unregister_backend():
    """Take back one `register_backend()`. After the last PyTorch is as before; one more does nothing."""
    global _count
    with _lock:
        if _count == 0:
            return
        _count -= 1
        if _count == 0:
            _deactivate()


@contextlib.contextmanager
def backend():
    """`with rapt.torch.backend():` Rapt is registered inside."""
    register_backend()
    try:
        yield
    finally:
        unregister_backend()


def is_registered():
    """Whether PyTorch's `scaled_dot_product_attention` is Rapt's now."""
    return _count > 0
