"""flash-attention's arguments as Rapt's: one request on dense tensors, on sequences that lie one after another, or on a cache.

    positions    flash counts all of them from the last key: query i stands at i + d, where d = kv_len - q_len. Rapt does so where a call is
                 causal; a window to both sides becomes one on fewer keys, of which the first is the first that any query sees
    slopes       [batch, heads] are a call for each batch entry: its bits depend on no neighbour
    words        errors name flash's arguments

Deliberately absent: copies of q, k and v. What would need one (slopes without causal, where d is not 0) is refused by name.
"""

import re
import typing

import rapt
import torch
from rapt._native import DtypeMismatchError, KindError, OptionError, ShapeError, UnsupportedDtypeError, UnsupportedError
from rapt.torch import _ops, _varlen

# Rapt's words for flash's arguments, where they differ.
_WORDS = {"cu_seqlens_kv": "cu_seqlens_k", "page_table": "block_table"}
_OPENING = re.compile(r"\Ascale\b")


def in_flash_words(error, **others):
    """The same error, whose text names what the caller wrote: `others`, and flash's own words."""
    text = _OPENING.sub("softmax_scale", str(error))
    for word, flash in {**_WORDS, **others}.items():
        text = text.replace(word, flash)
    return type(error)(text)


class Request(typing.NamedTuple):
    """What is asked of all sequences of a call. `left` and `right` are the ends of a window, None where it has none."""

    dropout_p: float
    scale: float | None
    left: int | None
    right: int | None
    softcap: float | None
    slopes: torch.Tensor | None

    @property
    def is_causal(self):
        """flash: causal is a window whose right end is 0, whatever else was written there."""
        return self.right == 0

    @property
    def counts_positions(self):
        """Whether it matters where a query stands."""
        return self.slopes is not None or self.left is not None or self.right is not None

    def options(self):
        """Rapt's words for what stands in every call."""
        return {"scale": self.scale, "softcap": self.softcap}

    def causal_options(self):
        """The same, of a request that counts positions from the last key."""
        window = None if self.left is None else (self.left, None)
        return {**self.options(), "causal": "bottom_right", "window": window, "alibi_slopes": self.slopes}

    def square_options(self):
        """The same, where q_len = kv_len or no position counts."""
        if self.is_causal:
            return self.causal_options()
        window = None if self.left is None and self.right is None else (self.left, self.right)
        return {**self.options(), "window": window, "alibi_slopes": self.slopes}


def request(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p=0.0):
    """The `Request` of flash's arguments."""
    left, right = _window(window_size)
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p <= 1:
        raise OptionError(f"dropout_p = {dropout_p!r}; allowed: a number from 0 to 1")
    if not isinstance(softcap, (int, float)):
        raise OptionError(f"softcap = {softcap!r}; allowed: a number; 0 is none")
    return Request(
        dropout_p, softmax_scale, left, 0 if causal else right, None if softcap <= 0 else float(softcap), alibi_slopes
    )  # fmt: skip


def _window(window_size):
    ends = window_size
    if not isinstance(ends, (tuple, list)) or len(ends) != 2 or not all(isinstance(end, int) for end in ends):
        raise OptionError(f"window_size = {window_size!r}; allowed: (left, right), ints; below 0 is unbounded")
    return (None if end < 0 else end for end in ends)


def check_tensor(name, x, sizes):
    """Refuses what is no tensor of torch of these dimensions."""
    if not isinstance(x, torch.Tensor):
        raise KindError(f"{name} is a {type(x).__name__}: flash-attention's functions take torch tensors. Mend: `torch.as_tensor({name})`, or `rapt.attention`")
    if x.dim() != len(sizes):
        hint = {1: f". Mend: `{name}[None]`", -1: f". Mend: `{name}.flatten(0, 1)`"}.get(len(sizes) - x.dim(), "")
        raise ShapeError(f"{name} has {x.dim()} dimensions: asked are [{', '.join(sizes)}]{hint}")


def check_int32(name, x, size):
    """Refuses what is no int32 tensor of one dimension."""
    check_tensor(name, x, (size,))
    if x.dtype != torch.int32:
        raise UnsupportedDtypeError(f"{name} has dtype {str(x.dtype)[6:]}: allowed is int32. Mend: `{name}.to(torch.int32)`")


DENSE = ("batch", "seqlen", "nheads", "headdim")
PACKED = ("total", "nheads", "headdim")
PAGED = ("num_blocks", "page_block_size", "nheads", "headdim")


