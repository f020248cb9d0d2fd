"""`device=` of rapt.attention without the package that has GPUs: what is said of it, and what is served all the same."""

import ctypes
import importlib.util
import inspect
import subprocess
import sys
import types

import numpy as np
import pytest
import rapt
import rapt.vulkan
from test_dlpack_cuda import OnGpu

absent = pytest.mark.skipif(importlib.util.find_spec("rapt_vulkan") is not None, reason="rapt_vulkan is installed")
INSTALL = 'Mend: `pip install "rapt-attention[vulkan]"`'


def ones():
    return np.ones((1, 2, 3, 4), np.float32)


def callables():
    context = rapt.Context(threads=1)
    return (rapt.attention, rapt.explain, context.attention, context.explain)


@absent
def test_without_the_package_a_gpu_is_a_typed_error_that_says_how_to_have_it():
    x = ones()
    out = np.full_like(x, 7)
    for function in callables():
        for device in ("vulkan", "vulkan:0", "vulkan:3"):
            with pytest.raises(rapt.DeviceError) as raised:
                function(x, x, x, out=out, device=device)
            assert "package of their own, which is not installed" in str(raised.value) and str(raised.value).endswith(INSTALL)
    assert (out == 7).all()
    assert not rapt.is_available("vulkan")
    assert rapt.vulkan.stats() == {"served": 0, "bytes_copied": 0}


@absent
def test_without_the_package_doctor_and_the_command_say_the_same(tmp_path):
    [(name, why)] = rapt.vulkan.adapters().items()
    assert name == "vulkan" and why.endswith('not installed: pip install "rapt-attention[vulkan]"')
    assert rapt.doctor()["vulkan"] == {name: why} and rapt.doctor().ok
    path = str(tmp_path / "x.npy")
    np.save(path, ones())
    command = [sys.executable, "-m", "rapt", "run", path, path, path, str(tmp_path / "out.npy"), "--device", "vulkan"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().endswith(INSTALL), done.stderr
    assert not (tmp_path / "out.npy").exists()


def test_host_tensors_are_computed_on_the_host_where_that_is_asked():
    x = np.random.default_rng(1).standard_normal((2, 2, 9, 8)).astype(np.float32)
    expected = rapt.attention(x, x, x, causal=True)
    for function in (rapt.attention, rapt.Context(threads=1).attention):
        np.testing.assert_array_equal(function(x, x, x, causal=True, device="cpu"), expected)
    assert rapt.explain(x, x, x, device="cpu").isa == rapt.explain(x, x, x).isa


@pytest.mark.parametrize("device", ["cuda:0", "gpu", "vulkan:", "vulkan:-1", "", 0, True, b"cpu", np.float32])
def test_what_is_no_device_is_refused_with_what_is(device):
    x = ones()
    for function in callables():
        with pytest.raises(rapt.OptionError, match=r"device = .*; allowed: None .*'cpu', 'vulkan', 'vulkan:N'"):
            function(x, x, x, device=device)


def test_a_wrong_request_is_told_before_a_device_is_looked_for():
    with pytest.raises(rapt.ShapeError):
        rapt.attention(ones(), ones()[..., :2], ones(), device="vulkan:0")


def test_tensors_of_a_gpu_stay_where_they_lie():
    x = OnGpu()
    for device in ("cpu", "vulkan:0"):
        with pytest.raises(rapt.RaptError) as raised:
            rapt.attention(x, x, x, device=device)
        # Without a driver the tensors themselves cannot be read.
        assert isinstance(raised.value, rapt.DeviceError) or "None for tensors on cuda:0" in str(raised.value)


def test_a_traced_call_of_torch_takes_no_device(torch):
    import rapt.torch  # noqa: F401

    x = torch.ones(1, 2, 3, 4)
    traced = torch.compile(lambda x: rapt.attention(x, x, x, device="cpu"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="device=None"):
        traced(x)
    assert torch.equal(rapt.attention(x, x, x, device="cpu"), rapt.attention(x, x, x))


def test_a_package_of_another_version_is_refused(monkeypatch):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name, version = b"rapt_bridge", ctypes.c_uint32(4711)
    package = types.ModuleType("rapt_vulkan")
    package.interface = new(ctypes.addressof(version), name, None)
    monkeypatch.setitem(sys.modules, "rapt_vulkan", package)
    with pytest.raises(rapt.DeviceError, match=r"another version of Rapt: .* 4711, .*pip install --upgrade"):
        rapt.attention(ones(), ones(), ones(), device="vulkan:7")
    assert "another version" in rapt.vulkan.adapters()["vulkan"]
    # What is no interface at all is no crash either.
    package.interface = new(ctypes.addressof(version), b"another", None)
    with pytest.raises(ValueError, match="[Cc]apsule"):
        rapt.attention(ones(), ones(), ones(), device="vulkan:7")
    package.interface = 4711
    with pytest.raises(ValueError, match="[Cc]apsule"):
        rapt.attention(ones(), ones(), ones(), device="vulkan:7")


def test_the_extra_is_the_package_of_this_version():
    from pathlib import Path

    file = Path(__file__).parents[1] / "pyproject.toml"
    if not file.exists():
        pytest.skip("installed without the repository")
    assert f'vulkan = ["rapt-attention-vulkan=={rapt.__version__}"]\n' in file.read_text(encoding="utf-8")
    assert "device" in inspect.signature(rapt.attention).parameters
