"""A machine without an NVIDIA GPU: the package imports, serves the CPU, and says of every GPU request why it cannot be."""

import subprocess
import sys

import pytest
import rapt
from test_dlpack_cuda import OnGpu

pytestmark = pytest.mark.skipif(rapt.is_available("cuda"), reason="a GPU is there")


def test_nothing_of_cuda_is_loaded_by_import():
    code = (
        "import rapt\n"
        "maps = open('/proc/self/maps').read() if __import__('os').path.exists('/proc/self/maps') else ''\n"
        "assert 'libcuda' not in maps and 'libnvrtc' not in maps\n"
        "assert not rapt.is_available('cuda') and rapt.is_available('cpu')\n"
        "assert 'not available' in rapt.doctor()['cuda']['cuda'] or '0 devices' in rapt.doctor()['cuda']['cuda']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_function_raises_the_typed_error():
    x = OnGpu()
    with rapt.Context(threads=1) as ctx:
        for function in (rapt.attention, rapt.explain, rapt.scaled_dot_product_attention, ctx.attention, ctx.explain):
            with pytest.raises(rapt.DeviceError) as raised:
                function(x, x, x)
            text = str(raised.value)
            assert "cuda:0" in text and ("no NVIDIA driver" in text or "cu" in text), text
            assert "Mend: move q" in text and "to host memory" in text


def test_the_cpu_is_served_after_a_refusal(rng):
    import numpy as np

    with pytest.raises(rapt.DeviceError):
        rapt.attention(OnGpu(), OnGpu(), OnGpu())
    x = rng.standard_normal((1, 2, 5, 8)).astype(np.float32)
    assert rapt.attention(x, x, x).shape == x.shape
