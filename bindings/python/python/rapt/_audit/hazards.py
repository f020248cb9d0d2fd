"""The table of hazards: what each is, how grave, which probes raise it, and which judge hears it.

A hazard's probes are a function of the dtype; a probe that the callee's signature cannot express is passed over. `needs`
names hazards that must be clean in that dtype for this one to be judged: where the plain result is wrong already, what a
strided view adds to it is not known. Judges live in judges.py; how a probe becomes a reproducer in script.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .case import Case

SEVERITIES = ("low", "medium", "high", "critical")


@dataclass(frozen=True)
class Hazard:
    """One kind of boundary bug."""

    name: str
    severity: str
    title: str
    """What a finding says, as a sentence's predicate: "…"."""
    cases: Callable
    """dtype -> the probes, the likeliest to fail first."""
    judge: str = "values"
    """The judge in judges.py that hears it, and the check in script.py that reproduces it."""
    needs: tuple = ("accuracy",)
    once: bool = False
    """Only with the first dtype."""
    dtypes: tuple = ()
    """The dtypes it concerns; () is all."""
    device: str = ""
    """The one kind of device it concerns, "cpu", "cuda" or "mps"; "" is any."""

    def concerns(self, device):
        """Whether it can be asked on "cpu", "cuda", "cuda:1"."""
        return str(device).startswith(self.device)


def everywhere(arrangement, names="qkv"):
    return tuple((name, arrangement) for name in names)


def views(arrangement):
    """All of q, k, v in this arrangement, then each alone."""

    def cases(dtype):
        for names in ("qkv", "q", "k", "v"):
            yield Case(dtype, views=everywhere(arrangement, names))

    return cases


def accuracy(dtype):
    yield Case(dtype, q_len=64, kv_len=64, head_dim=64, head_dim_v=64)
    yield Case(dtype, q_len=64, kv_len=128, head_dim=64, head_dim_v=64)
    yield Case(dtype, batch=1, heads=2, kv_heads=2, q_len=64, kv_len=512, head_dim=128, head_dim_v=128)


def mixing(axis):
    def cases(dtype):
        yield Case(dtype, batch=3, heads=4, kv_heads=4, seed=axis)

    return cases


def masks(kind):
    def cases(dtype):
        for dims in ("bhqk", "11qk", "qk"):
            yield Case(dtype, mask=kind, mask_dims=dims)
        yield Case(dtype, mask=kind, q_len=64, kv_len=64)

    return cases


def broadcasts(dtype):
    for kind in ("bool", "additive"):
        for dims in ("b11k", "b1qk", "1hqk", "bh1k", "bhq1", "hqk", "111k"):
            yield Case(dtype, mask=kind, mask_dims=dims)
        # As many batches as heads: an exchange of the two fits the shape.
        yield Case(dtype, batch=4, mask=kind, mask_dims="b1qk")


def mask_views(dtype):
    for kind in ("bool", "additive"):
        for arrangement in ("permuted", "stepped", "inner", "transposed", "expanded"):
            dims = "11qk" if arrangement == "expanded" else "bhqk"
            yield Case(dtype, mask=kind, mask_dims=dims, views=(("mask", arrangement),))


def poison(tensor, what):
    """A key that no query attends holds NaN or infinity."""

    def cases(dtype):
        last = 63
        for kind in ("bool", "-inf"):
            yield Case(dtype, mask=kind, mask_dims="11qk", masked_key=last, poison=(tensor, last, what))
        yield Case(dtype, q_len=1, mask="bool", mask_dims="b11k", masked_key=last, poison=(tensor, last, what))

    return cases


def beyond_causal(dtype):
    for tensor in "vk":
        yield Case(dtype, q_len=64, kv_len=64, causal="top_left", poison=(tensor, 63, "nan"))
        yield Case(dtype, q_len=40, kv_len=41, causal="top_left", poison=(tensor, 40, "nan"))


