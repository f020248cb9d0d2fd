"""The GPU: what it is, and the rates that it sustains, measured beside the rows.

    copy_gbs          a 2 GiB device-to-device copy, bytes read and bytes written both counted
    gemm_tflops       a bfloat16 matrix product of 8192^3 on random data (zeros run 13 % faster and would flatter nobody but the floor)
    exponentials_per_s   multiprocessors x 16 x highest clock

16 results of ex2 per cycle and multiprocessor, 4 in each of its quarters: CUDA C++ Programming Guide, "Throughput of Native Arithmetic
Instructions", row "reciprocal, reciprocal square root, base-2 logarithm, base-2 exponential, sine and cosine", compute capability 8.0 to
12.0. A kernel may compute some of them by polynomials on the FMA units instead, and then go below that floor.
"""

import datetime
import platform
import statistics
import subprocess

import rapt

EX2_PER_CYCLE = 16


def need_torch():
    """torch with a GPU, or `rapt.DeviceError` that says what is missing."""
    try:
        import torch
    except ImportError:
        raise rapt.DeviceError(
            "the CUDA benchmark needs torch, whose tensors and kernels it measures, and torch is not installed: pip install torch"
        ) from None
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise rapt.DeviceError(
            f"the CUDA benchmark needs an NVIDIA GPU, and torch {torch.__version__} (built with {built}) sees none: "
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES; the CPU has `rapt bench` and `cargo xtask bench cpu`"
        )
    return torch


def driver_version():
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
        return found.stdout.strip().splitlines()[0] if found.returncode == 0 and found.stdout.strip() else None
    except (OSError, subprocess.TimeoutExpired):
        return None


class Gpu:
    """Where tensors are made, and the clock that times what runs on them: torch's current CUDA device and stream."""

    where = "cuda"
    copy_bytes = 2 << 30
    gemm_size = 8192

    def __init__(self, torch):
        self.torch = torch

    def facts(self):
        """What the figures are measured on."""
        torch = self.torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        clock = getattr(properties, "clock_rate", 0) * 1e3 or None
        multiprocessors = properties.multi_processor_count
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": properties.name,
            "capability": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": multiprocessors,
            "clock_hz": clock,
            "l2_bytes": getattr(properties, "L2_cache_size", 0) or 64 << 20,
            "memory_bytes": properties.total_memory,
            "exponentials_per_s": multiprocessors * EX2_PER_CYCLE * clock if clock else None,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "rapt": rapt.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        }

    def synchronize(self):
        self.torch.cuda.synchronize()

    def free_bytes(self):
        return self.torch.cuda.mem_get_info()[0]

    def milliseconds(self, body, hold_cycles=0):
        """Between two events round what `body` enqueues; the stream is held for that many cycles before them."""
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        if hold_cycles and hasattr(self.torch.cuda, "_sleep"):
            self.torch.cuda._sleep(hold_cycles)
        first.record()
        body()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


class Ceilings:
    """The two rates, measured again in every round."""

    def __init__(self, gpu):
        torch, self.gpu = gpu.torch, gpu
        size = min(gpu.copy_bytes, gpu.free_bytes() // 16)
        self.source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=gpu.where)
        self.target = torch.empty_like(self.source)
        self.size = gpu.gemm_size
        self.a, self.b = (torch.randn(self.size, self.size, device=gpu.where).to(torch.bfloat16) for _ in range(2))
        self.c = torch.empty_like(self.a)
        self.samples = []
        self.ask()  # cuBLAS chooses its kernel on the first call
        self.samples.clear()

    def ask(self):
        """One sample of both."""
        copy_ms = self.gpu.milliseconds(lambda: self.target.copy_(self.source))
        gemm_ms = self.gpu.milliseconds(lambda: self.gpu.torch.mm(self.a, self.b, out=self.c))
        sample = {"copy_gbs": 2 * self.source.numel() / copy_ms / 1e6, "gemm_tflops": 2 * self.size**3 / gemm_ms / 1e9}
        self.samples.append(sample)
        return sample

    @property
    def method(self):
        """In words, for the record."""
        return {
            "copy_bytes": self.source.numel(), "gemm_size": self.size, "gemm_dtype": "bfloat16",
            "exponentials_per_cycle_and_multiprocessor": EX2_PER_CYCLE,
        }  # fmt: skip


def combined(samples):
    """Medians of samples, and how many there are."""
    names = ("copy_gbs", "gemm_tflops") if samples else ()
    return {name: statistics.median(sample[name] for sample in samples) for name in names} | {"samples": len(samples)}
