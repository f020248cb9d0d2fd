"""Who is measured: Rapt's interfaces and its peers, each a function of tensors that lie where they lie.

An engine gets a row and its tensors once (`prepare`) and gives back a call without arguments per rotated copy of K and V; what it
does not take it says by `Unsupported`. Of a row of kind backward the forward pass runs once, in `prepare`, and the call is the
backward of what it kept: gradients of q, k and v. d_o lies there as the engine's own output does, where a loss would leave it.
Deliberately absent: any fallback. SDPA's peers run under `sdpa_kernel` with one kernel allowed.
"""

import contextlib
import functools
import importlib
import importlib.metadata

import rapt


class Unsupported(Exception):
    """This engine does not do this row; the message says why."""


class Engine:
    """A peer by torch's scaled_dot_product_attention, one kernel of it."""

    ours = False
    kinds = ("prefill", "decode", "backward")
    everywhere = True
    """Takes part in every row of its kinds; else only where a row names it."""
    is_rounded = False
    """Rounds what it multiplies, so that its whole output is none to hold Rapt's against."""

    def __init__(self, name, title, colour, backend=None):
        self.name, self.title, self.colour, self.backend = name, title, colour, backend
        self.why_not = self.find()

    def find(self):
        """Why this engine is not here at all, or None."""
        from torch.nn.attention import SDPBackend

        return None if self.backend is None or hasattr(SDPBackend, self.backend) else "this torch has no such kernel"

    def takes(self, row):
        return row.kind in self.kinds and (self.everywhere or self.name in row.peers)

    def context(self):
        """Entered around every batch of calls."""
        if self.backend is None:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, self.backend)])

    def prepare(self, row, tensors):
        """[call, …], one for each copy of K and V."""
        refuse_caches(row)
        function = self.function(row, tensors)
        q, *kv = (self.operand(x) for x in (tensors.q, *(x for pair in tensors.kv for x in pair)))
        if row.kind != "backward":
            return [functools.partial(function, q, k, v) for k, v in zip(kv[::2], kv[1::2])]
        return [self.gradients(function, (q, *kv), tensors.d_o)]

    def operand(self, x):
        """q, k, v or d_o `[batch, heads, len, head_dim]` as this engine takes it."""
        return x

    def gradients(self, function, operands, d_o):
        """A call of the backward of one forward pass."""
        import torch

        leaves = [x.detach().requires_grad_() for x in operands]
        with torch.enable_grad(), self.context():
            out = function(*leaves)
        arriving = torch.empty_like(out, requires_grad=False).copy_(self.operand(d_o))
        return functools.partial(torch.autograd.grad, out, leaves, arriving, retain_graph=True)

    def function(self, row, tensors):
        """The row's attention of q, k and v."""
        import torch.nn.functional as F

        if row.window or row.softcap:
            raise Unsupported("scaled_dot_product_attention has no window and no softcap")
        if row.causal == "bottom_right" and row.q_len != row.kv_len:
            raise Unsupported("is_causal is aligned to the top left")
        if row.causal != "none" and tensors.mask is not None:
            raise Unsupported("scaled_dot_product_attention takes no mask together with is_causal")
        options = {"attn_mask": tensors.mask, "is_causal": row.causal != "none"}
        if row.num_q_heads != row.num_kv_heads:
            options["enable_gqa"] = True
        return functools.partial(F.scaled_dot_product_attention, **options)

    def answer(self, out):
        """What a call gave as it is checked, outside the timed calls."""
        return out

    def note(self, row, tensors):
        """What ran, for the record."""
        return ""


def refuse_caches(row):
    """What no peer takes that has tensors of numbers alone."""
    if row.formats or row.page_size:
        raise Unsupported("K and V are codes" if row.formats else "K and V lie in pages")