def nan_query(dtype):
    for kv_len in (64, 7, 1):
        yield Case(dtype, kv_len=kv_len, poison=("q", 3, "nan"))
    yield Case(dtype, kv_len=7, q_len=8, causal="top_left", poison=("q", 3, "nan"))


def causal(dtype):
    for q_len, kv_len in ((64, 64), (32, 64), (64, 32), (1, 16)):
        for alignment in ("top_left", "bottom_right"):
            yield Case(dtype, q_len=q_len, kv_len=kv_len, causal=alignment)


def grouped(dtype):
    for heads, kv_heads in ((6, 2), (4, 1), (8, 4)):
        yield Case(dtype, heads=heads, kv_heads=kv_heads)
        yield Case(dtype, heads=heads, kv_heads=kv_heads, q_len=1)


def lengths(dtype):
    for q_len, kv_len in (
        (33, 64),
        (64, 65),
        (1, 1),
        (1, 7),
        (3, 5),
        (7, 9),
        (17, 31),
        (63, 127),
        (65, 129),
        (5, 513),
        (130, 1030),
    ):
        yield Case(dtype, batch=1, heads=2, kv_heads=2, q_len=q_len, kv_len=kv_len)


def head_dims(dtype):
    for head_dim in (1, 3, 7, 17, 33, 40, 65, 72, 96, 129, 257):
        yield Case(dtype, batch=1, heads=2, kv_heads=2, head_dim=head_dim, head_dim_v=head_dim)


def head_dims_v(dtype):
    for head_dim, head_dim_v in ((32, 16), (16, 32), (64, 128), (128, 64), (7, 13), (40, 3)):
        yield Case(dtype, head_dim=head_dim, head_dim_v=head_dim_v)


def edges(**changes):
    """Sizes that fill no tile, on small tensors."""

    def cases(dtype):
        for q_len, kv_len, head_dim in (
            (1, 1, 1),
            (3, 5, 8),
            (5, 3, 7),
            (17, 33, 16),
            (1, 9, 64),
            (33, 65, 33),
            (70, 517, 64),
            (1, 300, 80),
        ):
            yield Case(
                dtype, batch=1, heads=1, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
                head_dim_v=head_dim, **changes
            )  # fmt: skip

    return cases


def guarded(dtype):
    for side in ("after", "before"):
        yield from edges(guard=side)(dtype)
        yield Case(dtype, q_len=5, kv_len=19, views=everywhere("permuted"), guard=side)
        yield Case(dtype, batch=1, q_len=5, kv_len=19, head_dim=24, head_dim_v=24, mask="bool", mask_dims="bhqk", guard=side)
        yield Case(dtype, batch=1, heads=1, kv_heads=1, q_len=9, kv_len=19, mask="additive", mask_dims="11qk", guard=side)
        yield Case(dtype, batch=1, q_len=1, kv_len=67, heads=6, kv_heads=2, guard=side)


def short_keys(dtype):
    for kv_len, v_len in ((16, 32), (16, 17), (40, 64)):
        yield Case(
            dtype, batch=1, heads=1, kv_heads=1, q_len=4, kv_len=kv_len, v_len=v_len, head_dim=8, head_dim_v=8, around="nan"
        )


def untouched(dtype):
    yield Case(dtype, around="nan")
    yield Case(dtype, views=everywhere("permuted"), causal="top_left")
    yield Case(dtype, views=everywhere("stepped"), mask="additive")
    yield Case(dtype, mask="bool", mask_dims="11qk")
    yield Case(dtype, q_len=1, kv_len=300)


def logits(dtype):
    # Scores of ±100 to ±4000: beyond exp in f32, and products beyond 65504 in f16.
    yield Case(dtype, logits=12.0)
    yield Case(dtype, logits=40.0, head_dim=64, head_dim_v=64)
    yield Case(dtype, logits=12.0, q_len=1, kv_len=300)


