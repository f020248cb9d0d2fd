"""The rows of a benchmark: a TOML file expanded, and the arithmetic that belongs to a row alone (scores, FLOPs, bytes, floors).

    scores = (query, key) pairs that the masks of the row leave; causal counts half of q_len * kv_len
    flops  = 2 * (head_dim + head_dim_v) * scores; of a training row, forward and backward, 3.5 times that: seven products for two;
             of a backward alone 2 * (3 * head_dim + 2 * head_dim_v) * scores: five products (scores again, dq, dk; dp, dv)

One [[shape]] of the file is a family: all its variants (the product of what it lists) are prepared together and interleaved in the
same rounds. A second [[shape]] of the same name adds variants to it. `rapt.bench` reads cuda.toml beside this file, `cargo xtask bench
cpu` reads benches/shapes.toml.
No measurement and no tensor here, and nothing of Rapt is imported: every process of a run may read this file.
"""

import dataclasses
import fnmatch
import itertools

BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
ALL_DTYPES = ("f32", "bf16", "f16")

# exp2 with its subtract, sum and store: 3.4 elements per cycle where 64 f32 flop per cycle are possible (zmm, Zen 5, 2026-11);
# it is vector work as the FMA is, so narrower units scale it down with them.
EXP_PER_CYCLE_AT_64 = 3.4

# Products of the 16-bit tensor-core rate that one product of the row's dtype costs. float32 keeps 22 of its 24 bits as two
# halves: three products (the fourth lies below them). TF32 would need as many at half the rate.
PRODUCTS = {"bf16": 1, "f16": 1, "f32": 3}