class Rapt(Engine):
    """`rapt.attention`, `rapt.attention_backward`, and `rapt.attention_with_kvcache` on the rows of caches."""

    ours = True
    kinds = ("prefill", "decode", "backward", "call")

    def options(self, row, tensors):
        options = {"mask": tensors.mask, "causal": None if row.causal == "none" else row.causal}
        if row.window:
            options["window"] = (row.window - 1, None)
        if row.softcap:
            options["softcap"] = row.softcap
        if row.compute != "exact":
            options["compute"] = row.compute
        return options

    def prepare(self, row, tensors):
        if row.cache != "none":
            return self.over_caches(row, tensors)
        if row.kind == "backward":
            qkv, options = (tensors.q, *tensors.kv[0]), self.options(row, tensors)
            out, lse = rapt.attention(*qkv, return_lse=True, **options)
            return [functools.partial(rapt.attention_backward, tensors.d_o, *qkv, out, lse, **options)]
        return [functools.partial(rapt.attention, tensors.q, k, v, **self.options(row, tensors)) for k, v in tensors.kv]

    def over_caches(self, row, tensors):
        """Calls on full caches, whose lengths the device holds."""
        import torch

        lengths = torch.full((row.batch,), row.kv_len, dtype=torch.int32, device=tensors.q.device)
        options = {name: value for name, value in self.options(row, tensors).items() if name != "mask"}

        def call(k, v):
            out = rapt.attention_with_kvcache(
                tensors.q.transpose(1, 2), k, v, cache_seqlens=lengths, page_table=tensors.page_table, **options
            )
            return out.transpose(1, 2)

        kv = tensors.kv if row.page_size else [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in tensors.kv]
        return [functools.partial(call, k, v) for k, v in kv]

    def note(self, row, tensors):
        if row.cache != "none":
            return "attention_with_kvcache"
        if row.kind == "backward":
            return "attention_backward"
        plan = rapt.explain(tensors.q, *tensors.kv[0], **self.options(row, tensors))
        return f"{plan.kernel}, {plan.block_m}x{plan.block_n}, {plan.num_splits} splits"


class RaptSdpa(Engine):
    """torch's function while Rapt is registered behind it."""

    ours = True
    kinds = ("call",)

    def context(self):
        return rapt.torch.backend()


class Sdpa(Engine):
    """torch's function as it is: the kernel that it picks by itself, and what it costs on the host."""

    kinds = ("prefill", "decode", "backward", "call")

    def note(self, row, tensors):
        return picked(row, tensors) or ""


class Add(Engine):
    """torch.add on 4 elements, for scale."""

    kinds = ("add",)

    def prepare(self, row, tensors):
        import torch

        return [functools.partial(torch.add, tensors.q, tensors.q)]


class Flex(Engine):
    """torch's flex_attention, compiled for the row."""

    everywhere = False

    def find(self):
        try:
            importlib.import_module("torch.nn.attention.flex_attention")
        except ImportError as error:
            return str(error)
        return None

    @functools.cached_property
    def compiled(self):
        import torch
        import torch._functorch.config
        from torch.nn.attention.flex_attention import flex_attention

        # A backward that runs many times may not give the memory of what it reads to what it writes.
        torch._functorch.config.donated_buffer = False
        return torch.compile(flex_attention, dynamic=False)

    def function(self, row, tensors):
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        options, rule, batch = {"enable_gqa": row.num_q_heads != row.num_kv_heads}, None, None
        if row.softcap:
            cap = row.softcap
            options["score_mod"] = lambda score, b, h, i, j: cap * torch.tanh(score / cap)
        if row.causal != "none":
            offset = row.kv_len - row.q_len if row.causal == "bottom_right" else 0
            width = row.window or row.kv_len + row.q_len
            rule = lambda b, h, i, j: (j <= i + offset) & (j > i + offset - width)  # noqa: E731
        if tensors.mask is not None:
            if options.get("score_mod") or rule:
                raise Unsupported("a mask tensor is measured alone")
            mask = tensors.mask.expand(row.batch, 1, row.q_len, row.kv_len)
            if row.mask.startswith("additive"):
                options["score_mod"] = lambda score, b, h, i, j: score + mask[b, 0, i, j]
            else:
                rule, batch = (lambda b, h, i, j: mask[b, 0, i, j]), row.batch
        if rule:
            options["block_mask"] = create_block_mask(rule, batch, None, row.q_len, row.kv_len, device=tensors.q.device)
        return functools.partial(self.compiled, **options)


