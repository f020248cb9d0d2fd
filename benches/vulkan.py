"""`python benches/vulkan.py`: attention on a GPU that Vulkan reaches, Rapt and its peers in one interleaved run. docs/reference/benchmarks.md explains it.

    python benches/vulkan.py [--adapter 0] [--rapt PROGRAM] [--rounds 5] [--seconds 0.3] [--out FOLDER]

Peers are onnxruntime-webgpu (com.microsoft MultiHeadAttention) and aule-attention (its Vulkan backend); one that is not installed is left out.
Each engine is timed twice: on arrays of the host, with the copies there and back, and on tensors that lie on the device: the peers by the
host's clock without those copies, Rapt's kernel by the device's (`rapt bench --device`). Deliberately absent: masks, codes
and GQA, which MultiHeadAttention has not.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import machine
import numpy as np
import reference

import rapt
import rapt.vulkan
from rapt import _reference
from rapt.bench import interleaved, table

CHAIN = 17  # attentions of one submission; of onnxruntime a graph, from whose time that of a graph of one is taken
SAMPLED = 32  # query rows of the first and of the last head, whose reference is computed
DTYPES = {"float32": np.float32, "float16": np.float16}
SHORT = {long: short for short, long in reference.DTYPES.items()}


@dataclasses.dataclass
class Row:
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str

    @property
    def name(self):
        lengths = f"{self.q_len}²" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        return f"{self.batch},{self.heads},{lengths},{self.head_dim}"

    def arrays(self):
        """q, k and v as [batch, len, heads, head_dim] lie: what MultiHeadAttention takes, and Rapt as a view."""
        rng = np.random.default_rng(7)
        lengths = (self.q_len, self.kv_len, self.kv_len)
        return [rng.standard_normal((self.batch, n, self.heads, self.head_dim), np.float32).astype(DTYPES[self.dtype]) for n in lengths]


ROWS = [
    Row(1, 4, 256, 256, 64, "float32"),
    Row(1, 12, 77, 77, 64, "float32"),
    Row(1, 16, 1024, 1024, 64, "float32"),
    Row(1, 16, 1024, 1024, 64, "float16"),
    Row(1, 16, 2048, 2048, 128, "float32"),
    Row(1, 16, 2048, 2048, 128, "float16"),
    Row(4, 16, 4096, 4096, 128, "float16"),
    Row(1, 32, 1, 8192, 128, "float32"),
    Row(1, 32, 1, 8192, 128, "float16"),
]
OF_PROCESSOR = ROWS[:2]


def heads_first(x):
    return x.transpose(0, 2, 1, 3)


class Rapt:
    """`rapt.attention(device=)` on host arrays; its kernel alone by `rapt bench`."""

    name = "rapt"

    def __init__(self, adapter, program):
        self.device, self.program = f"vulkan:{adapter}", program

    def versions(self):
        return f"rapt {rapt.__version__}"

    def prepare(self, row, q, k, v):
        q, k, v = map(heads_first, (q, k, v))

        def on_host():
            return rapt.attention(q, k, v, device=self.device)

        shape = f"{row.batch},{row.heads},{row.q_len},{row.kv_len},{row.head_dim}"

        def on_device(seconds):
            with tempfile.TemporaryDirectory() as folder:
                file = pathlib.Path(folder) / "figures.json"
                words = ["--shape", shape, "--dtype", row.dtype, "--device", self.device, "--seconds", str(5 * seconds), "--calls", str(CHAIN), "--chosen", "--json", str(file)]
                done = subprocess.run([self.program, "bench", *words], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(done.stderr or done.stdout)
                (figures,) = [of for of in json.loads(file.read_text())["rows"] if of["is_selected"]]
            return figures["timing"]["seconds"]

        return on_host, on_device, lambda out: out


class OnnxRuntime:
    name = "onnxruntime"

    def __init__(self, adapter, program):
        import onnx
        import onnxruntime

        if "WebGpuExecutionProvider" not in onnxruntime.get_available_providers():
            raise ImportError("this onnxruntime has no WebGPU")
        self.onnx, self.onnxruntime = onnx, onnxruntime

    def versions(self):
        return f"onnxruntime-webgpu {self.onnxruntime.__version__}"

    @functools.cache
    def session(self, heads, dtype, nodes):
        """So many attentions one after another, each over the same k and v with the answer of the one before as its queries."""
        helper, kind = self.onnx.helper, getattr(self.onnx.TensorProto, {"float32": "FLOAT", "float16": "FLOAT16"}[dtype])
        names = ["q", *(f"x{n}" for n in range(1, nodes)), "out"]
        attend = functools.partial(helper.make_node, "MultiHeadAttention", domain="com.microsoft", num_heads=heads)
        chain = [attend([q, "k", "v"], [out]) for q, out in zip(names, names[1:])]
        of = functools.partial(helper.make_tensor_value_info, elem_type=kind, shape=[None, None, None])
        graph = helper.make_graph(chain, "attention", [of(name) for name in "qkv"], [of("out")])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        made = self.onnxruntime.InferenceSession(model, providers=["WebGpuExecutionProvider", "CPUExecutionProvider"])
        if made.get_providers()[0] != "WebGpuExecutionProvider":
            raise RuntimeError("it computes on the CPU, for want of an adapter")
        return made

    def prepare(self, row, q, k, v):
        one, many = (self.session(row.heads, row.dtype, nodes) for nodes in (1, CHAIN))
        feeds = {name: x.reshape(row.batch, x.shape[1], -1) for name, x in zip("qkv", (q, k, v))}

        def on_host():
            return one.run(None, feeds)[0]

        def on_device(seconds):
            # Tensors cannot be left on the device (its allocator is not there in Python): what more nodes take without more copies.
            def of(session):
                return of_host(lambda: session.run(None, feeds), seconds / 2)

            return max(of(many) - of(one), 0.0) / (CHAIN - 1)

        return on_host, on_device, lambda out: heads_first(out.reshape(row.batch, row.q_len, row.heads, -1))


class Aule:
    name = "aule"

    def __init__(self, adapter, program):
        import aule.vulkan

        self.module, self.engine = aule, aule.vulkan.Aule()

    def versions(self):
        return f"aule-attention {self.module.__version__} ({self.engine.device_name})"

    def prepare(self, row, q, k, v):
        if row.dtype != "float32":
            raise RuntimeError(f"uploading {row.dtype} ends the process with a segmentation fault")
        qkv = [np.ascontiguousarray(heads_first(x)) for x in (q, k, v)]

        def on_host():
            return self.engine.attention(*qkv)

        self.engine.clear_tensors()
        placed = [self.engine.tensor(x.shape, x.dtype) for x in qkv]
        out = self.engine.tensor(qkv[0].shape, qkv[0].dtype)
        for tensor, x in zip(placed, qkv):
            tensor.upload(x)

        def on_device(seconds):
            def calls(count):
                began = time.perf_counter()
                for _ in range(count):
                    self.engine.attention_gpu(*placed, out)
                out.download()
                return time.perf_counter() - began

            return of_many(calls, seconds)

        return on_host, on_device, lambda got: got


def of_many(calls, seconds):
    """Seconds of a call, by the difference between many and one, so that the wait at the end counts in neither."""
    one = calls(1)
    count = max(4, min(2000, int(seconds / max(one, 1e-6))))
    return max(calls(count) - calls(1), 0.0) / (count - 1)


def once(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def of_host(call, seconds):
    first = once(call)
    return statistics.median(once(call) for _ in range(max(3, min(500, int(seconds / max(first, 1e-6))))))


def judged(row, q, k, v, out):
    """(error, limit) of sampled rows of the first and the last head, by the rule; flash's roundings stand for PyTorch."""
    rows = np.unique(np.linspace(0, row.q_len - 1, SAMPLED, dtype=int))
    got, want, rounded = [], [], []
    for batch, head in {(0, 0), (row.batch - 1, row.heads - 1)}:
        q1, k1, v1 = (heads_first(x)[batch : batch + 1, head : head + 1].astype(np.float64) for x in (q, k, v))
        options = {"queries": rows, "q_len": row.q_len}
        want.append(_reference.attention(q1[:, :, rows], k1, v1, **options)[0])
        rounded.append(_reference.flash_rounded(q1[:, :, rows], k1, v1, row.dtype, **options))
        got.append(out[batch : batch + 1, head : head + 1][:, :, rows].astype(np.float64))
    got, want, rounded = map(np.concatenate, (got, want, rounded))
    limit = reference.limit(SHORT[row.dtype], [reference.error(rounded, want)], "flash's roundings")
    return reference.error(got, want), limit