# --- dense -------------------------------------------------------------------------------------------------------------------


def dense(q, k, v, asked, gives_lse=False):
    """(out, lse) of `[batch, seqlen, nheads, headdim]`; lse is `[batch, nheads, seqlen]`, or None unless it is asked for."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, DENSE)
    own = slopes_of_each(asked.slopes, q.shape[0], q.shape[2])
    if own is None:
        return _attend(q, k, v, asked, gives_lse)
    if asked.dropout_p:
        raise UnsupportedError("dropout_p beside alibi_slopes [batch, nheads], which are a call each. Mend: `alibi_slopes[0]`, if all are equal")
    parts = [
        _attend(*(x[b : b + 1] for x in (q, k, v)), asked._replace(slopes=slopes), gives_lse) for b, slopes in enumerate(own)
    ]  # fmt: skip
    return _joined(parts, 0, 0)


def slopes_of_each(slopes, batch, heads):
    """Slopes `[nheads]` of each batch entry, or None where all have one tensor `[nheads]`, or none."""
    if slopes is None:
        return None
    check = "[nheads] or [batch, nheads]"
    if not isinstance(slopes, torch.Tensor):
        raise KindError(f"alibi_slopes is a {type(slopes).__name__}: asked is a torch tensor {check}. Mend: `torch.as_tensor(alibi_slopes)`")
    if tuple(slopes.shape) == (heads,):
        return None
    if tuple(slopes.shape) != (batch, heads):
        raise ShapeError(f"alibi_slopes has shape {list(slopes.shape)}: asked is {check}, here [{heads}] or [{batch}, {heads}]")
    return slopes.unbind()


def _joined(parts, of_out, of_lse):
    """The answers of several calls as one."""
    if not parts:
        raise ShapeError("there is no sequence: batch is 0, and each would be a call of its own. Mend: no call where nothing is asked")
    outs, lses = zip(*parts)
    return torch.cat(outs, of_out), None if lses[0] is None else torch.cat(lses, of_lse)


def _attend(q, k, v, asked, gives_lse):
    """`dense` with one tensor of slopes."""
    q_len, kv_len = q.shape[1], k.shape[1]
    if q_len == kv_len or not asked.counts_positions or asked.is_causal:
        return _run(q, k, v, asked, asked.square_options(), gives_lse)
    if q_len == 1:
        # The only query stands at the last key: nothing is right of it.
        return _run(q, k, v, asked, asked.causal_options(), gives_lse)
    if asked.slopes is not None:
        raise UnsupportedError(
            f"alibi_slopes without causal, of {q_len} queries and {kv_len} keys: distances from the last key are computed of causal calls. "
            "Mend: `causal=True`, or `rapt.attention` with the distances as its mask"
        )
    # Keys before the first one's window are seen by no query, queries whose window ends before key 0 see none.
    beyond = kv_len - q_len
    first_key = 0 if asked.left is None else min(max(0, beyond - asked.left), kv_len)
    first_row = 0 if asked.right is None else min(max(0, -(asked.right + beyond)), q_len)
    shift = beyond - first_key + first_row
    window = (None if asked.left is None else max(0, asked.left - shift), None if asked.right is None else max(0, asked.right + shift))
    keys = slice(first_key, None)
    out, lse = _run(q[:, first_row:], k[:, keys], v[:, keys], asked, {**asked.options(), "window": window}, gives_lse)
    if first_row:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, first_row, 0))
        lse = None if lse is None else torch.nn.functional.pad(lse, (first_row, 0), value=-torch.inf)
    return out, lse


def _run(q, k, v, asked, options, gives_lse):
    run = rapt.attention
    if asked.dropout_p:
        run, options = _ops.attention, {**options, "dropout_p": float(asked.dropout_p)}
    answer = run(q, k, v, layout="bshd", return_lse=gives_lse, **options)
    return answer if gives_lse else (answer, None)


# --- sequences that lie one after another --------------------------------------------------------------------------------------


class Sequences(typing.NamedTuple):
    """Where sequences of queries and of keys begin, and the longest of each, as the caller says."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def check(self, traced):
        """Refuses a longest that is shorter than a sequence, which flash would cut off. Lengths on a GPU are not waited for."""
        for name, offsets, most in (("q", self.cu_seqlens_q, self.max_seqlen_q), ("k", self.cu_seqlens_k, self.max_seqlen_k)):
            check_int32(f"cu_seqlens_{name}", offsets, "batch + 1")
            if len(offsets) != len(self.cu_seqlens_q) or not len(offsets):
                raise ShapeError(f"cu_seqlens_{name} has {len(offsets)} offsets, cu_seqlens_q has {len(self.cu_seqlens_q)}: each has one more than sequences")
            if traced:
                continue
            if isinstance(most, torch.Tensor) and most.dim() == 0 and not most.is_cuda:
                most = most.item()
            if not isinstance(most, (int, torch.Tensor)):
                raise OptionError(f"max_seqlen_{name} = {most!r}; allowed: an int, the longest sequence")
            if offsets.is_cpu and len(offsets) > 1 and isinstance(most, int) and (longest := int(offsets.diff().max())) > most:
                raise OptionError(f"max_seqlen_{name} = {most}; allowed: {longest} or more, the longest sequence. Mend: `max_seqlen_{name}={longest}`")

    @property
    def have_equal_lengths(self):
        """Whether each sequence has as many queries as keys, as far as can be told without waiting for a GPU."""
        q, k = self.cu_seqlens_q, self.cu_seqlens_k
        if q is k:
            return True
        place = lambda of: (of.data_ptr(), of.shape, of.stride(), of.dtype)  # noqa: E731
        if q.is_cpu and k.is_cpu:
            return torch.equal(q, k)
        return place(q) == place(k)


