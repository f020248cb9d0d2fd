"""The models of `cargo xtask bench model`: rows, the bars that they must reach, and how each engine runs them.

Every engine runs in a worker process of its own (`python -m models NAME THREADS`), builds the model from its seed, and answers the
controller (benches/model.py). No measurement and no torch here: the controller imports this file.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths of a model. `tokens` is how many it takes in a call; a decoder's cache has room for `cache`."""

    kind: str  # encoder, prefill or decode
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    batch: int = 1
    tokens: int = 128
    cache: int = 256


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    dtype: str
    shape: Shape
    # (peer, how many times its speed Rapt must have)
    bars: tuple = ()
    # Of the DRAM read rate, for what reads every weight once a call.
    dram_share: float | None = None

    @property
    def key(self):
        return f"{self.name}/{self.dtype}"

    @property
    def _weights(self):
        """How many weights the layers and the head have."""
        s = self.shape
        gated = 3 if s.kind != "encoder" else 2
        head = s.vocabulary * s.width if s.kind != "encoder" else 0
        return s.layers * (4 * s.width * s.width + gated * s.width * s.inner), head

    @property
    def read_bytes(self):
        """The weights that a call reads: of the embedding only rows."""
        return sum(self._weights) * {"f32": 4, "bf16": 2}[self.dtype]

    @property
    def flops(self):
        """What no engine can leave out: products with weights, of the head for the last token alone, and attention without the
        scores that a causal mask leaves out."""
        s = self.shape
        layers, head = self._weights
        # A decoding step attends to the cache, of which as much is filled as it has come to: left out.
        scores = {"encoder": s.tokens**2, "prefill": s.tokens * (s.tokens + 1) // 2, "decode": 0}[s.kind]
        return 2 * s.batch * (s.tokens * layers + head) + 4 * s.batch * s.layers * s.width * scores


MINILM = Shape("encoder", 6, 384, 12, 1536, 30522)
# 19 and 233 MB of weights a token in f32.
SMALL = Shape("decode", 4, 288, 6, 768, 2048, tokens=1)
LARGE = Shape("decode", 4, 1024, 16, 2816, 6912, tokens=1)
QUICK = {"layers": 1, "width": 32, "heads": 2, "inner": 48, "vocabulary": 64, "cache": 16}

_ENCODER = (("unlocked", 1.0), ("inductor-unlocked", 0.95), ("stock", 1.8))
_PREFILL = (("unlocked", 1.0),)


def rows(quick=False):
    """All rows; `quick` ones are tiny and only try the harness."""

    def sized(shape, **more):
        if quick:
            more = {**more, **QUICK, "tokens": min(more.get("tokens", shape.tokens), 8)}
        return dataclasses.replace(shape, **more)

    found = []
    for dtype in ("f32", "bf16"):
        for batch in (1, 16):
            found.append(Row(f"minilm-{batch}x128", dtype, sized(MINILM, batch=2 if quick and batch > 1 else batch), _ENCODER))
        for name, shape, bar, share in (("llama-19mb", SMALL, 2.0, None), ("llama-233mb", LARGE, 1.2, 0.8)):
            found.append(Row(f"{name}-prefill", dtype, sized(shape, kind="prefill", tokens=128), _PREFILL))
            found.append(Row(f"{name}-decode", dtype, sized(shape), (("unlocked", bar),), share))
    return found


@dataclasses.dataclass(frozen=True)
class Peer:
    """An engine: `preload_unlock` runs it with MKL's vendor check answered "Intel"."""

    name: str
    title: str
    engine: str
    preload_unlock: bool = False
    ours: bool = False
    dtypes: tuple = ("f32", "bf16")
    environment: tuple = ()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("rapt", "Rapt", "rapt", ours=True),
        Peer("stock", "torch eager, stock", "eager"),
        Peer("unlocked", "torch eager, unlocked", "eager", preload_unlock=True),
        Peer("inductor", "inductor with freezing, stock", "inductor"),
        Peer("inductor-unlocked", "inductor with freezing, unlocked", "inductor", preload_unlock=True),
        Peer("onnxruntime", "onnxruntime", "onnxruntime", dtypes=("f32",)),
    )
}