def measure(row, engines, rounds, seconds, lost):
    """{engine: {"host": […], "device": […], "error": …}}"""
    q, k, v = row.arrays()
    figures, prepared = {}, {}
    for engine in engines:
        try:
            on_host, on_device, as_heads = engine.prepare(row, q, k, v)
            error, limit = judged(row, q, k, v, np.asarray(as_heads(on_host())))
            on_device(0.02)
        except Exception as problem:  # each peer has gaps of its own
            lost.append(f"{row.name} {row.dtype}: {engine.name}: {str(problem).strip().splitlines()[0][:300]}")
            print(lost[-1], file=sys.stderr, flush=True)
            continue
        prepared[engine.name] = on_host, on_device
        figures[engine.name] = {"host": [], "device": [], "error": error.relative, "limit": limit.relative, "right": limit.allows(error)}
    for _ in range(rounds):
        for name, (on_host, on_device) in prepared.items():
            figures[name]["host"].append(of_host(on_host, seconds))
            figures[name]["device"].append(on_device(seconds))
    return figures


def cell(rounds):
    return f"{1e3 * statistics.median(rounds):.3f} ±{100 * interleaved.spread(rounds):.0f}%"


def ratio(figures, of, name):
    """How many times as long as Rapt; no word of speed where an answer is wrong."""
    if name not in of or "rapt" not in of:
        return "–"
    return f"{of[name] / of['rapt']:.2f}" if figures[name]["right"] and figures["rapt"]["right"] else "wrong"


