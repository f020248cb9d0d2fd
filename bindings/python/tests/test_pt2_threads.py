"""Whose threads run a program: `Context(threads)`'s, else torch's own for torch tensors, else the default engine's.

Programs share the rule with attention. The bits of results depend neither on the number of threads nor on their pool.
"""

import io
import pathlib
import sys
import time

import numpy as np
import pytest
import rapt

torch = pytest.importorskip("torch", minversion="2.9")

from pt2_compare import same_bits  # noqa: E402
from rapt import _native  # noqa: E402
from rapt.torch._backend import backend  # noqa: E402
from torch.nn import functional  # noqa: E402


def saved(module, args, dynamic=None):
    held = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(module.eval(), args, dynamic_shapes=dynamic), held)
    return held.getvalue()


@pytest.fixture
def number():
    """torch's number of threads, to be set; put back at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Everything(torch.nn.Module):
    """Each kind of step that is shared among threads: convolution, products, attention, norms, experts, chains, a cache."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.conv, self.embed = torch.nn.Conv2d(3, 24, 3, padding=1), torch.nn.Conv2d(24, 64, 4, stride=4)
        self.norm, self.qkv = torch.nn.LayerNorm(64), torch.nn.Linear(64, 192)
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.experts = torch.nn.Parameter(torch.randn(3, 64, 64) / 8)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, image, ends):
        x = self.embed(functional.silu(self.conv(image))).flatten(2).transpose(1, 2).contiguous()
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, 16).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + h.transpose(1, 2).reshape(batch, length, width)
        x = x + self.down(functional.gelu(self.up(functional.rms_norm(x, (width,)))))
        scores = (x @ x.transpose(1, 2)).softmax(-1)
        self.seen.add_(scores.sum((0, 1))[:width])
        routed = torch._grouped_mm(x.reshape(-1, width), self.experts, offs=ends)
        return routed * torch.sigmoid(x.reshape(-1, width)), scores, self.seen.clone(), x.argsort(-1)


def everything():
    return torch.randn(2, 3, 40, 40), torch.tensor([50, 60, 200], dtype=torch.int32)


def test_bits_depend_neither_on_the_number_of_threads_nor_on_their_pool(number):
    module, args = Everything(), everything()
    archive = saved(module, args)
    expected = None

    def check(model, given, what):
        nonlocal expected
        session = model.session()
        got = [*session(*given), *session(*given)]
        got = [torch.as_tensor(x) for x in got]
        expected = expected or got
        assert all(map(same_bits, got, expected)), what

    model, packed = rapt.load(archive), set()
    for threads in (1, 2, 3, 5):
        number(threads)
        rows = model.explain(*args)
        assert rows["threads"] == str(threads)
        packed.add(rows["weights packed"])
        check(model, args, f"{threads} threads of torch")
    assert len(packed) == 1 and packed != {"0 bytes"}, "plans share packed weights"
    check(model, [x.numpy() for x in args], "numpy")
    for threads in (1, 2, 3, 5):
        with rapt.Context(threads=threads) as context:
            check(context.load(archive), args, f"a context of {threads} threads")
    with torch.no_grad():
        module.seen.zero_()
        torch.testing.assert_close(expected[0], module(*args)[0], rtol=1e-4, atol=1e-4)


def of_rapt():
    """Seconds that each thread of Rapt's own pools ran."""
    spent = {}
    for folder in pathlib.Path("/proc/self/task").iterdir():
        if (folder / "comm").read_text().startswith("rapt-"):
            spent[folder.name] = int((folder / "schedstat").read_text().split()[0])
    return spent


def of_rapt_at_rest():
    """The same once threads that looked for more work after their last have gone to sleep: on a busy machine that is some time later."""
    spent = of_rapt()
    for _ in range(100):
        time.sleep(0.05)
        before, spent = spent, of_rapt()
        if spent == before:
            break
    return spent


class Wide(torch.nn.Module):
    """Work for several threads."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, x):
        return functional.gelu(self.layer(x)).sin()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
def test_torch_tensors_run_on_torchs_own_threads_and_no_others(number):
    module, x = Wide(), torch.randn(512, 256)
    model = rapt.load(saved(module, (x,)))
    compiled = torch.compile(module, backend=backend)
    calls = [model, model.session(), compiled]
    # On one thread no pool is asked; on more, torch's own, where its C interface reaches it.
    for threads in (1, 3) if _native.shares_torch_pool() else (1,):
        number(threads)
        before = of_rapt_at_rest()
        with torch.no_grad():
            for call in calls:
                call(x)
        assert of_rapt() == before, threads
    with rapt.Context(threads=2) as context:
        model, before = context.load(saved(module, (x,))), of_rapt_at_rest()
        for _ in range(20):
            model(x)
        assert of_rapt() != before, "a Context has threads of its own"


def test_explain_says_how_many_threads(number):
    x = torch.randn(512, 256)
    archive = saved(Wide(), (x,), ({0: torch.export.Dim.DYNAMIC},))
    model = rapt.load(archive)
    default = rapt.Context().threads
    number(default + 1)
    rows = model.explain()
    assert (rows["threads"], rows["threads for torch tensors"]) == (str(default), str(default + 1))
    assert model.explain(x)["threads"] == str(default + 1)
    assert model.explain(x.numpy())["threads"] == str(default)
    few = model.explain(x=x[:3])
    assert few["plan for sizes"].endswith("= 3") and "threads for torch tensors" not in few
    with pytest.raises(rapt.DtypeBoundaryError):
        model.explain(x.double())
    with rapt.Context(threads=default + 2) as context:
        own = context.load(archive)
        rows = own.explain()
        assert rows["threads"] == str(default + 2) and "threads for torch tensors" not in rows
        assert own.explain(x)["threads"] == own.explain(x.numpy())["threads"] == str(default + 2)
        session = own.session()
    # What a context loaded serves on after its end.
    np.testing.assert_array_equal(session(x.numpy()), model(x.numpy()))


def test_a_context_loads_what_load_does(tmp_path):
    x = torch.ones(2, 256)
    path = tmp_path / "wide.pt2"
    path.write_bytes(saved(Wide(), (x,)))
    context = rapt.Context(threads=1)
    assert torch.equal(context.load(path)(x), rapt.load(str(path))(x))
    assert isinstance(context.load(path.read_bytes()), rapt.Model)
    with pytest.raises(rapt.ProgramError):
        context.load(b"no archive")
    with pytest.raises(TypeError):
        context.load(7)
