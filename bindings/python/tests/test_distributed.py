"""`rapt.distributed`: four processes on gloo against one, every option, uneven lengths, gradients, and what is lost or differs.

The processes are forked once, from one that has imported torch, and run every case of distributed_cases.py; RAPT_WHOLE=1 has more lengths and dtypes.
"""

import datetime
import json
import os
import struct
import sys
import time
from pathlib import Path

import fresh
import pytest

pytest.importorskip("torch")
if sys.platform != "linux":
    pytest.skip("ranks are forked, and talk through the loopback device `lo`", allow_module_level=True)

import distributed_cases  # noqa: E402

NAMES = list(distributed_cases.cases(bool(os.environ.get("RAPT_WHOLE"))))
WRONG = [*distributed_cases.faults(), *(name for name in NAMES if name.startswith(("differences", "what cannot")))]
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import distributed_cases
distributed_cases.main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found of each case: None, or what was wrong."""
    begun = time.monotonic()
    ran = fresh.run(PROGRAM, str(tmp_path_factory.mktemp("ranks")), timeout=600)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    print(f"{time.monotonic() - begun:.1f} s")
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRONG])
def test_ranks_agree_with_one_process(found, name):
    check(found, name)


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_or_is_lost_is_an_error_on_every_rank(found, name):
    check(found, name)


def test_distances_of_keys_nearby_are_not_rounded_as_those_of_keys_far_away(monkeypatch):
    import rapt
    import torch
    from rapt.distributed import _blocks, _merge, _methods

    document, n = ((0, 640, 0, 640),), 640
    alone = _blocks.pieces(((0, n),), ((0, n),), document, "top_left", None, True)
    assert [(piece.rows, piece.keys, piece.slopes) for piece in alone] == [((0, n), (0, n), "direct")]
    draw = torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(1, 2, n, 16, generator=draw) for _ in range(4))
    slopes = torch.tensor([4.0, 0.5])
    for causal in ("top_left", None):
        call = _methods.Call(None, "contiguous", (n,), (n,), document, causal, None, None, None, slopes)
        merged, places = _merge.Merged(tuple(q.shape), torch.float32, q.device), ((0, 300), (300, n))
        blocks = [(block, k[:, :, slice(*block)], v[:, :, slice(*block)]) for block in ((0, 150), (150, 640))]
        for block, some_k, some_v in blocks:
            _methods.attend(call, merged, q, some_k, some_v, (block,), None, slopes, q_places=places)
        out, lse = merged.finish(None)
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        want, want_lse = rapt.attention(*leaves, causal=causal, alibi_slopes=slopes.double(), return_lse=True)
        (want * d_o).sum().backward()
        want, want_lse = want.detach(), want_lse.detach()
        assert ((lse - want_lse).abs() <= 1e-5 * (1 + want_lse.abs())).all() and (out - want).norm() <= 1e-6 * want.norm()
        # Of keys far away lse in their distances is beyond what `attention_backward` takes for the sum of a row. In 16 bits, as on GPUs, too.
        largest = _methods.asks_for_largest(lse, slopes)()
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            monkeypatch.setattr(_methods, "products_dtype", lambda _q, dtype=dtype: dtype)
            rows = _methods.rows_of(d_o, None, q, out, lse, None, largest)
            dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
            for block, some_k, some_v in blocks:
                some = slice(*block)
                _methods.differentiate(call, rows, some_k, some_v, (block,), slopes, dq, dk[:, :, some], dv[:, :, some], None, q_places=places)
            assert all((got - leaf.grad).norm() <= limit * leaf.grad.norm() for got, leaf in zip((dq, dk, dv), leaves))


def test_a_page_is_taken_when_it_is_whole_and_of_this_exchange(tmp_path):
    from rapt.distributed import _pages

    path = tmp_path / "pages"
    path.write_bytes(bytes(2 * 2 * _pages.Shared._PLACE))
    one, other = (_pages.Shared(rank, [os.getpid()] * 2, path, datetime.timedelta(seconds=0.05)) for rank in range(2))
    # The same text every time: what a place had two exchanges before is not taken for what it will have, nor are pages of zeros.
    for text in (b"", b"a", b"a", b"a", b"", b"b" * _pages.PAGE):
        wait = one.begin(text)
        assert wait() == ([text, None], {1: "gone, or in no call within 0.05 s"})
        assert other.begin(text)() == ([text, text], {}) == wait()
    # A part of a page: the number alone, then all but some of its text.
    wait = one.begin(b"")
    struct.pack_into("<Q", one.memory, one._place(1), one.number)
    assert wait() == ([b"", None], {1: "gone, or in no call within 0.05 s"})
    other.begin(b"whole")
    at = other._place(1) + _pages.Shared._HEAD.size
    other.memory[at : at + 1] = b"h"
    assert wait() == ([b"", None], {1: "gone, or in no call within 0.05 s"})
    other.memory[at : at + 1] = b"w"
    assert wait() == ([b"", b"whole"], {})


def check(found, name):
    assert not found.get(""), found[""]
    assert name in found, "no rank came so far"
    assert found[name] is None, found[name]