def packed(q, k, v, sequences, asked, gives_lse=False):
    """(out, lse) of `[total, nheads, headdim]`; lse is `[nheads, total_q]`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, PACKED)
    sequences.check(torch.compiler.is_compiling())
    batch = len(sequences.cu_seqlens_q) - 1
    own = slopes_of_each(asked.slopes, batch, q.shape[1])
    if own is None and (asked.is_causal or not asked.counts_positions or sequences.have_equal_lengths):
        run, options = rapt.varlen_attention, asked.square_options()
        if asked.dropout_p:
            run, options = _varlen.attention, {**options, "dropout_p": float(asked.dropout_p)}
        answer = run(q, k, v, sequences.cu_seqlens_q, sequences.cu_seqlens_k, return_lse=gives_lse, **options)
        return answer if gives_lse else (answer, None)
    what = "alibi_slopes [batch, nheads]" if own is not None else "a window without causal, of sequences whose queries and keys differ in number,"
    _expect_lengths_on_host(what, sequences.cu_seqlens_q, "`causal=True`, or one `flash_attn_func` for each sequence")
    if asked.dropout_p:
        raise UnsupportedError(f"dropout_p beside {what.rstrip(',')}: such sequences are a call each. Mend: `dropout_p=0.0`")
    with torch.no_grad():  # it refuses what the one call would
        rapt.explain_varlen(q, k, v, sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    own = own or [asked.slopes] * batch
    keys, values = (each_sequence(x, sequences.cu_seqlens_k)[0] for x in (k, v))

    def attend(b, rows):
        return _attend(rows, keys[b][None], values[b][None], asked._replace(slopes=own[b]), gives_lse)

    return by_sequence(q, sequences.cu_seqlens_q, attend)


def each_sequence(x, offsets):
    """(the rows of each sequence, how many rows of no sequence stand before the first and behind the last)."""
    ends = offsets.tolist()
    before, behind = ends[0], len(x) - ends[-1]
    lengths = [end - begin for begin, end in zip(ends, ends[1:])]
    return x.split([before, *lengths, behind])[1:-1], before, behind


def by_sequence(q, offsets, attend):
    """(out, lse) of `attend(b, rows)` for each sequence of q; rows of no sequence are zeros, and -inf in lse."""
    of_each, before, behind = each_sequence(q, offsets)
    parts = [attend(b, rows[None]) for b, rows in enumerate(of_each)]
    out, lse = _joined([(out[0], None if lse is None else lse[0]) for out, lse in parts], 0, 1)
    if before or behind:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, before, behind))
        lse = None if lse is None else torch.nn.functional.pad(lse, (before, behind), value=-torch.inf)
    return out, lse


def _expect_lengths_on_host(what, lengths, hint):
    if not lengths.is_cpu:
        raise UnsupportedError(f"{what} on a GPU: the lengths would have to be waited for. Mend: {hint}")


# --- caches ----------------------------------------------------------------------------------------------------------------


class Cache(typing.NamedTuple):
    """Keys and values of a cache, what is written behind them, and where each sequence's lie."""

    k: torch.Tensor
    v: torch.Tensor
    new_k: torch.Tensor | None
    new_v: torch.Tensor | None
    seqlens: object  # int, or int32 [batch]
    table: torch.Tensor | None  # int32 [batch, entries]

    @property
    def capacity(self):
        """Keys of a sequence at most."""
        return self.k.shape[1] if self.table is None else self.k.shape[1] * self.table.shape[1]

    def of(self, b, entry=None, first=0, seqlens=None):
        """The cache of sequence `b`, which lies in entry `entry` (its own) from row `first` on, and holds `seqlens` keys (what is said of it)."""
        one = slice(b, b + 1)
        new = (None if x is None else x[one] for x in (self.new_k, self.new_v))
        at = b if entry is None else entry
        caches = (x if self.table is not None else x[at : at + 1, first:] for x in (self.k, self.v))
        if seqlens is None and self.seqlens is not None:
            seqlens = self.seqlens if isinstance(self.seqlens, int) else int(self.seqlens[b])
        return Cache(*caches, *new, seqlens, None if self.table is None else self.table[one])


