"""The native kernel behind PyTorch's op: a request that it knows is read, proven and answered as a new one is."""

import pytest

torch = pytest.importorskip("torch")

import rapt  # noqa: E402
from rapt import _native  # noqa: E402
from test_torch_stats import check, same_views, sdpa, served, stock, tensor  # noqa: E402

MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("mode", MODES)
def test_a_known_request_is_computed_on_the_tensors_at_hand(mode):
    requests = [
        ((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8), None, {}),
        ((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 3), (6, 5), {"enable_gqa": True}),
        ((4, 6, 8), (1, 6, 8), (1, 6, 8), None, {"is_causal": True}),
        ((6, 8), (5, 8), (5, 8), (6, 5), {"scale": 0.3}),
    ]
    for q_shape, k_shape, v_shape, mask_shape, options in requests:
        for seed in range(3):
            q, k, v = (tensor(*shape, seed=seed + at) for at, shape in enumerate((q_shape, k_shape, v_shape)))
            mask = None if mask_shape is None else tensor(*mask_shape, seed=seed)
            with mode():
                own = stock(q.clone(), k.clone(), v.clone(), mask, **options)
                with served():
                    out = sdpa(q.clone(), k.clone(), v.clone(), mask, **options)
            same_views(out, own)
            check(out.clone(), q, k, v, mask, **options)


def test_strides_dtypes_options_and_masks_are_part_of_a_request():
    q, k, v = tensor(1, 2, 6, 8), tensor(1, 2, 6, 8, seed=1), tensor(1, 2, 6, 8, seed=2)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    mask = torch.rand(6, 6) < 0.6
    mask[:, 0] = True
    for _ in range(2):
        for options in [{}, {"is_causal": True}, {"scale": 0.5}, {"scale": 0.25}]:
            with served(2):
                plain, strided = sdpa(q, k, v, **options), sdpa(turned, k, v, **options)
            assert torch.equal(plain, strided)
            same_views(strided, stock(turned, k, v, **options))
            check(plain, q, k, v, **options)
        with served(2):
            masked, columns = sdpa(q, k, v, mask), sdpa(q, k, v, mask.t())
        check(masked, q, k, v, mask)
        check(columns, q, k, v, mask.t())
        with served():
            half = sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16())
        check(half, q.bfloat16(), k.bfloat16(), v.bfloat16())


def test_a_known_request_on_memory_that_is_gone_is_refused():
    q = tensor(1, 1, 4, 16)
    with served():
        sdpa(q, q.clone(), q.clone())
    shrunk = q.clone()
    shrunk.untyped_storage().resize_(4 * 40)
    with served(0), pytest.raises(rapt.LayoutError, match=r"its storage holds 0\.\.160"):
        sdpa(q, shrunk, q.clone())


def test_a_known_request_follows_torchs_threads():
    q = tensor(1, 8, 256, 32)
    before = torch.get_num_threads()
    try:
        answers = []
        for threads in (1, 2, 1, 3):
            torch.set_num_threads(threads)
            with served():
                answers.append(sdpa(q, q, q))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_more_requests_than_the_table_holds():
    with served(1200):
        for n in range(1, 1201):
            q = torch.full((1, 1, 1, n), 0.5)
            assert torch.equal(sdpa(q, q, q), q)


def test_no_tensor_is_kept_alive():
    import gc
    import sys

    q = tensor(1, 2, 5, 8)
    before = sys.getrefcount(q)
    with served(5):
        for _ in range(5):
            out = sdpa(q, q, q)
    with served(0), pytest.raises(rapt.ShapeError):
        sdpa(q, q[..., :3, :], q)
    del out
    gc.collect()
    assert sys.getrefcount(q) == before


def test_the_kernel_alone_hands_on_what_is_out_of_the_ordinary(request):
    seen = []

    def cold(*args, **kwargs):
        seen.append((len(args), kwargs))
        return "cold"

    allowed = True
    kernel = _native.TorchKernel(cold, [lambda: allowed], False)
    q = tensor(1, 2, 5, 8)
    assert kernel(q, q, q) == "cold", "a kernel that nobody registered answered"
    seen.clear()
    _native.set_registered(True)
    request.addfinalizer(lambda: _native.set_registered(False))
    assert torch.equal(kernel(q, q, q), rapt.attention(q, q, q))
    grad = kernel(q.clone().requires_grad_(), q, q)
    assert torch.equal(grad, rapt.attention(q, q, q)) and "Node" in grad.grad_fn.name()
    dropped = []
    for leaf in (q, q.clone().requires_grad_()):
        torch.manual_seed(1)
        dropped.append(kernel(leaf, q, q, None, 0.5))
    assert torch.equal(*dropped) and not torch.equal(dropped[0], grad) and dropped[1].requires_grad
    assert not seen
    handed = [
        ((q, q, q, None, 1.5), {}),
        ((q, q, q, None, -1.0), {}),
        ((q, q, q), {"scale": float("inf")}),
        ((q, q, q), {"unheard": 1}),
        ((q, q, q, torch.zeros(5, 5), 0.0, True), {}),
        ((q, q, q[..., :3, :]), {}),
        ((q.int(), q.int(), q.int()), {}),
        ((q[:, :, :0], q, q), {}),
        ((q, q), {}),
    ]
    for args, kwargs in handed:
        assert kernel(*args, **kwargs) == "cold"
    assert seen == [(len(args), kwargs) for args, kwargs in handed]
    allowed = False
    assert kernel(q, q, q) == "cold"
