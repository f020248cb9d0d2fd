"""torch tensors on mps: what Rapt asks torch to encode for them, and what comes of it, against the reference in f64."""

import numpy as np
import pytest
import rapt
import rapt.torch
import torch
import torch.nn.functional as F
from fake_torch import array_of, tensor
from rapt._reference import attention as reference

rng = np.random.default_rng(20261126)


def memory_of(values, dtype):
    """f64 values in a dtype of torch, as bytes."""
    if dtype is torch.bfloat16:
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values).astype({torch.float32: np.float32, torch.float16: np.float16, torch.bool: np.bool_}[dtype])


def fused(fake, batch, heads, length, dim, dtype):
    """q, k and v as views [batch, heads, length, dim] into one fused [batch, length, 3, heads, dim], and their numbers."""
    memory = memory_of(rng.standard_normal((batch, length, 3, heads, dim)), dtype)
    row = 3 * heads * dim
    views = [tensor(fake, memory, dtype, (batch, heads, length, dim), (length * row, dim, row, 1), part * heads * dim) for part in range(3)]
    return views, [array_of(fake, view) for view in views]


def plain(fake, dtype, *shape):
    memory = memory_of(rng.standard_normal(shape), dtype)
    strides = [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]
    made = tensor(fake, memory, dtype, shape, strides)
    return made, array_of(fake, made)


def error(out, want):
    return np.linalg.norm(out - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_registered_sdpa_is_served_on_views_where_they_lie(fake, dtype, limit):
    (q, k, v), numbers = fused(fake, 2, 3, 37, 24, dtype)
    assert q.device.type == "mps" and v.storage_offset() == 2 * 3 * 24
    rapt.torch.reset_stats()
    with rapt.torch.backend(), torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.device.type == "mps" and out.shape == q.shape and out.is_contiguous()
    assert error(array_of(fake, out), reference(*numbers, causal="top_left")[0]) < limit
    stats = rapt.torch.stats()
    assert stats["served"] == 1 and not stats["fallback"], stats
    kinds = [call[0] for call in fake.calls]
    assert kinds == ["library", "function", "dispatch"], fake.calls
    _, threads, group, bound, params = fake.calls[-1]
    assert (threads, group, len(params)) == ((6 * 256, 1, 1), (256, 1, 1), 256)
    assert [bound[slot][0] for slot in (1, 2, 3)] == [each.data_ptr() for each in (q, k, v)]
    # The same again: nothing is compiled.
    with rapt.torch.backend(), torch.no_grad():
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert [call[0] for call in fake.calls[3:]] == ["dispatch"]


def test_attention_takes_every_option_and_an_output(fake):
    q, q_numbers = plain(fake, torch.float32, 1, 4, 1, 16)
    k, k_numbers = plain(fake, torch.float32, 1, 2, 300, 16)
    v, v_numbers = plain(fake, torch.float32, 1, 2, 300, 8)
    out, _ = plain(fake, torch.float32, 1, 4, 1, 8)
    given = {"causal": "bottom_right", "window": (200, None), "softcap": 3.0, "scale": 0.4}
    got, lse = rapt.attention(q, k, v, out=out, return_lse=True, **given)
    want, want_lse = reference(q_numbers, k_numbers, v_numbers, **given)
    assert got is out and error(array_of(fake, out), want) < 1e-6
    assert np.allclose(array_of(fake, lse), want_lse, rtol=1e-6)
    names = [call[1] for call in fake.calls if call[0] == "library"]
    assert names[0].startswith("// decode of 4 rows") and names[1].startswith("// combine"), names


def test_explain_tells_the_kernel_and_what_it_rests_on(fake):
    q, _ = plain(fake, torch.float32, 1, 2, 70, 16)
    plan = rapt.explain(q, q, q)
    text = str(plan)
    assert "matrices float32 on msl" in text and "in bounds        q: 2,240 elements in bytes 0..8960 of a storage of 0..8960: proven" in text, text
    assert not [call for call in fake.calls if call[0] == "dispatch"]
    assert plan.certificate is not None


def test_what_is_refused_is_refused_before_anything_is_encoded(fake):
    q, _ = plain(fake, torch.float32, 1, 2, 7, 16)
    host = torch.zeros(1, 2, 7, 16)
    with pytest.raises(rapt.DeviceError, match="k is on cpu, q is on mps:0") as told:
        rapt.attention(q, host, q)
    assert "`k.to(q.device)`" in str(told.value)
    with pytest.raises(rapt.OptionError, match="attended to where they lie"):
        rapt.attention(q, q, q, device="vulkan:0")
    with pytest.raises(rapt.LayoutError, match="out"):
        rapt.attention(q, q, q, out=q)
    assert not [call for call in fake.calls if call[0] == "dispatch"]


def test_a_call_that_torch_refuses_is_its_error_and_registered_it_is_torchs_own(fake):
    q, _ = plain(fake, torch.float32, 1, 2, 7, 16)
    fake.mistake = "aoti_torch_mps_set_arg_tensor"
    with pytest.raises(rapt.DeviceError, match="aoti_torch_mps_set_arg_tensor"):
        rapt.attention(q, q, q)
    rapt.torch.reset_stats()
    with rapt.torch.backend(), torch.no_grad(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q, q)  # torch's own has no kernels here
    assert rapt.torch.stats()["fallback"] == {"device mps": 1}


def test_gradients_are_torchs_own(fake):
    q, _ = plain(fake, torch.float32, 1, 2, 7, 16)
    q.requires_grad_()
    rapt.torch.reset_stats()
    with rapt.torch.backend(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q, q)
    assert rapt.torch.stats()["fallback"] == {"requires grad": 1} and not fake.calls


def test_the_doctor_says_that_no_apple_machine_has_run_it(fake):
    assert rapt.doctor()["metal"] == {"metal": "served; never run on Apple hardware"}
    assert rapt.is_available("mps")