def large_values(dtype):
    size = {"float16": 300.0, "bfloat16": 1e20, "float32": 1e20, "float64": 1e100}[dtype]
    yield Case(dtype, size_of_v=size)
    yield Case(dtype, size_of_v=1 / size)


def scales(dtype):
    for scale in (0.5, -0.25, 1.0, 0.0):
        yield Case(dtype, scale=scale)


def zero_lengths(dtype):
    yield Case(dtype, kv_len=0)
    yield Case(dtype, q_len=0)
    yield Case(dtype, batch=0)


def masked_rows(dtype):
    for kind in ("bool", "-inf"):
        yield Case(dtype, mask=kind, mask_dims="11qk", masked_row=3)
    yield Case(dtype, q_len=1, mask="bool", mask_dims="bhqk", masked_row=0)


def lowest(dtype):
    yield Case(dtype, mask="lowest", mask_dims="11qk", masked_row=3)
    yield Case(dtype, q_len=1, mask="lowest", mask_dims="bhqk", masked_row=0)


def repeats(dtype):
    yield Case(dtype, batch=1, heads=2, kv_heads=2, q_len=70, kv_len=600)
    yield Case(dtype, batch=1, heads=2, kv_heads=2, q_len=1, kv_len=1200)


def strides_bits(dtype):
    for arrangement in ("permuted", "stepped", "fused", "transposed", "inner", "offset"):
        yield Case(dtype, q_len=70, kv_len=600, views=everywhere(arrangement))
        yield Case(dtype, q_len=1, kv_len=600, views=everywhere(arrangement))


def neighbours(dtype):
    yield Case(dtype, batch=3, q_len=70, kv_len=600)
    yield Case(dtype, batch=5, heads=2, kv_heads=2, q_len=1, kv_len=300)
    yield Case(dtype, batch=3, q_len=16, kv_len=16, head_dim=16, head_dim_v=16)


def option(name, *values):
    def cases(dtype):
        for value in values:
            yield Case(dtype, options=((name, value),))
            yield Case(dtype, q_len=40, kv_len=40, causal="top_left", options=((name, value),))

    return cases


def lse(dtype):
    yield Case(dtype)
    yield Case(dtype, q_len=5, kv_len=700)
    yield Case(dtype, mask="bool", masked_row=2)


SMALL = {"batch": 2, "heads": 2, "kv_heads": 2, "q_len": 9, "kv_len": 21, "head_dim": 16, "head_dim_v": 16}


def differentiated(dtype):
    """A case of each kind; those of options that the signature lacks are passed over."""
    yield Case(dtype, **SMALL)
    yield Case(dtype, batch=1, heads=2, kv_heads=2, q_len=67, kv_len=131, head_dim=40, head_dim_v=24, scale=0.2)
    yield Case(dtype, **SMALL | {"kv_len": 9}, causal="top_left")
    yield Case(dtype, **SMALL, mask="bool", mask_dims="bhqk")
    yield Case(dtype, **SMALL, views=everywhere("permuted"))
    yield Case(dtype, **SMALL, causal="bottom_right")
    for option in (("window", (5, 3)), ("softcap", 1.5), ("sinks", 3.0), ("alibi_slopes", 0.5)):
        yield Case(dtype, **SMALL, options=(option,))


def grouped_gradients(dtype):
    for heads, kv_heads in ((6, 2), (4, 1)):
        yield Case(dtype, **SMALL | {"heads": heads, "kv_heads": kv_heads})


def mask_gradients(dtype):
    for dims in ("bhqk", "11qk", "b11k", "1h1k", "bhq1", "qk", "111k"):
        yield Case(dtype, **SMALL, mask="additive", mask_dims=dims)


def masked_gradients(dtype):
    for kind in ("bool", "-inf"):
        yield Case(dtype, **SMALL, mask=kind, mask_dims="11qk", masked_key=20)
    yield Case(dtype, **SMALL, causal="top_left")


