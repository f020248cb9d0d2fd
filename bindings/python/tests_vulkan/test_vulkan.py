"""`rapt.attention(..., device="vulkan:0")`: numpy, DLPack and torch tensors of the host, every option, and what is refused."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import rapt
import rapt.vulkan
from reference import assert_close, flash_rounded, random, reference
from test_dlpack import Tensor
from test_fork import in_child

GPU = "vulkan:0"


def problem(rng, q_len=3, kv_len=70, dtype="float32"):
    """Grouped heads; few queries are a kernel, keys of a tile and a part of one."""
    shapes = (2, 4, q_len, 16), (2, 2, kv_len, 16), (2, 2, kv_len, 16)
    return [random(rng, shape, dtype) for shape in shapes]


def assert_as_reference(out, q, k, v, **options):
    """By the tolerance rule, beside what a flash kernel's roundings give."""
    assert_close(out, reference(q, k, v, **options)[0], q.dtype.name, [flash_rounded(q, k, v, **options)])


def test_every_option_is_that_of_the_reference(rng):
    q, k, v = problem(rng)
    mask = rng.random((2, 1, 3, 70)) > 0.3
    mask[1, 0, 2] = False
    heads = [rng.standard_normal(4).astype(np.float32) for _ in range(2)]
    for options in (
        {},
        {"causal": "bottom_right", "window": (20, 0), "softcap": 3.0},
        {"causal": True, "scale": 0.3},
        {"mask": mask, "sinks": heads[0], "alibi_slopes": abs(heads[1])},
    ):
        out, lse = rapt.attention(q, k, v, **options, return_lse=True, device=GPU)
        assert type(out) is np.ndarray and out.dtype == np.float32
        assert_as_reference(out, q, k, v, **options)
        np.testing.assert_allclose(lse, reference(q, k, v, **options)[1], rtol=1e-5, atol=1e-5)


def test_strides_are_read_and_written_where_they_lie(rng):
    q, k, v = problem(rng)
    expected = rapt.attention(q, k, v, device=GPU)
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)[:, :, ::-1] for x in (q, k, v)]
    turned[1] = np.asfortranarray(turned[1])
    turned = [x[:, :, ::-1] for x in turned]
    whole = np.full((2, 4, 3, 2, 16), 7, np.float32)
    out = whole[:, :, :, 1]
    assert rapt.attention(*turned, out=out, device=GPU) is out
    np.testing.assert_array_equal(out, expected)
    assert (whole[:, :, :, 0] == 7).all(), "between the elements of out nothing is written"
    bshd = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    np.testing.assert_array_equal(rapt.attention(*bshd, layout="bshd", device="vulkan").transpose(0, 2, 1, 3), expected)
    np.testing.assert_array_equal(rapt.attention(q[0, 0], k[0, 0], v[0, 0], device=GPU), expected[0, 0])
    repeated = np.broadcast_to(k[:, :1], k.shape)
    assert_as_reference(rapt.attention(q, repeated, v, device=GPU), q, repeated, v)


def test_what_is_not_finite_and_what_is_empty(rng):
    q, k, v = problem(rng)
    k[0, 0, 50], v[1, 1, 60] = np.nan, np.inf
    mask = np.ones((1, 1, 3, 70), bool)
    mask[..., 50] = False
    options = {"mask": mask, "sinks": np.zeros(4, np.float32), "alibi_slopes": np.zeros(4, np.float32)}
    out = rapt.attention(q, k, v, **options, device=GPU)
    expected = reference(q, k, v, **options)[0]
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.isinf(out[1, 2:]).all() and np.isfinite(out[0]).all()
    assert rapt.attention(q[:, :, :0], k, v, device=GPU).shape == (2, 4, 0, 16)
    nothing = rapt.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True, device=GPU)
    assert (nothing[0] == 0).all() and (nothing[1] == -np.inf).all()


def test_half_precision_in_and_out(rng):
    q, k, v = problem(rng, dtype="float16")
    out = rapt.attention(q, k, v, device=GPU)
    assert out.dtype == np.float16
    assert_as_reference(out, q, k, v)