def tables(measured, names):
    made = []
    for where, title in (("host", "Calls on host arrays, copies counted, ms"), ("device", "Tensors on the device, ms")):
        header = ["row", "dtype", "", *names, *(f"{name} / rapt" for name in names[1:])]
        lines = []
        for row, figures in measured:
            of = {name: statistics.median(figures[name][where]) for name in figures}
            ratios = [ratio(figures, of, name) for name in names[1:]]
            lines.append([row.name, row.dtype, "", *(cell(figures[name][where]) if name in figures else "–" for name in names), *ratios])
        made.append((title, header, lines, []))
    lines = []
    for row, figures in measured:
        cells = [f"{figures[name]['error']:.1e}" + ("" if figures[name]["right"] else f" WRONG > {figures[name]['limit']:.1e}") if name in figures else "–" for name in names]
        lines.append([row.name, row.dtype, "", *cells])
    made.append(("Relative error of sampled rows", ["row", "dtype", "", *names], lines, []))
    return made


def main():
    parser = argparse.ArgumentParser(prog="benches/vulkan.py", description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", type=int, default=0, help="of `rapt doctor`")
    parser.add_argument("--peers", default="onnxruntime,aule", help="beside Rapt (%(default)s)")
    parser.add_argument("--rapt", default="rapt", help="the command line built with the feature `vulkan` (default: that of the path)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one engine in one round")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the record (default: none is written)")
    chosen = parser.parse_args()
    if chosen.rounds < 2:
        parser.error("--rounds: a spread needs two or more")
    adapter = rapt.vulkan.adapters()[f"vulkan:{chosen.adapter}"]
    is_processor = "cpu" in adapter.lower()
    engines, lost = [], []
    for engine in (Rapt, OnnxRuntime, Aule):
        if engine is not Rapt and engine.name not in chosen.peers.split(","):
            continue
        try:
            engines.append(engine(chosen.adapter, chosen.rapt))
        except Exception as problem:
            lost.append(f"{engine.name} is left out: {problem}")
    names = [engine.name for engine in engines]
    print("\n".join(lost), flush=True)
    lost_rows = []
    rows = OF_PROCESSOR if is_processor else ROWS
    if not is_processor:
        # A device that waited has its clock low: it is kept busy before the first row.
        warm = ["--shape", "4,16,4096,4096,128", "--dtype", "float16", "--device", f"vulkan:{chosen.adapter}", "--seconds", "2"]
        subprocess.run([chosen.rapt, "bench", *warm], check=True, capture_output=True)
    progress = interleaved.Progress(len(rows))
    measured = []
    for row in rows:
        figures = measure(row, engines, chosen.rounds, chosen.seconds, lost_rows)
        measured.append((row, figures))
        progress.add([f"{row.name} {row.dtype}: " + "  ".join(f"{name} {cell(of['device'])}" for name, of in figures.items())])
    facts = [
        f"{datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')}, {adapter}",
        ", ".join(engine.versions() for engine in engines),
        f"`python benches/vulkan.py --rounds {chosen.rounds} --seconds {chosen.seconds}`, commit {machine.git('rev-parse', '--short', 'HEAD') or 'unknown'}",
        f"device: onnxruntime by the host's clock, what {CHAIN - 1} more attentions of one graph take; aule by the host's clock over many calls and "
        f"one wait; Rapt's kernel by the device's clock, {CHAIN} calls of one submission",
    ]
    made = tables(measured, names)
    print(table.text(made))
    print("\n".join(lost_rows))
    lost += lost_rows
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "vulkan.md").write_text(table.markdown("A GPU by Vulkan", facts, made, lost))
        content = {"machine": {"adapter": adapter}, "facts": facts, "lost": lost, "rows": [{**dataclasses.asdict(row), "figures": figures} for row, figures in measured]}
        (chosen.out / "vulkan.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
