"""cupy and jax arrays on the GPU: their own kind comes back, nothing is copied, streams are handed over both ways."""

import gc

import pytest
import torch

import rapt


def bits(x):
    t = torch.from_dlpack(x)
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def problem(dtype, q_len=150, kv_len=700, heads=4, kv_heads=2, dim=64):
    g = torch.Generator("cuda").manual_seed(7)
    new = lambda h, n: torch.randn(2, h, n, dim, generator=g, device="cuda").to(dtype)  # noqa: E731
    return new(heads, q_len), new(kv_heads, kv_len), new(kv_heads, kv_len)


# --- cupy ----------------------------------------------------------------------------------------------------------------

# From prefill, decoding (which needs a workspace) and the generic kernel.
CASES = [(torch.float16, 150), (torch.float16, 1), (torch.float32, 40), (torch.float64, 3)]


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("dtype, q_len", CASES)
def test_cupy_arrays_come_back_as_cupys(cupy, dtype, q_len):
    q, k, v = problem(dtype, q_len)
    torch.cuda.synchronize()
    want, want_lse = rapt.attention(q, k, v, causal="bottom_right", return_lse=True)
    torch.cuda.synchronize()
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    # As a projection gives it, and a slice of something wider.
    strided = cupy.ascontiguousarray(arrays[0].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    for first in (arrays[0], strided):
        out, lse = rapt.attention(first, *arrays[1:], causal="bottom_right", return_lse=True)
        assert type(out) is type(lse) is cupy.ndarray and out.dtype == arrays[0].dtype and out.flags.c_contiguous
        cupy.cuda.get_current_stream().synchronize()
        assert torch.equal(bits(out), bits(want)) and torch.equal(bits(lse), bits(want_lse))
    given = cupy.empty((2, q_len, 4, 64), out.dtype).transpose(0, 2, 1, 3)
    assert rapt.attention(*arrays, causal="bottom_right", out=given) is given
    mask = cupy.tril(cupy.ones((q_len, 700), bool), 700 - q_len)
    masked = rapt.attention(*arrays, mask=mask)
    cupy.cuda.get_current_stream().synchronize()
    assert torch.equal(bits(given), bits(want)) and torch.equal(bits(masked), bits(want))
    same = rapt.scaled_dot_product_attention(*arrays, enable_gqa=True)
    assert type(same) is cupy.ndarray and same.shape == out.shape
    assert "sm_" in str(rapt.explain(*arrays))


def test_cupys_current_stream_is_used_and_nothing_waits(cupy):
    q, k, v = problem(torch.float16)
    want = rapt.attention(q, k, v)
    torch.cuda.synchronize()
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    side = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.random.random((6000, 6000), dtype=cupy.float32)
    late = cupy.zeros_like(arrays[0])
    cupy.cuda.Device().synchronize()
    with side:
        # The work before takes longer than the call: the values of q arrive after it has returned.
        for _ in range(20):
            busy = busy @ busy * 1e-4
        late[...] = arrays[0]
        out = rapt.attention(late, *arrays[1:])
        assert not side.done, "the call waited"
    side.synchronize()
    assert torch.equal(bits(out), bits(want))


def test_cupys_pool_lends_the_memory(cupy):
    pool = cupy.get_default_memory_pool()
    q, k, v = [cupy.from_dlpack(x) for x in problem(torch.float16, 1, 8000)]
    torch.cuda.synchronize()
    outs = [rapt.attention(q, k, v) for _ in range(3)]
    used = pool.used_bytes()
    again = rapt.attention(q, k, v)
    cupy.cuda.get_current_stream().synchronize()
    assert pool.used_bytes() - used < 64 * 1024, "the workspace was kept"
    assert all(torch.equal(bits(out), bits(again)) for out in outs)


def test_cupy_refusals(cupy):
    q = cupy.zeros((1, 2, 5, 8), cupy.float32)
    with pytest.raises(rapt.KindError):
        rapt.attention(q, torch.zeros(1, 2, 5, 8, device="cuda"), q)
    with pytest.raises(rapt.UnsupportedDtypeError):
        rapt.attention(*[q.astype(cupy.int32)] * 3)
    with pytest.raises(rapt.LayoutError, match="out"):
        rapt.attention(q, q, q, out=q)
    with pytest.raises(rapt.ShapeError):
        rapt.attention(q, q[..., :4], q)


# --- jax -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"jax sees no GPU: {error}")
    return jax


@pytest.mark.parametrize("dtype, q_len", [(torch.bfloat16, 150), (torch.bfloat16, 1), (torch.float32, 40)])
def test_jax_arrays_come_back_as_jaxs(jax, dtype, q_len):
    tensors = problem(dtype, q_len)
    torch.cuda.synchronize()
    want, want_lse = rapt.attention(*tensors, causal="bottom_right", return_lse=True)
    arrays = [jax.numpy.from_dlpack(x) for x in tensors]
    out, lse = rapt.attention(*arrays, causal="bottom_right", return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == arrays[0].dtype and out.devices() == arrays[0].devices()
    torch.cuda.synchronize()
    assert torch.equal(bits(out), bits(want)) and torch.equal(bits(lse), bits(want_lse))
    # Work of jax before and after, without a wait between.
    total = (rapt.attention(arrays[0] * 2, *arrays[1:], scale=0.0625, causal="bottom_right") + 1).astype("float32") - 1
    assert float(jax.numpy.abs(total - out.astype("float32")).max()) < 0.02
    with pytest.raises(rapt.LayoutError, match="read-only"):
        rapt.attention(*arrays, out=jax.numpy.zeros_like(arrays[0]))


def test_what_jax_may_free_is_held_until_the_run_has_passed(jax):
    q, k, v = [jax.numpy.from_dlpack(x) for x in problem(torch.bfloat16, 4000, 4000)]
    want = rapt.attention(q, k, v)
    wants = jax.numpy.asarray(want).astype("float32")
    for _ in range(20):
        # Arrays that nobody else holds, freed at once and their memory taken again.
        out = rapt.attention(q + 0, k + 0, v + 0)
        junk = [jax.numpy.full_like(q, jax.numpy.nan) for _ in range(4)]
        assert bool((out.astype("float32") == wants).all())
        del out, junk
    gc.collect()


def test_devices_do_not_mix(jax):
    q = jax.numpy.zeros((1, 2, 5, 8))
    there = jax.device_put(q, jax.devices("cpu")[0])
    with pytest.raises(rapt.DeviceError, match="k is on cpu"):
        rapt.attention(q, there, q)
