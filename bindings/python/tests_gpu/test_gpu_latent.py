"""Multi-head latent attention on the GPU: keys of 576 numbers whose first 512 are the values, many query heads over one head of keys. Against
the f64 reference, and the bits of a call for each sequence and of values that lie apart."""

import pytest
import torch
from gpu_reference import judge

import rapt

DEVICE = "cuda"
DIM, DIM_V, SCALE = 576, 512, 192**-0.5


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


class Latent:
    """A latent cache of ragged sequences, in pages or not; NaN where no key lies, and no page behind those of a sequence."""

    def __init__(self, seed, lengths, dtype=torch.bfloat16, page_size=None, room=None, dims=(DIM, DIM_V)):
        torch.manual_seed(seed)
        (dim, self.dim_v), room, batch = dims, room or max([*lengths, 1]), len(lengths)
        self.keys = [normal(n, 1, dim, dtype=dtype) for n in lengths]
        self.page_size, self.table = page_size, None
        blocks, rows = batch, room
        if page_size is not None:
            entries = -(-room // page_size)
            blocks, rows = batch * entries + 2, page_size
            order = torch.randperm(blocks).to(torch.int32)
            self.table = torch.full((batch, entries), -(2**31), dtype=torch.int32)
            for b, n in enumerate(lengths):
                used = -(-n // page_size)
                self.table[b, :used] = order[b * entries : b * entries + used]
            self.table = self.table.to(DEVICE)
        self.cache = torch.full((blocks, rows, 1, dim), float("nan"), device=DEVICE).to(dtype)
        for b, keys in enumerate(self.keys):
            for j in range(0, len(keys), page_size or max(len(keys), 1)):
                block, row = (b, j) if page_size is None else (int(self.table[b, j // page_size]), 0)
                part = keys[j : j + (page_size or len(keys))]
                self.cache[block, row : row + len(part)] = part
        self.seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def call(self, q, k=None, v=None, **options):
        options = {"scale": SCALE, "return_lse": True, "cache_seqlens": self.seqlens, "page_table": self.table} | options
        return rapt.attention_with_kvcache(q, self.cache, options.pop("v_cache", self.cache[..., : self.dim_v]), k, v, **options)

    def alone(self, q, b, **options):
        k = self.keys[b][None].transpose(1, 2)
        if options.pop("causal", None):
            options["causal"] = "bottom_right"
        options = {"scale": SCALE} | options
        return rapt.attention(q[b : b + 1].transpose(1, 2), k, k[..., : self.dim_v], return_lse=True, **options)

    def check(self, q, out, lse, **options):
        for b, keys in enumerate(self.keys):
            one, one_lse = self.alone(q, b, **options)
            assert torch.equal(bits(out[b]), bits(one[0].transpose(0, 1))), f"sequence {b}"
            assert torch.equal(bits(lse[b]), bits(one_lse[0])), f"lse of sequence {b}"
            if 0 < len(keys) <= 2100:
                k = keys[None].transpose(1, 2)
                options = {"scale": SCALE} | options
                if options.get("causal"):
                    options["causal"] = "bottom_right"
                judge(one, one_lse, q[b : b + 1].transpose(1, 2), k, k[..., : self.dim_v], **options)


def on_tensor_cores():
    return torch.cuda.get_device_capability() in {(8, 0), (9, 0), (10, 0)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads, q_len", [(16, 1), (128, 1), (16, 4), (128, 4), (5, 3), (70, 1)])
def test_one_tensor(heads, q_len, dtype):
    torch.manual_seed(1)
    for kv_len in (q_len, 63, 64, 65, 700, 5000):
        q, k = normal(2, heads, q_len, DIM, dtype=dtype), normal(2, 1, kv_len, DIM, dtype=dtype)
        v = k[..., :DIM_V]
        for causal in (None, "bottom_right"):
            options = {"scale": SCALE, "causal": causal}
            out, lse = rapt.attention(q, k, v, return_lse=True, **options)
            apart, apart_lse = rapt.attention(q, k, v.contiguous(), return_lse=True, **options)
            assert torch.equal(bits(out), bits(apart)) and torch.equal(bits(lse), bits(apart_lse)), "values apart"
            judge(out, lse, q, k, v, **options)
    plan = rapt.explain(q, k, v)
    decodes = dtype != torch.float32 and on_tensor_cores()
    assert plan.kernel == ("decode" if decodes else "generic"), str(plan)


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 64, 256])
@pytest.mark.parametrize("heads, q_len", [(16, 1), (128, 1), (16, 4), (128, 2)])
def test_a_cache_has_the_bits_of_a_call_for_each_sequence(heads, q_len, page_size):
    cache = Latent(2, [2000, q_len, 63, 64, 513, 1024], page_size=page_size, room=2100)
    q = normal(6, q_len, heads, DIM)
    cache.check(q, *cache.call(q))
    cache.check(q, *cache.call(q, causal=True), causal=True)


@pytest.mark.parametrize("page_size", [None, 64])
def test_lengths_without_keys_long_and_many(page_size):
    cache = Latent(3, [0, 20000, 1, 4095, 4096, 40000], page_size=page_size)
    q = normal(6, 1, 16, DIM)
    out, lse = cache.call(q)
    assert (out[0] == 0).all() and (lse[0] == float("-inf")).all()
    cache.check(q, out, lse)
    cache = Latent(4, [(b * 37) % 300 for b in range(150)], page_size=page_size, room=4000)
    q = normal(150, 1, 128, DIM)
    cache.check(q, *cache.call(q))


@pytest.mark.parametrize("page_size", [None, 16, 5])
def test_options(page_size):
    cache = Latent(5, [1200, 3, 90], page_size=page_size)
    sinks, slopes = normal(16, dtype=torch.float32), torch.rand(16, device=DEVICE)
    for options in (
        {"softcap": 5.0, "scale": 0.3},
        {"sinks": sinks},
        {"causal": True, "window": (100, 0)},
        {"causal": True, "alibi_slopes": slopes, "sinks": sinks, "softcap": 20.0, "scale": -0.1},
    ):
        q = normal(3, 2, 16, DIM)
        cache.check(q, *cache.call(q, **options), **options)


def test_masks_and_odd_dims():
    torch.manual_seed(6)
    for dims in ((575, 511), (520, 264), (576, 512)):
        q, k = normal(2, 20, 2, dims[0]), normal(2, 1, 300, dims[0])
        keep = torch.rand(2, 1, 2, 300, device=DEVICE) < 0.7
        for mask in (None, keep, torch.randn(2, 20, 2, 300, device=DEVICE).bfloat16()):
            out, lse = rapt.attention(q, k, k[..., : dims[1]], mask=mask, return_lse=True)
            judge(out, lse, q, k, k[..., : dims[1]], mask=mask)


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
def test_new_rows_are_written_once_and_attended(page_size):
    for given in (True, False):
        cache = Latent(7, [100, 0, 63], page_size=page_size, room=200)
        if page_size is not None:
            blocks, entries = cache.cache.shape[0], cache.table.shape[1]
            cache.cache.fill_(float("nan"))
            cache.table = torch.arange(blocks, device=DEVICE, dtype=torch.int32)[: 3 * entries].view(3, entries)
            for b, keys in enumerate(cache.keys):
                for j, key in enumerate(keys):
                    cache.cache[b * entries + j // page_size, j % page_size] = key
        for new in (3, 1):
            q, k = normal(3, new, 16, DIM), normal(3, new, 1, DIM)
            out, lse = cache.call(q, k, k[..., :DIM_V] if given else None, causal=True)
            cache.seqlens += new
            cache.keys = [torch.cat(parts) for parts in zip(cache.keys, k, strict=True)]
            cache.check(q, out, lse, causal=True)
    v = k[..., :DIM_V].contiguous()
    with pytest.raises(rapt.LayoutError, match="k_cache shares memory with v_cache"):
        cache.call(q, k, v, causal=True)


def test_nan_behind_a_mask_reaches_nothing():
    torch.manual_seed(8)
    q, k = normal(1, 16, 4, DIM), normal(1, 1, 600, DIM)
    k[0, 0, 599], k[0, 0, 130, 7] = float("nan"), float("inf")
    keep = torch.ones(4, 600, dtype=torch.bool, device=DEVICE)
    keep[:, 130] = False
    for v in (k[..., :DIM_V], k[..., :DIM_V].contiguous()):
        out, lse = rapt.attention(q, k, v, mask=keep, causal="bottom_right", return_lse=True)
        assert out[:, :, :3].isfinite().all() and out[:, :, 3].isnan().all()
        judge(out, lse, q, k, v, mask=keep, causal="bottom_right")


def test_pages_that_do_not_exist_make_nan_and_no_other_sequence():
    cache = Latent(9, [700, 600, 50], page_size=64)
    q = normal(3, 1, 16, DIM)
    before, _ = cache.call(q)
    cache.table[1, 3] = 10**6
    out, _ = cache.call(q)
    assert out[1].isnan().all() and torch.equal(bits(out[[0, 2]]), bits(before[[0, 2]]))
    cache.seqlens[0] = 10**6
    out, _ = cache.call(q)
    assert out[0].isnan().all() and torch.equal(bits(out[2]), bits(before[2]))


def test_a_graph_follows_lengths_that_change():
    cache = Latent(10, [900, 70], page_size=64)
    q = normal(2, 1, 32, DIM)
    cache.call(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cache.call(q)
    for lengths in ([900, 70], [5, 64], [899, 1]):
        cache.seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        want, want_lse = cache.call(q)
        assert torch.equal(bits(out), bits(want)) and torch.equal(bits(lse), bits(want_lse))
