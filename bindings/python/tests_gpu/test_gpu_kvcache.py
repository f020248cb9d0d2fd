"""Caches of many sequences on the GPU: the bits of a call for each sequence, lengths and page tables that only the device reads."""

import pytest
import torch
from gpu_reference import judge

import rapt

DEVICE = "cuda"


class Cache:
    """Caches of ragged sequences, in pages or not. Rows that no sequence has are NaN: whatever reads one shows it."""

    def __init__(self, seed, lengths, kv_heads, dims, dtype, page_size=None, room=None, extra_pages=3):
        torch.manual_seed(seed)
        self.lengths, self.page_size = lengths, page_size
        self.room = room or max([*lengths, 1])
        dim, dim_v = dims
        self.k = [torch.randn(n, kv_heads, dim, device=DEVICE).to(dtype) for n in lengths]
        self.v = [torch.randn(n, kv_heads, dim_v, device=DEVICE).to(dtype) for n in lengths]
        poison = lambda *shape: torch.full(shape, float("nan"), device=DEVICE).to(dtype)  # noqa: E731
        batch = len(lengths)
        self.page_table = None
        if page_size is None:
            self.k_cache, self.v_cache = (poison(batch, self.room, kv_heads, d) for d in dims)
        else:
            entries = -(-self.room // page_size)
            used = [-(-n // page_size) for n in lengths]
            pages = sum(used) + extra_pages
            order = torch.randperm(pages)
            # What lies behind the pages of a sequence is not read: no page has such a number.
            table, at = torch.full((batch, entries), -(2**31), dtype=torch.int32), 0
            for b, n in enumerate(used):
                table[b, :n] = order[at : at + n]
                at += n
            self.free = order[at:].to(torch.int32)
            self.page_table = table.to(DEVICE)
            self.k_cache, self.v_cache = (poison(pages, page_size, kv_heads, d) for d in dims)
        for b in range(batch):
            for cache, rows in ((self.k_cache, self.k[b]), (self.v_cache, self.v[b])):
                for j in range(0, len(rows), page_size or max(len(rows), 1)):
                    block, row = self.place(b, j)
                    part = rows[j : j + (page_size or len(rows))]
                    cache[block, row : row + len(part)] = part
        self.seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def place(self, b, j):
        if self.page_size is None:
            return b, j
        return int(self.page_table[b, j // self.page_size]), j % self.page_size

    def attend(self, q, **options):
        options = {"cache_seqlens": self.seqlens, "page_table": self.page_table, **options}
        return rapt.attention_with_kvcache(q, self.k_cache, self.v_cache, return_lse=True, **options)

    def alone(self, q, b, **options):
        """Sequence `b` by itself, as [1, heads, len, dim]."""
        if options.pop("causal", None) or (options.keys() & {"window", "alibi_slopes"}):
            options["causal"] = "bottom_right"
        k, v = (x[b][None].transpose(1, 2) for x in (self.k, self.v))
        return rapt.attention(q[b : b + 1].transpose(1, 2), k, v, return_lse=True, **options)

    def check(self, q, **options):
        """Each sequence has the bits of a call alone, and those are right."""
        out, lse = self.attend(q, **options)
        for b in range(len(self.lengths)):
            alone, alone_lse = self.alone(q, b, **options)
            assert torch.equal(bits(out[b]), bits(alone[0].transpose(0, 1))), f"sequence {b} of {self.lengths}"
            assert torch.equal(bits(lse[b]), bits(alone_lse[0])), f"lse of sequence {b}"
            assert out[b].isfinite().all(), "a row that no sequence has was read"
        return out, lse


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def queries(batch, q_len, heads, dim, dtype):
    return torch.randn(batch, q_len, heads, dim, device=DEVICE).to(dtype)


LENGTHS = [1500, 0, 1, 63, 64, 513, 2048, 700]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 2, 7, 16, 48, 64, 256])
def test_each_sequence_has_the_bits_of_a_call_alone(dtype, page_size):
    lengths = LENGTHS if dtype != torch.float64 else [100, 0, 33]
    cache = Cache(1, lengths, 2, (64, 64), dtype, page_size, room=2100)
    q = queries(len(lengths), 1, 8, 64, dtype)
    out, lse = cache.check(q)
    for b, n in enumerate(lengths):
        if n > 0 and n < 700:
            k, v = (x[b][None].transpose(1, 2) for x in (cache.k, cache.v))
            judge(out[b : b + 1].transpose(1, 2), lse[b : b + 1], q[b : b + 1].transpose(1, 2), k, v)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all(), "a sequence without keys"


@pytest.mark.parametrize("page_size", [None, 16, 3])
@pytest.mark.parametrize(
    "heads, q_len, dims",
    [((8, 8), 1, (128, 128)), ((32, 8), 1, (128, 128)), ((8, 2), 4, (64, 128)), ((4, 4), 16, (96, 80)), ((6, 2), 3, (33, 40)), ((4, 2), 2, (256, 256)), ((2, 1), 1, (320, 300))],
    ids=str,
)
def test_shapes(page_size, heads, q_len, dims):
    cache = Cache(2, [1300, 17, 600, 16], heads[1], dims, torch.bfloat16, page_size)
    cache.check(queries(4, q_len, heads[0], dims[0], torch.bfloat16))
    cache.check(queries(4, q_len, heads[0], dims[0], torch.bfloat16), causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("q_len", [1, 5])
def test_options(page_size, dtype, q_len):
    cache = Cache(3, [1200, 3, 90, 520], 2, (64, 64), dtype, page_size, room=1500)
    q = queries(4, q_len, 4, 64, dtype)
    sinks = torch.randn(4, device=DEVICE)
    slopes = torch.rand(4, device=DEVICE)
    for options in [
        {"causal": True},
        {"causal": True, "window": (100, 0)},
        {"softcap": 5.0, "scale": 0.3},
        {"sinks": sinks},
        {"causal": True, "alibi_slopes": slopes, "window": (700, 3), "sinks": sinks, "softcap": 20.0},
    ]:
        cache.check(q, **options)


def test_long_sequences_and_many_of_them():
    cache = Cache(4, [70000, 40, 17000, 16384, 16383, 65535], 1, (64, 64), torch.bfloat16, 64)
    cache.check(queries(6, 1, 4, 64, torch.bfloat16))
    lengths = [(b * 37) % 300 for b in range(150)]
    cache = Cache(5, lengths, 2, (64, 64), torch.bfloat16, 16)
    cache.check(queries(150, 2, 4, 64, torch.bfloat16), causal=True)


@pytest.mark.parametrize("page_size", [None, 16, 5])
def test_strides_change_no_bit(page_size):
    cache = Cache(6, [900, 31, 400], 2, (64, 64), torch.bfloat16, page_size)
    q = queries(3, 2, 4, 64, torch.bfloat16)
    out, lse = cache.attend(q)
    wide = torch.full((*cache.k_cache.shape[:-1], 131), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    wide[..., 1:129:2] = cache.k_cache
    cache.k_cache = wide[..., 1:129:2]
    cache.v_cache = cache.v_cache.permute(2, 1, 3, 0).contiguous().permute(3, 1, 0, 2)
    cache.seqlens = torch.stack([cache.seqlens, cache.seqlens * 0 - 7], 1)[:, 0]
    if page_size:
        cache.page_table = cache.page_table.t().contiguous().t()
    again, lse_again = cache.attend(q.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(bits(out), bits(again)) and torch.equal(bits(lse), bits(lse_again))


def codes_of(x, format, granularity):
    """[blocks, rows, heads, dim] as codes whose factors lie where the keys do, or are of [batch, heads]; and in host memory as [blocks, heads, rows, dim]."""
    block = 32 if granularity == "block" else None
    x = torch.nan_to_num(x).transpose(1, 2).contiguous().cpu()
    host = rapt.quantize(x, format, granularity=granularity, block_size=block)
    place = lambda t: (t.transpose(1, 2).contiguous() if t.dim() >= 3 else t).cuda()  # noqa: E731
    codes = place(host.codes.view(torch.uint8)).view(host.codes.dtype)
    zero_point = None if host.zero_point is None else place(host.zero_point)
    return host, codes, place(host.scale), zero_point


@pytest.mark.parametrize("page_size", [None, 16, 32, 6])
@pytest.mark.parametrize(
    "format, granularity",
    [
        *[(format, "token") for format in ("int8", "uint8", "e4m3fn", "e5m2", "int4")],
        *[(format, None) for format in ("mxfp8", "mxfp4", "nvfp4")],
        *[(format, "head") for format in ("int8", "uint8", "e4m3fn")],
        ("int8", "block"),
        ("int4", "block"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes(format, granularity, page_size, dtype):
    if granularity == "head" and page_size:
        pytest.skip("a factor of a head is of a sequence, and a page is of none")
    if dtype == torch.float32 and (format, granularity) not in (("int8", "token"), ("nvfp4", None)):
        pytest.skip("kernels of float32 differ in the terms of q alone")
    cache = Cache(7, [1100, 5, 0, 333], 2, (64, 64), torch.float32, page_size)
    q = queries(4, 2, 4, 64, dtype)
    names = {"cache_seqlens": cache.seqlens, "page_table": cache.page_table}
    parts, hosts, raw = [], [], {}
    for name, x in (("k", cache.k_cache), ("v", cache.v_cache)):
        host, codes, scale, zero_point = codes_of(x, format, granularity)
        if granularity == "head":
            raw |= {f"{name}_descale": scale, f"{name}_zero_point": zero_point}
        else:
            codes = rapt.Quantized(
                codes,
                scale,
                format=format,
                shape=x.shape,
                granularity=host.granularity,
                block_size=host.block_size,
                zero_point=zero_point,
                global_scale=host.global_scale,
            )
        parts.append(codes), hosts.append(host)
    out, lse = rapt.attention_with_kvcache(q, *parts, **names, **raw, causal=True, return_lse=True)
    for b, n in enumerate(cache.lengths):
        if n == 0:
            assert (out[b] == 0).all()
            continue
        blocks, rows = (torch.tensor(x) for x in zip(*[cache.place(b, j) for j in range(n)]))
        pick = lambda t: t[blocks, :, rows].transpose(0, 1)[None].contiguous()  # noqa: E731
        part = lambda t: None if t is None else (t[b : b + 1] if granularity == "head" else pick(t)).cuda()  # noqa: E731
        alone = [
            rapt.Quantized(
                pick(host.codes.view(torch.uint8)).cuda().view(host.codes.dtype),
                part(host.scale),
                format=format,
                shape=(1, 2, n, 64),
                granularity=host.granularity,
                block_size=host.block_size,
                zero_point=part(host.zero_point),
                global_scale=host.global_scale,
            )
            for host in hosts
        ]
        numbers = [pick(host.dequantize()).cuda() for host in hosts]
        q_alone = q[b : b + 1].transpose(1, 2)
        want, want_lse = rapt.attention(q_alone, *alone, causal="bottom_right", return_lse=True)
        assert torch.equal(bits(out[b : b + 1].transpose(1, 2)), bits(want)), f"sequence {b}"
        assert torch.equal(bits(lse[b : b + 1]), bits(want_lse)), f"lse of sequence {b}"
        judge(want, want_lse, q_alone, *numbers, causal="bottom_right")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("new", [1, 3, 16, 130])
def test_new_keys_are_written_and_attended(dtype, page_size, new):
    lengths = [100, 0, 31, 640]
    grown = Cache(8, [n + new for n in lengths], 2, (64, 32), dtype, page_size)
    cache = Cache(8, [n + new for n in lengths], 2, (64, 32), dtype, page_size)
    k = torch.stack([x[n:] for x, n in zip(grown.k, lengths)])
    v = torch.stack([x[n:] for x, n in zip(grown.v, lengths)])
    for b, n in enumerate(lengths):
        for j in range(n, n + new):
            block, row = cache.place(b, j)
            cache.k_cache[block, row] = cache.v_cache[block, row] = float("nan")
    q = queries(4, new, 4, 64, dtype)
    before = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out, lse = rapt.attention_with_kvcache(
        q, cache.k_cache, cache.v_cache, k, v, cache_seqlens=before, page_table=cache.page_table, causal=True, return_lse=True
    )
    want, want_lse = grown.attend(q, causal=True)
    assert torch.equal(bits(out), bits(want)) and torch.equal(bits(lse), bits(want_lse))
    assert torch.equal(bits(cache.k_cache), bits(grown.k_cache)) and torch.equal(bits(cache.v_cache), bits(grown.v_cache))
    assert before.tolist() == lengths, "lengths are the caller's"


@pytest.mark.parametrize("format", [None, "int8", "e4m3fn"])
@pytest.mark.parametrize("page_size", [16, 5])
def test_a_page_that_does_not_exist_spoils_its_sequence_alone(page_size, format):
    cache = Cache(9, [800, 300, 64, 700], 2, (64, 64), torch.bfloat16, page_size)
    q = queries(4, 1, 4, 64, torch.bfloat16)
    parts = {}
    if format:
        codes = torch.zeros(cache.k_cache.shape, dtype=torch.int8, device=DEVICE)
        codes = codes if format == "int8" else codes.view(torch.float8_e4m3fn)
        scale = torch.ones(cache.k_cache.shape[:-1], device=DEVICE)
        cache.k_cache = cache.v_cache = codes
        parts = {"k_descale": scale, "v_descale": scale}
    want, want_lse = cache.attend(q, **parts)
    for wrong in (-1, cache.k_cache.shape[0], 2**31 - 1):
        for at in (0, 800 // page_size // 2, 800 // page_size - 1):
            kept = cache.page_table[0, at].clone()
            cache.page_table[0, at] = wrong
            out, lse = cache.attend(q, **parts)
            cache.page_table[0, at] = kept
            assert out[0].isnan().all() and lse[0].isnan().all(), f"entry {at} is {wrong}"
            assert torch.equal(bits(out[1:]), bits(want[1:])) and torch.equal(bits(lse[1:]), bits(want_lse[1:]))
    out, _ = cache.attend(q, **parts)
    assert torch.equal(bits(out), bits(want)), "the engine is still usable"


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_length_that_the_cache_does_not_hold_spoils_its_sequence_alone(page_size):
    cache = Cache(10, [80, 30, 64, 70], 2, (64, 64), torch.bfloat16, page_size)
    q = queries(4, 1, 4, 64, torch.bfloat16)
    want, _ = cache.attend(q)
    kept = cache.k_cache.clone(), cache.v_cache.clone()
    for wrong in (-1, -(2**31), 81, 2**31 - 1):
        cache.seqlens[2] = wrong
        out, lse = cache.attend(q)
        assert out[2].isnan().all() and lse[2].isnan().all(), wrong
        others = [0, 1, 3]
        assert torch.equal(bits(out[others]), bits(want[others]))
        k = torch.randn(4, 1, 2, 64, device=DEVICE).to(torch.bfloat16)
        cache.seqlens[[0, 1, 3]] -= 1
        out = rapt.attention_with_kvcache(
            q, cache.k_cache, cache.v_cache, k, k, cache_seqlens=cache.seqlens, page_table=cache.page_table
        )
        cache.seqlens[[0, 1, 3]] += 1
        assert out[2].isnan().all() and out[others].isfinite().all()
        cache.k_cache.copy_(kept[0]), cache.v_cache.copy_(kept[1])


def test_lengths_of_the_host_are_one_number():
    cache = Cache(11, [96, 96], 2, (64, 64), torch.bfloat16, 16)
    q = queries(2, 1, 4, 64, torch.bfloat16)
    want, _ = cache.check(q)
    out, _ = cache.attend(q, cache_seqlens=96)
    assert torch.equal(bits(out), bits(want))
    out, _ = cache.attend(q, cache_seqlens=torch.tensor([96, 96], dtype=torch.int32))
    assert torch.equal(bits(out), bits(want))
    with pytest.raises(rapt.DeviceError, match="cache_seqlens"):
        cache.attend(q, cache_seqlens=torch.tensor([96, 95], dtype=torch.int32))
    with pytest.raises(rapt.DeviceError, match="page_table"):
        cache.attend(q, page_table=cache.page_table.cpu())
    with pytest.raises(rapt.RaptError):
        cache.attend(q, cache_seqlens=97)


def test_what_is_not_served_is_refused_and_nothing_is_written():
    cache = Cache(12, [96, 40], 2, (64, 64), torch.bfloat16, 16)
    kept = cache.k_cache.clone()
    q = queries(2, 1, 4, 64, torch.bfloat16)
    k = torch.zeros(2, 1, 2, 64, device=DEVICE, dtype=torch.float16)
    with pytest.raises(rapt.RaptError, match="float16"):
        rapt.attention_with_kvcache(q, cache.k_cache, cache.v_cache, k, k, cache_seqlens=cache.seqlens, page_table=cache.page_table)
    with pytest.raises(rapt.RaptError):
        cache.attend(q, causal="top_left")
    assert torch.equal(bits(kept), bits(cache.k_cache))
    cache.check(q)


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_graph_follows_lengths_that_change(page_size):
    cache = Cache(13, [400, 90, 130], 2, (64, 64), torch.bfloat16, page_size, room=512, extra_pages=64)
    if page_size:
        used = (cache.seqlens.cpu() + 15) // 16
        free = iter(cache.free.tolist())
        for b in range(3):
            for entry in range(int(used[b]), 512 // 16):
                page = next(free, None)
                if page is not None and entry < int(used[b]) + 2:
                    cache.page_table[b, entry] = page
    q = queries(3, 1, 4, 64, torch.bfloat16)
    k, v = (torch.randn(3, 1, 2, 64, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(q)
    call = lambda: rapt.attention_with_kvcache(  # noqa: E731
        q, cache.k_cache, cache.v_cache, k, v, cache_seqlens=cache.seqlens, page_table=cache.page_table, causal=True, out=out
    )
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(5):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        for b in range(3):
            cache.k[b], cache.v[b] = torch.cat([cache.k[b], k[b]]), torch.cat([cache.v[b], v[b]])
            alone, _ = cache.alone(q, b)
            assert torch.equal(bits(out[b]), bits(alone[0].transpose(0, 1))), f"step {step}, sequence {b}"
        cache.seqlens += 1


def test_another_stream_and_many_threads():
    import threading

    cache = Cache(14, [900, 31, 400], 2, (64, 64), torch.bfloat16, 16)
    q = queries(3, 1, 4, 64, torch.bfloat16)
    want, _ = cache.attend(q)
    wrong = []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                out, _ = cache.attend(q)
                stream.synchronize()
                if not torch.equal(bits(out), bits(want)):
                    wrong.append(out)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