def gradients_beside_nan(dtype):
    for tensor in "vk":
        for kind in ("bool", "-inf"):
            yield Case(dtype, **SMALL, mask=kind, mask_dims="11qk", masked_key=20, poison=(tensor, 20, "nan"))
        yield Case(dtype, **SMALL, causal="top_left", poison=(tensor, 20, "nan"))


def gradients_of_dead_rows(dtype):
    for kind in ("bool", "-inf"):
        yield Case(dtype, **SMALL, mask=kind, mask_dims="11qk", masked_row=3)
    yield Case(dtype, **SMALL, mask="bool", mask_dims="11qk", masked_row=3, poison=("d_o", 3, "nan"))


def arriving(*arrangements):
    def cases(dtype):
        for arrangement in arrangements:
            yield Case(dtype, **SMALL, views=(("d_o", arrangement),))

    return cases


def dropped(*probabilities, **changes):
    """Equal scores, so that each weight is known: q is 0."""

    def cases(dtype):
        for p in probabilities:
            yield Case(dtype, **{"batch": 2, "heads": 4, "kv_heads": 4, "q_len": 256, "kv_len": 64, "head_dim": 64, "head_dim_v": 64, "logits": 0.0} | changes, dropout=p)

    return cases


# Half of 1 / 256 away from what 8 bits can say.
DROPPED = 25.5 / 256


def growth(**changes):
    """One head, ever longer; the judge doubles the lengths."""

    def cases(dtype):
        base = Case(dtype, batch=1, heads=1, kv_heads=1, q_len=4096, kv_len=4096, head_dim=64, head_dim_v=64)
        yield base.but(**changes)

    return cases