def cached(q, cache, asked):
    """(out, lse) of q `[batch, seqlen, nheads, headdim]` and a cache, into which its new keys are written first."""
    own = slopes_of_each(asked.slopes, q.shape[0], q.shape[2])
    if own is None:
        return _cached(rapt.attention_with_kvcache, q, cache, asked)
    _expect_lengths_on_host("alibi_slopes [batch, nheads]", q, "`alibi_slopes[0]`, if all are equal")
    return one_by_one(q, [cache.of(b) for b in range(len(q))], asked)


def one_by_one(q, caches, asked):
    """`cached`, a call for each sequence: all are checked before one is computed, so that a refused one writes nothing."""
    own = slopes_of_each(asked.slopes, q.shape[0], q.shape[2]) or [asked.slopes] * len(caches)
    calls = [(q[b : b + 1], cache, asked._replace(slopes=slopes)) for b, (cache, slopes) in enumerate(zip(caches, own))]
    for call in calls:
        _cached(rapt.explain_with_kvcache, *call)
    return _joined([_cached(rapt.attention_with_kvcache, *call) for call in calls], 0, 0)


def _cached(run, q, cache, asked):
    # Of one query nothing is right of where it stands.
    is_last = asked.is_causal or q.shape[1] == 1 and asked.counts_positions
    if not is_last and asked.counts_positions:
        raise UnsupportedError(
            f"a window, or alibi_slopes, of {q.shape[1]} queries of a cache without causal: their positions count from the last key. "
            "Mend: `causal=True`, or one query a call"
        )
    options = asked.causal_options() if is_last else asked.square_options()
    return run(
        q, cache.k, cache.v, cache.new_k, cache.new_v, cache_seqlens=cache.seqlens, page_table=cache.table, return_lse=True, **options
    )  # fmt: skip


def rotated(x, positions, cos, sin, interleaved):
    """x `[batch, seqlen, nheads, headdim]` with its first elements turned by the angles at `positions` `[batch, seqlen]`.

    Pairs are elements 2n and 2n + 1 (`interleaved`) or n and n + rotary_dim / 2. Products and sums are float32's (float64's of float64), rounded once to x's dtype.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[1]
    turning = x[..., : 2 * half].to(wide)
    pairs = turning.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    c, s = (table[positions][:, :, None].to(wide) for table in (cos, sin))
    turned = torch.stack((a * c - b * s, a * s + b * c), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def check_rotary(q, cos, sin, capacity):
    """Refuses tables of other shapes or dtypes than `[at least a cache's keys, rotary_dim / 2]`, q's dtype."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table, ("seqlen_ro", "rotary_dim / 2"))
        if table.dtype != q.dtype:
            raise DtypeMismatchError(f"{name} has dtype {table.dtype}, q has {q.dtype}. Mend: `{name}.to({q.dtype})`")
        if table.shape != cos.shape:
            raise ShapeError(f"{name} has shape {list(table.shape)}, rotary_cos has {list(cos.shape)}")
    if cos.shape[0] < capacity or 2 * cos.shape[1] > q.shape[-1]:
        raise ShapeError(
            f"rotary_cos has shape {list(cos.shape)}: asked are at least {capacity} positions, as many as the cache has keys, and at most {q.shape[-1] // 2} pairs, of headdim {q.shape[-1]}"
        )