# Bits of one element of K and V as codes, the scales of blocks counted in.
CODE_BITS = {"int8": 8, "uint8": 8, "int4": 4, "e4m3fn": 8, "e5m2": 8, "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a shape, a dtype, one variant."""

    shape: str
    kind: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: str = "none"
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0
    mask: str = "none"
    layout: str = "contiguous"
    storage: str = "numbers"
    """Of K and V: numbers of the row's dtype, latent where V is the first of K's, or codes as FORMAT or FORMAT:GRANULARITY, with + between K's and V's
    where they differ."""
    compute: str = "exact"
    """What codes are multiplied in, as `rapt.attention` has it."""
    cache: str = "none"
    """How K and V are given: none as tensors, contiguous as a cache with lengths, pagesN as pages of N keys in random order."""
    grad_mode: str = "inference"
    launch: str = "queued"
    groups: tuple = ()
    peers: tuple = ()
    """Peers beside those that take every row."""
    bars: tuple = ()
    """((whose time, least ratio of it to Rapt's), …): what `--check bars` requires."""

    @property
    def variant(self):
        """What sets this row apart from its family, as it stands in the row's name."""
        words = [] if self.causal == "none" else ["causal" if self.causal == "top_left" else self.causal]
        words += [f"window{self.window}"] if self.window else []
        words += [f"softcap{self.softcap:g}"] if self.softcap else []
        words += [f"dropout{self.dropout:g}"] if self.dropout else []
        words += [] if self.mask == "none" else [self.mask]
        words += [] if self.layout == "contiguous" else [self.layout]
        words += [] if self.storage == "numbers" else [self.storage.replace(":", "-")]
        words += [] if self.compute == "exact" else [f"{self.compute}-products"]
        words += [] if self.cache == "none" else [self.cache.replace("contiguous", "cache")]
        words += [self.grad_mode] if self.kind in ("call", "add") else []
        words += [] if self.launch == "queued" else [self.launch]
        return "/".join(words)

    @property
    def name(self):
        return f"{self.shape}/{self.variant}" if self.variant else self.shape

    @property
    def key(self):
        return f"{self.name} {self.dtype}"

    @property
    def family(self):
        """Rows that are prepared together and interleaved."""
        return (self.shape, self.dtype)

    @property
    def values_key(self):
        """Rows with this in common have equal inputs and equal outputs, wherever they lie in memory."""
        return dataclasses.replace(self, layout="contiguous", cache="none", grad_mode="inference", launch="queued", groups=(), peers=(), bars=())

    @property
    def dims(self):
        heads = f"{self.num_q_heads}" if self.num_kv_heads == self.num_q_heads else f"{self.num_q_heads}/{self.num_kv_heads}"
        length = f"{self.q_len}" if self.kv_len == self.q_len else f"{self.q_len}x{self.kv_len}"
        head_dim = f"{self.head_dim}" if self.head_dim_v == self.head_dim else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.batch},{heads},{length},{head_dim}"

    @property
    def kept_keys(self):
        """Padding and ragged batches: how many keys each batch keeps."""
        return [self.kv_len * (self.batch + 3 * b) // (4 * self.batch) or 1 for b in range(self.batch)]

    @property
    def is_ragged(self):
        """Whether sequence b has `kept_keys[b]` queries and keys: a nested tensor of layout torch.jagged."""
        return self.layout == "jagged"

    @property
    def scores(self):
        if self.is_ragged:
            return self.num_q_heads * sum(kept * kept for kept in self.kept_keys) // (1 if self.causal == "none" else 2)
        pairs = self.q_len * self.kv_len
        if self.window:
            offset = self.kv_len - self.q_len if self.causal == "bottom_right" else 0
            pairs = sum(
                max(0, min(i + offset, self.kv_len - 1) - max(0, i + offset - self.window + 1) + 1) for i in range(self.q_len)
            )
        elif self.causal == "top_left":
            pairs = pairs // 2
        if self.mask == "padding":
            return self.num_q_heads * pairs * sum(self.kept_keys) // self.kv_len
        return self.batch * self.num_q_heads * pairs

    @property
    def flops(self):
        if self.kind == "backward":
            return 2 * (3 * self.head_dim + 2 * self.head_dim_v) * self.scores
        forward = 2 * (self.head_dim + self.head_dim_v) * self.scores
        return forward * 7 // 2 if self.kind == "train" else forward

    @property
    def q_bytes(self):
        return self.batch * self.num_q_heads * self.q_len * self.head_dim * BYTES[self.dtype]

    @property
    def formats(self):
        """((format, granularity) of K's codes, that of V's), None where they are numbers. Without one the granularity is the format's own."""
        if self.storage in ("numbers", "latent"):
            return None
        both = [(*word.split(":"), None)[:2] for word in self.storage.split("+")]
        return both[0], both[-1]

    @property
    def values_in_keys(self):
        """Whether V is the first numbers of K, in the same memory: latent attention."""
        return self.storage == "latent"

    @property
    def page_size(self):
        """Keys of a page, None where K and V do not lie in pages."""
        return int(self.cache.removeprefix("pages")) if self.cache.startswith("pages") else None

    @property
    def kv_bytes(self):
        rows = self.batch * self.num_kv_heads * self.kv_len
        dims = (self.head_dim, self.head_dim_v)
        if self.formats is None:
            return rows * (self.head_dim if self.values_in_keys else sum(dims)) * BYTES[self.dtype]
        codes = sum(rows * dim * CODE_BITS[format] / 8 for (format, _), dim in zip(self.formats, dims))
        # A factor of a token is a float32; what one factor covers beyond that is not worth counting.
        return int(codes) + sum(4 * rows for _, granularity in self.formats if granularity == "token")

    @property
    def out_bytes(self):
        return self.batch * self.num_q_heads * self.q_len * self.head_dim_v * BYTES[self.dtype]

    @property
    def read_bytes(self):
        """What a pass has to move but for masks: K and V once, the query and the output. A backward reads lse (float32) and d_o beside
        them and writes dq, dk and dv."""
        forward = self.kv_bytes + self.q_bytes + self.out_bytes
        lse_bytes = self.batch * self.num_q_heads * self.q_len * BYTES["f32"]
        return 2 * forward + lse_bytes if self.kind == "backward" else forward

    @property
    def mask_shape(self):
        """The mask tensor's shape, None where there is none."""
        if self.mask == "none":
            return None
        batch = 1 if self.mask.endswith("-shared") else self.batch
        return (batch, 1, 1 if self.mask == "padding" else self.q_len, self.kv_len)

    @property
    def mask_bytes(self):
        if self.mask_shape is None:
            return 0
        batch, _, q_len, kv_len = self.mask_shape
        return batch * q_len * kv_len * (BYTES[self.dtype] if self.mask.startswith("additive") else 1)

    @property
    def copied_bytes(self):
        """What `.contiguous()` writes in the *_copy layouts, and reading in place therefore saves."""
        return self.kv_bytes + (self.q_bytes if self.layout.startswith("permuted") else 0)

    def floor_cycles(self, flop_per_cycle, f32_flop_per_cycle):
        """Cycles of a CPU per score and core below which no kernel can go: the two products, and one exponential."""
        return 2 * (self.head_dim + self.head_dim_v) / flop_per_cycle + 64 / (EXP_PER_CYCLE_AT_64 * f32_flop_per_cycle)

    def floors_us(self, gemm_tflops=None, copy_gbs=None, exponentials_per_s=None):
        """{what: microseconds} below which a GPU of these rates cannot go: products, bytes, exponentials, each alone.

        products: FLOPs (float32 counted three times, see PRODUCTS) at the rate of a bfloat16 GEMM. bytes: `read_bytes` and the mask,
        at the rate of a copy (read and written). exponentials: one per score.
        """
        floors = {}
        if gemm_tflops and self.dtype in PRODUCTS:
            floors["products"] = self.flops * PRODUCTS[self.dtype] / gemm_tflops / 1e6
        if copy_gbs:
            floors["bytes"] = (self.read_bytes + self.mask_bytes) / copy_gbs / 1e3
        if exponentials_per_s:
            floors["exponentials"] = self.scores / exponentials_per_s * 1e6
        return floors


KEYS = frozenset("name dims kind dtypes causal window softcap dropout mask layout storage compute cache grad_mode launch groups peers bars".split())


def listed(value):
    return value if isinstance(value, list) else [value]


def expand(shape, source="the rows"):
    """Every row of one [[shape]], dtype outermost."""
    if unknown := set(shape) - KEYS:
        raise ValueError(f"{source}: {shape.get('name')}: unknown key {sorted(unknown)}; known: {sorted(KEYS)}")
    dims = dict(shape["dims"])
    sizes = {
        "batch": dims["B"],
        "num_q_heads": dims["Hq"],
        "num_kv_heads": dims.get("Hkv", dims["Hq"]),
        "q_len": dims["Sq"],
        "kv_len": dims.get("Skv", dims["Sq"]),
        "head_dim": dims["D"],
        "head_dim_v": dims.get("Dv", dims["D"]),
    }
    layouts = listed(shape.get("layout", "contiguous"))
    has_copy = any(layout.endswith("_copy") for layout in layouts)
    bars = tuple((bar["over"], float(bar["ratio"]), bar.get("where", "*")) for bar in shape.get("bars", ()))
    for dtype, causal, window, softcap, dropout, mask, layout, storage, compute, cache, grad_mode, launch in itertools.product(
        shape.get("dtypes", ALL_DTYPES),
        listed(shape.get("causal", "none")),
        listed(shape.get("window", 0)),
        listed(shape.get("softcap", 0.0)),
        listed(shape.get("dropout", 0.0)),
        listed(shape.get("mask", "none")),
        layouts,
        listed(shape.get("storage", "numbers")),
        listed(shape.get("compute", "exact")),
        listed(shape.get("cache", "none")),
        listed(shape.get("grad_mode", "inference")),
        listed(shape.get("launch", "queued")),
    ):
        if layout.endswith("_copy"):
            groups = ["copy_vs_inplace"]  # slower by design, so in no group that a check looks at
        else:
            groups = shape["groups"] + (["permuted"] if layout != "contiguous" else []) + (["copy_vs_inplace"] if has_copy else [])
        row = Row(
            shape=shape["name"], kind=shape.get("kind", "prefill"), **sizes, dtype=dtype, causal=causal, window=window,
            softcap=softcap, dropout=dropout, mask=mask, layout=layout, storage=storage, compute=compute, cache=cache, grad_mode=grad_mode,
            launch=launch, groups=tuple(groups), peers=tuple(shape.get("peers", ())),
        )  # fmt: skip
        yield dataclasses.replace(row, bars=tuple(bar[:2] for bar in bars if fnmatch.fnmatchcase(row.name, bar[2])))


def shrink(row):
    """The same row small enough that the whole table takes a minute: for trying the harness, never for figures."""
    q_len = min(row.q_len, 48)
    kv_len = q_len if row.kv_len == row.q_len else min(row.kv_len, 96)
    heads = min(row.num_q_heads, 4)
    return dataclasses.replace(
        row, batch=min(row.batch, 2), num_q_heads=heads, num_kv_heads=heads // min(heads, row.num_q_heads // row.num_kv_heads),
        q_len=q_len, kv_len=kv_len, window=min(row.window, 16),
    )  # fmt: skip


def read(path):
    """The file's [[shape]] tables."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))["shape"]


def load(path, selected=None, dtypes=None, quick=False):
    """Rows in file order. `selected`: names of groups or shapes, or globs over row names; None takes all.

    ValueError where a word selects nothing, with what there is.
    """
    rows = [row for shape in read(path) for row in expand(shape, path.name)]
    for word in selected or ():
        if not any(matches(row, word) for row in rows):
            groups = sorted({group for row in rows for group in row.groups})
            shapes = list(dict.fromkeys(row.shape for row in rows))
            raise ValueError(f"{word}: no such row.\ngroups: {', '.join(groups)}\nshapes: {', '.join(shapes)}")
    if selected:
        rows = [row for row in rows if any(matches(row, word) for word in selected)]
    if dtypes:
        rows = [row for row in rows if row.dtype in dtypes]
    return [shrink(row) for row in rows] if quick else rows


def matches(row, word):
    return word == row.shape or word in row.groups or fnmatch.fnmatchcase(row.name, word)


def families(rows):
    """Rows grouped by family, in order of first appearance."""
    grouped = {}
    for row in rows:
        grouped.setdefault(row.family, []).append(row)
    return list(grouped.values())


def baseline(row, rows):
    """The row that this one is a variant of: pages against a contiguous cache and that against tensors, codes against numbers, a
    layout against contiguous, a mask or causal against none."""
    if row.kind in ("call", "add"):
        return None
    plain = dataclasses.replace
    for candidate in (
        plain(row, cache="contiguous" if row.page_size else "none") if row.cache != "none" else None,
        plain(row, storage="numbers", compute="exact") if row.storage != "numbers" else None,
        plain(row, layout="contiguous") if row.layout != "contiguous" else None,
        plain(row, dropout=0.0) if row.dropout else None,
        plain(row, window=0) if row.window else None,
        plain(row, softcap=0.0) if row.softcap else None,
        plain(row, mask="none") if row.mask != "none" else None,
        plain(row, causal="none") if row.causal != "none" else None,
    ):
        if candidate is not None:
            return next((other for other in rows if other.key == candidate.key), None)
    return None