TABLE = (
    Hazard("dtype-tag", "critical", "16-bit elements are read or written under another tag", accuracy, needs=(), dtypes=("float16", "bfloat16"), judge="tag"),
    Hazard("accuracy", "critical", "plain contiguous attention is wrong", accuracy, judge="strict", needs=("dtype-tag",)),
    Hazard("batch-mixing", "critical", "one batch's inputs change another batch's output", mixing(0), judge="mixing", needs=()),
    Hazard("head-mixing", "critical", "one head's inputs change another head's output", mixing(1), judge="mixing", needs=()),
    Hazard("inputs-modified", "critical", "the callee writes to its inputs, or beside them", untouched, judge="untouched", needs=()),
    Hazard("permuted-strides", "critical", "[B,S,H,D] views read as [B,H,S,D] come out wrong", views("permuted")),
    Hazard("fused-strides", "critical", "views into a fused qkv projection come out wrong", views("fused")),
    Hazard("stepped-strides", "critical", "stepped slices come out wrong", views("stepped")),
    Hazard("expanded-strides", "critical", "expanded (stride 0) inputs come out wrong", views("expanded")),
    Hazard("negative-strides", "critical", "reversed (stride below 0) inputs come out wrong", views("negative")),
    Hazard("inner-stride", "critical", "an inner stride other than 1 comes out wrong", lambda dtype: (*views("inner")(dtype), *views("transposed")(dtype))),
    Hazard("storage-offset", "critical", "views that start at an odd element come out wrong", views("offset")),
    Hazard("odd-lengths", "critical", "lengths that fill no tile come out wrong", lengths),
    Hazard("odd-head-dim", "critical", "head_dim that fills no vector comes out wrong", head_dims),
    Hazard("head-dim-v", "critical", "head_dim_v ≠ head_dim comes out wrong", head_dims_v),
    Hazard("over-read", "critical", "bytes outside the tensors change the output", edges(around="nan"), judge="bands", needs=()),
    Hazard("padding", "high", "NaN in the unused part of a cache reaches the output", views("cache"), judge="bands"),
    Hazard("guard-pages", "critical", "memory outside the tensors is touched", guarded, judge="pages", needs=()),
    Hazard("kv-length-mismatch", "critical", "K shorter than V is accepted", short_keys, judge="mismatch", needs=()),
    Hazard("bool-mask", "critical", "a bool mask is not obeyed", masks("bool")),
    Hazard("additive-mask", "critical", "an additive mask is not obeyed", masks("additive")),
    Hazard("mask-broadcast", "critical", "a mask is broadcast wrongly", broadcasts, needs=("accuracy", "bool-mask", "additive-mask")),
    Hazard("mask-strides", "critical", "a strided mask is misread", mask_views, needs=("accuracy", "bool-mask", "additive-mask")),
    Hazard("causal", "critical", "causal attention is wrong or differently aligned", causal),
    Hazard("gqa-groups", "critical", "query heads use the wrong key head", grouped),
    Hazard("nan-in-masked-v", "medium", "NaN in a masked value reaches the output", poison("v", "nan"), judge="leak", needs=("accuracy", "bool-mask")),
    Hazard("nan-in-masked-k", "medium", "NaN in a masked key reaches the output", poison("k", "nan"), judge="leak", needs=("accuracy", "bool-mask")),
    Hazard("inf-in-masked-kv", "medium", "infinity in a masked key or value reaches the output", lambda dtype: (*poison("v", "inf")(dtype), *poison("k", "inf")(dtype)), judge="leak", needs=("accuracy", "bool-mask")),
    Hazard("nan-beyond-causal", "medium", "NaN in a key of the future reaches rows before it", beyond_causal, judge="leak", needs=("accuracy", "causal", "odd-lengths")),
    Hazard("nan-query-row", "medium", "a NaN query does not make its row, and only its row, NaN", nan_query, judge="swallow", needs=("accuracy", "odd-lengths")),
    Hazard("fully-masked-row", "medium", "a row without any key is not zeros", masked_rows, needs=("accuracy", "bool-mask")),
    Hazard("lowest-finite-mask", "medium", "the lowest finite bias is not taken for a number", lowest, needs=("accuracy", "additive-mask")),
    Hazard("scale", "critical", "the scale that is asked for is not the one applied", scales),
    Hazard("window", "critical", "the window's ends are off", option("window", (5, 3), (0, 0), (None, 2), (7, None))),
    Hazard("softcap", "critical", "softcap is not obeyed", option("softcap", 1.5)),
    Hazard("sinks", "critical", "sink logits are not obeyed", option("sinks", 3.0)),
    Hazard("alibi", "critical", "ALiBi slopes are not obeyed", option("alibi_slopes", 0.5)),
    Hazard("lse", "high", "the returned lse is not that of the returned rows", lse, judge="lse"),
    Hazard("large-logits", "high", "large scores overflow or lose their order", logits, judge="logits"),
    Hazard("hidden-cast", "high", "numbers are narrowed on the way", large_values, judge="strict"),
    Hazard("zero-length", "medium", "empty q, k or batch is not answered by the definition", zero_lengths),
    Hazard("stale-state", "high", "a call changes what a later call answers", repeats, judge="stale", needs=("accuracy", "odd-lengths", "inputs-modified")),
    Hazard("nondeterminism", "medium", "the same call gives other bits", repeats, judge="repeat", needs=("inputs-modified",)),
    Hazard("concurrent-calls", "high", "two calls at once disturb each other", repeats, judge="concurrent", needs=("nondeterminism",)),
    Hazard("gradients", "critical", "gradients of q, k and v are wrong", differentiated, judge="gradients"),
    Hazard("gqa-gradients", "critical", "gradients of a key head are not the sum over its query heads", grouped_gradients, judge="gradients", needs=("gradients", "gqa-groups")),
    Hazard("mask-gradients", "critical", "the gradient of an additive mask is wrong, or not summed over what was broadcast", mask_gradients, judge="gradients", needs=("gradients", "additive-mask", "mask-broadcast")),
    Hazard("masked-gradients", "high", "a key that no query attends gets a gradient", masked_gradients, judge="masked-gradients", needs=("gradients", "bool-mask")),
    Hazard("nan-in-masked-gradients", "medium", "NaN in a masked key or value reaches a gradient", gradients_beside_nan, judge="gradient-leak", needs=("gradients", "mask-gradients", "bool-mask")),
    Hazard("dead-row-gradients", "medium", "a row without any key gives a gradient", gradients_of_dead_rows, judge="gradient-leak", needs=("gradients", "mask-gradients", "bool-mask")),
    Hazard("gradient-strides", "critical", "an output's gradient in other strides comes out wrong", arriving("permuted", "stepped", "inner", "transposed", "offset"), judge="gradients", needs=("gradients",)),
    Hazard("gradient-aliasing", "critical", "an output's gradient whose elements share memory is misread, or is written to", arriving("contiguous", "one", "expanded", "overlapping"), judge="backward-untouched", needs=("gradients", "gradient-strides")),
    Hazard("gradient-nondeterminism", "medium", "the same backward gives other bits", repeats, judge="gradient-repeat", needs=("gradients", "nondeterminism")),
    Hazard("dropped-part", "high", "dropout drops another part than p, or scales what it keeps wrongly", dropped(DROPPED, 0.5, 1.0), judge="dropped-part", once=True),
    Hazard("dropout-seed", "high", "dropout does not follow the generator", dropped(0.3, q_len=16), judge="dropout-seed", once=True),
    Hazard("dropout-reuse", "critical", "the backward drops other weights than the forward", dropped(0.3, batch=1, heads=2, kv_heads=2, q_len=16, logits=1.0), judge="dropout-reuse", needs=("gradients", "dropped-part")),
    Hazard("stream-order", "critical", "work does not stand in the caller's stream", repeats, judge="stream", needs=("accuracy", "nondeterminism"), device="cuda"),
    Hazard("graph-capture", "high", "a captured CUDA graph replays other results", repeats, judge="graph", needs=("accuracy", "nondeterminism"), device="cuda"),
    Hazard("device-wait", "low", "a call waits for the device's earlier work", repeats, judge="wait", once=True, needs=(), device="cuda"),
    Hazard("thread-count-bits", "low", "bits depend on the number of threads", repeats, judge="threads", needs=("accuracy", "stale-state", "nondeterminism")),
    Hazard("batch-neighbour-bits", "low", "a batch's bits depend on its neighbours", neighbours, judge="neighbours", needs=("accuracy", "stale-state", "nondeterminism", "batch-mixing")),
    Hazard("stride-bits", "low", "bits depend on the strides of the same values", strides_bits, judge="strides", needs=("accuracy", "stale-state", "nondeterminism", "permuted-strides", "inner-stride")),
    Hazard("memory-plain", "low", "extra memory grows with q_len · kv_len", growth(), judge="memory", once=True, needs=()),
    Hazard("memory-bool-mask", "low", "extra memory of a bool mask grows with q_len · kv_len", growth(mask="bool", mask_dims="qk"), judge="memory", once=True, needs=()),
    Hazard("memory-mask-3d", "low", "a 3-D mask takes a route whose memory grows with q_len · kv_len", growth(mask="bool", mask_dims="1qk"), judge="memory", once=True, needs=()),
    Hazard("memory-head-dim-v", "low", "head_dim_v ≠ head_dim takes a route whose memory grows with q_len · kv_len", growth(head_dim_v=32), judge="memory", once=True, needs=()),
    Hazard("memory-inner-stride", "low", "an inner stride ≠ 1 takes a route whose memory grows with q_len · kv_len", growth(views=everywhere("inner")), judge="memory", once=True, needs=()),
)  # fmt: skip

BY_NAME = {hazard.name: hazard for hazard in TABLE}