class Fa4(Engine):
    """FlashAttention-4 (flash-attn-4, CuTe DSL), where it imports. It compiles for the row, seconds each."""

    kinds = ("prefill", "backward")

    def find(self):
        try:
            self.flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func
        except Exception as error:  # noqa: BLE001 - a half-installed package fails in its own ways
            return f"flash_attn.cute does not import: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None

    def operand(self, x):
        return x.transpose(1, 2)

    def function(self, row, tensors):
        if row.dtype not in ("bf16", "f16"):
            raise Unsupported("16-bit dtypes only")
        if tensors.mask is not None:
            raise Unsupported("no mask tensors")
        options = {"causal": row.causal != "none"}
        if row.window:
            options = {"window_size": (row.window - 1, 0)}
        if row.softcap:
            options["softcap"] = row.softcap

        def call(q, k, v):
            out = self.flash_attn_func(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return call

    def answer(self, out):
        return [x.transpose(1, 2) for x in out] if isinstance(out, tuple) else out.transpose(1, 2)

    def note(self, row, tensors):
        try:
            return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"
        except importlib.metadata.PackageNotFoundError:
            return "flash_attn.cute"


class CudnnFp8(Engine):
    """cuDNN's attention of float8 q, k and v, by its own Python package (nvidia-cudnn-frontend): q, the weights and the output are
    rounded to float8 too, as Hopper's kernels want them. It takes no single query: those of a group are the rows of its key head then,
    and zeros behind them where it asks for more."""

    kinds = ("prefill", "decode")
    everywhere = False
    is_rounded = True
    out_scale = 64.0
    """The output is stored times this, or that of many keys would fall among float8's subnormal numbers."""
    least_rows = 128
    """Queries that it is asked with where it refuses fewer."""

    def find(self):
        try:
            self.cudnn = importlib.import_module("cudnn")
        except Exception as error:  # noqa: BLE001 - a half-installed package fails in its own ways
            return f"cudnn (nvidia-cudnn-frontend) does not import: {type(error).__name__}"
        return None

    @functools.cached_property
    def handle(self):
        return self.cudnn.create_handle()

    def prepare(self, row, tensors):
        import torch

        if row.formats != (("e4m3fn", "tensor"),) * 2:
            raise Unsupported("e4m3fn with one factor for all alone")
        if row.causal != "none" or row.window or row.softcap or row.mask != "none":
            raise Unsupported("measured without masks alone")
        q = rapt.quantize(tensors.q.float().cpu(), "e4m3fn")
        factors = [x.scale.float().reshape(1, 1, 1, 1).to(tensors.q.device) for x in (q, *tensors.kv[0])]
        codes = q.codes.to(tensors.q.device)
        if row.q_len > 1:
            return self.calls(codes, factors, row, tensors.kv)
        of_groups = codes.reshape(row.batch, row.num_kv_heads, -1, row.head_dim)
        behind = self.least_rows - of_groups.shape[2]
        padded = torch.nn.functional.pad(of_groups.view(torch.uint8), (0, 0, 0, behind)).view(codes.dtype)
        for rows in (codes, of_groups):
            try:
                return self.calls(rows, factors, row, tensors.kv)
            except self.cudnn.cudnnGraphNotSupportedError:
                pass
        return self.calls(padded, factors, row, tensors.kv)

    def calls(self, codes, factors, row, kv):
        """[call, …] with these queries; what cuDNN raises where it has no kernel for them."""
        import torch

        cudnn = self.cudnn
        one = torch.ones(1, 1, 1, 1, device=codes.device)
        out = torch.empty(*codes.shape[:3], row.head_dim_v, dtype=codes.dtype, device=codes.device)
        maxima = [torch.empty(1, 1, 1, 1, device=codes.device) for _ in range(2)]
        float32, float8 = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3
        graph = cudnn.pygraph(
            handle=self.handle, io_data_type=float8, intermediate_data_type=float32, compute_data_type=float32
        )  # fmt: skip
        inputs = [
            graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=float8)
            for x in (codes, *(x.codes for x in kv[0]))
        ]  # fmt: skip
        scalars = [graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=float32) for _ in range(6)]
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        results = graph.sdpa_fp8(
            **dict(zip("qkv", inputs)), **dict(zip(names, scalars)), attn_scale=row.head_dim**-0.5, is_inference=True
        )  # fmt: skip
        o, largest = results[0], results[-2:]
        o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(float8)
        for maximum in largest:
            maximum.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(float32)
        graph.build([cudnn.heur_mode.A])
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=codes.device)
        given = dict(zip([*scalars, o, *largest], [*factors, one, one, one * self.out_scale, out, *maxima]))

        rows = row.num_q_heads * row.q_len // codes.shape[1]

        def call(k, v):
            cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(given | dict(zip(inputs, (codes, k.codes, v.codes))), workspace, handle=self.handle)
            return out[:, :, :rows], row

        return [functools.partial(call, k, v) for k, v in kv]

    def answer(self, called):
        import torch

        out, row = called
        out = out.reshape(row.batch, row.num_q_heads, row.q_len, row.head_dim_v)
        return (out.float() / self.out_scale).to(torch.bfloat16)


