"""explain's certificate: what was proven about the tensors, with numbers."""

import numpy as np
import pytest
import rapt
from reference import random
from test_dlpack import Tensor


def test_numpy_is_declared_and_torch_is_proven(rng, torch):
    q, kv = random(rng, (2, 4, 10, 8)), random(rng, (2, 2, 12, 8))
    plan = rapt.explain(q, kv, kv, return_lse=True)
    facts = plan.certificate
    assert list(facts) == ["in_bounds", "injective", "disjoint", "coverage"]
    assert list(facts["in_bounds"]) == ["q", "k", "v", "out", "lse"]
    assert facts["in_bounds"]["q"] == {"elements": 640, "bytes": (0, 2560), "storage": None, "extent": "declared"}
    assert facts["injective"]["out"]["elements"] == 640 and facts["injective"]["lse"]["elements"] == 80
    assert {name for name, fact in facts["in_bounds"].items() if fact["extent"] == "declared"} == {"q", "k", "v"}
    assert facts["in_bounds"]["out"]["storage"] == (0, 2560) and facts["in_bounds"]["lse"]["storage"] == (0, 320)
    assert list(facts["disjoint"]["lse"]) == ["q", "k", "v", "out"]
    assert facts["coverage"]["rows"] == 80
    assert facts["coverage"]["tasks"] * facts["coverage"]["rows_per_task"] == 80
    assert "declared, not proven" in str(plan) and "each written once" in str(plan)
    assert plan.to_dict()["certificate"] == facts

    storage = torch.zeros(10_000)
    q = storage[100:740].view(2, 4, 10, 8)
    kv = torch.from_numpy(kv)
    facts = rapt.explain(q, kv, kv).certificate
    assert facts["in_bounds"]["q"]["storage"] == (-400, 39_600)
    assert {fact["extent"] for fact in facts["in_bounds"].values()} == {"proven"}
    assert "declared" not in str(rapt.explain(q, kv, kv))


def test_strides_masks_and_an_own_output(rng):
    q, k, v = (random(rng, (2, 9, 4, 8)).transpose(0, 2, 1, 3) for _ in range(3))
    mask, sinks = np.broadcast_to(rng.random((1, 9)) < 0.5, (9, 9)), random(rng, 4)
    # q and out are the even and the odd columns of one array: apart, and it takes steps to see.
    both = np.zeros((2, 4, 9, 16), np.float32)
    q, out = both[..., ::2], both[..., 1::2]
    facts = rapt.explain(q, k, v, mask=mask, sinks=sinks, out=out).certificate
    assert facts["disjoint"]["out"]["q"] > 0 and facts["disjoint"]["out"]["k"] == 0
    assert facts["in_bounds"]["mask"]["elements"] == 81 and facts["in_bounds"]["mask"]["bytes"] == (0, 9)
    with pytest.raises(rapt.LayoutError, match="shares memory with q"):
        rapt.explain(q, k, v, out=both[..., 1:9])


def test_other_producers_and_empty_problems(rng):
    x = random(rng, (1, 2, 5, 8))

    class Homeless(Tensor):
        __module__ = "nowhere"

    # No from_dlpack is needed to explain.
    facts = rapt.explain(*[Homeless(x)] * 3).certificate
    assert {name for name, fact in facts["in_bounds"].items() if fact["extent"] == "declared"} == {"q", "k", "v"}
    none = x[:, :, :0]
    assert rapt.explain(x, none, none).certificate["coverage"] == {"rows": 10, "items": 0, "parts": 1}


def test_an_output_that_no_memory_holds_leaves_the_plan_without_a_certificate():
    element = np.zeros(1, np.float32)
    huge = np.broadcast_to(element, (1, 1 << 20, 1 << 20, 64))
    small = np.broadcast_to(element, (1, 1 << 20, 8, 64))
    try:
        plan = rapt.explain(huge, small, small)
    except MemoryError:
        pytest.fail("explain asks for no memory that it needs")
    assert plan.certificate is None and plan.kernel == "forward"
    with pytest.raises((MemoryError, rapt.DeviceError)):
        rapt.attention(huge, small, small)


def test_a_workspace_that_no_memory_holds_is_a_device_error():
    element = np.zeros(64, np.float32)
    q = np.broadcast_to(element, (1, 1, 1, 64))
    kv = np.broadcast_to(element, (1, 1, 1 << 50, 64))
    out = np.full((1, 1, 1, 64), 7, np.float32)
    with pytest.raises(rapt.DeviceError, match="bytes of workspace"):
        rapt.attention(q, kv, kv, out=out)
    assert (out == 7).all()
    np.testing.assert_array_equal(rapt.attention(q, kv[:, :, :3], kv[:, :, :3], out=out), np.zeros_like(out))