def test_dlpack_and_torch_tensors_come_back_as_they_came(rng):
    arrays = problem(rng)
    expected = rapt.attention(*arrays, device=GPU)
    out = rapt.attention(*[Tensor(x) for x in arrays], device=GPU)
    assert type(out) is Tensor
    np.testing.assert_array_equal(out.array, expected)
    torch = pytest.importorskip("torch")
    out = rapt.attention(*[torch.from_numpy(x) for x in arrays], device=GPU)
    assert out.device.type == "cpu"
    np.testing.assert_array_equal(out.numpy(), expected)
    leaf = torch.from_numpy(arrays[0]).requires_grad_()
    with pytest.raises(rapt.UnsupportedError, match="no_grad"):
        rapt.attention(leaf, *[torch.from_numpy(x) for x in arrays[1:]], device=GPU)


def test_the_copies_are_explained_and_counted(rng):
    q, k, v = problem(rng)
    plan = rapt.explain(q, k, v, return_lse=True, device=GPU)
    copied = q.nbytes + k.nbytes + v.nbytes + q.nbytes + q[..., 0].nbytes
    assert (plan.kernel, plan.isa, plan.bytes_copied) == ("decode", "wgsl", copied)
    assert "copied to vulkan:0 and back" in plan.why and f"{copied:,}".replace(",", "") in str(plan).replace(",", "").replace(" ", "")
    assert plan.certificate["disjoint"]["out"]
    with rapt.Context(threads=1) as context:
        assert context.explain(q, k, v, device=GPU).isa == "wgsl"
        rapt.vulkan.reset_stats()
        rapt.attention(q, k, v, device=GPU, return_lse=True)
        context.attention(q, k, v, device=GPU, return_lse=True)
        rapt.attention(q, k, v)
    with pytest.raises(rapt.UnsupportedError):
        rapt.attention(*[x.astype(np.float64) for x in (q, k, v)], device=GPU)
    assert rapt.vulkan.stats() == {"served": 2, "bytes_copied": 2 * copied}


def test_what_is_not_served_is_refused_with_a_hint(rng):
    q, k, v = problem(rng)
    refused = np.full(q.shape, 7, np.float32)
    doubles = [x.astype(np.float64) for x in (q, k, v)]
    with pytest.raises(rapt.UnsupportedError, match=r"no 64-bit floats.*Mend: `q.astype\(numpy.float32\)`.*`device=None`"):
        rapt.attention(*doubles, device=GPU)
    codes = [rapt.quantize(x, "int8", granularity="head") for x in (k, v)]
    for options in ({}, {"compute": "int8"}, {"tolerance": 0.1}):
        with pytest.raises(rapt.UnsupportedError, match=r"on vulkan:0 is not served: .*Mend: `device=None`"):
            rapt.attention(q, *codes, out=refused, device=GPU, **options)
    assert (refused == 7).all()
    with pytest.raises(rapt.DeviceError, match=r"no Vulkan adapter 4711.*Mend: an adapter of `rapt.vulkan.adapters\(\)`"):
        rapt.attention(q, k, v, device="vulkan:4711")
    with pytest.raises(rapt.LayoutError):
        rapt.attention(q, k, v, out=q, device=GPU)
    assert_as_reference(rapt.attention(q, k, v, device=GPU), q, k, v)


def test_threads_share_one_device(rng):
    q, k, v = problem(rng)
    expected = rapt.attention(q, k, v, device=GPU)
    outs = [None] * 4

    def work(at):
        outs[at] = [rapt.attention(q, k, v, device=GPU) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in (out for of_thread in outs for out in of_thread):
        np.testing.assert_array_equal(out, expected)


def test_a_forked_child_opens_the_device_anew(rng):
    q, k, v = problem(rng)
    expected = rapt.attention(q, k, v, device=GPU)
    assert in_child(lambda: np.array_equal(rapt.attention(q, k, v, device=GPU), expected))
    np.testing.assert_array_equal(rapt.attention(q, k, v, device=GPU), expected)


def test_doctor_and_the_command_use_the_device(rng, tmp_path):
    adapters = rapt.vulkan.adapters()
    assert rapt.is_available("vulkan") and "lack" in adapters[GPU]
    report = rapt.doctor()
    assert report["vulkan"] == adapters and GPU in str(report)
    names = "q", "k", "v"
    tensors = problem(rng)
    for name, x in zip(names, tensors, strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    files = [str(tmp_path / f"{name}.npy") for name in (*names, "out")]
    done = subprocess.run(
        [sys.executable, "-m", "rapt", "run", *files, "--device", "vulkan"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("decode float32 on wgsl\n")
    np.testing.assert_array_equal(np.load(files[-1]), rapt.attention(*tensors, device=GPU))