NAMES = ("rapt", "rapt-sdpa", "flash", "cudnn", "cudnn-fp8", "efficient", "flex", "fa4", "sdpa", "add")

# What --check's "best-dense" means: the two that are written for dense work on Hopper.
DENSE = ("cudnn", "fa4")

# torch's own choice, by the number that _fused_sdp_choice answers.
CHOICES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def picked(row, tensors):
    """The kernel that torch's function picks by itself on these tensors, None where it cannot be asked."""
    import torch

    q, k, v = (x.detach().requires_grad_(row.kind == "backward") for x in (tensors.q, *tensors.kv[0]))
    options = {"is_causal": row.causal != "none"} | ({"enable_gqa": True} if row.num_q_heads != row.num_kv_heads else {})
    try:
        return CHOICES.get(torch._fused_sdp_choice(q, k, v, tensors.mask, 0.0, **options))
    except (AttributeError, RuntimeError, TypeError):
        return None


def engines(chosen):
    """({name: Engine}, {name: why it is left out}) of the names chosen, in the table's order."""
    made = {
        "rapt": lambda name: Rapt(name, "rapt.attention", "#d1495b"),
        "rapt-sdpa": lambda name: RaptSdpa(name, "SDPA with rapt registered", "#e8a0a8"),
        "flash": lambda name: Engine(name, "torch flash", "#4f6d7a", "FLASH_ATTENTION"),
        "cudnn": lambda name: Engine(name, "cuDNN", "#86a873", "CUDNN_ATTENTION"),
        "cudnn-fp8": lambda name: CudnnFp8(name, "cuDNN, float8", "#3f7d58"),
        "efficient": lambda name: Engine(name, "torch efficient", "#c9a227", "EFFICIENT_ATTENTION"),
        "flex": lambda name: Flex(name, "torch flex", "#8d6a9f"),
        "fa4": lambda name: Fa4(name, "FlashAttention-4", "#2e86ab"),
        "sdpa": lambda name: Sdpa(name, "torch SDPA, its own choice", "#777777"),
        "add": lambda name: Add(name, "torch.add", "#aaaaaa"),
    }
    present, lost = {}, {}
    for name in NAMES:
        if name in chosen:
            engine = made[name](name)
            if engine.why_not:
                lost[name] = engine.why_not
            else:
                present[name] = engine
    return present, lost
