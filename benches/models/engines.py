"""How each engine runs a row: a function of the inputs of one call, its versions, and the number of threads that the engine says it
uses. What a decoder keeps stays in the engine's own cache.

    eager, inductor    the module; the cache is written in place. inductor with `freezing`, which packs weights when it compiles
    onnxruntime        the module exported to ONNX; the cache is an input and an output, and the outputs are the next call's inputs
    rapt               the module exported to an archive with the cache in buffers, run in a session
"""

import pathlib
import tempfile

import torch

from . import build


def eager(row, threads):
    """(run, versions, threads)."""
    model = build.model(row)
    kept = [] if row.shape.kind == "encoder" else build.cache(row)
    return (lambda *inputs: model(*inputs, *kept)), {"torch": torch.__version__}, torch.get_num_threads()


def inductor(row, threads):
    import torch._inductor.config

    torch._inductor.config.freezing = True
    model = torch.compile(build.model(row), dynamic=False)
    kept = [] if row.shape.kind == "encoder" else build.cache(row)
    return (lambda *inputs: model(*inputs, *kept)), {"torch": torch.__version__}, torch.get_num_threads()


def archive(row, folder):
    """The path of the row's archive, written to `folder`."""
    model = build.model(row)
    if row.shape.kind != "encoder":
        model = build.Kept(model, build.cache(row))
    program = torch.export.export(model, build.calls(row)[0], strict=False)
    path = pathlib.Path(folder) / "model.pt2"
    torch.export.save(program, path)
    return path


def rapt(row, threads):
    import rapt as package

    with tempfile.TemporaryDirectory(prefix="rapt-bench-") as folder:
        # The file is mapped: it may lose its name while it is used.
        model = package.load(archive(row, folder))
    # Of the call that is timed: torch's tensors, and so torch's number of threads.
    facts = model.explain(*build.calls(row)[0])
    words = {name: facts[name] for name in ("executor", "weights", "weights packed") if name in facts}
    run = model if row.shape.kind == "encoder" else model.session()
    return run, {"rapt": package.__version__, **words}, int(facts["threads"])


def onnxruntime(row, threads):
    import onnxruntime as ort

    model, inputs = build.model(row), build.calls(row)[0]
    kept = []
    if row.shape.kind != "encoder":
        model.in_place, kept = False, build.cache(row)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with tempfile.TemporaryDirectory(prefix="rapt-bench-") as folder:
        path = str(pathlib.Path(folder) / "model.onnx")
        torch.onnx.export(model, (*inputs, *kept), path, dynamo=True, external_data=True, verbose=False)
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names, outputs = [port.name for port in session.get_inputs()], [port.name for port in session.get_outputs()]
    state = [ort.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in kept]

    def run(*inputs):
        given = [ort.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in inputs] + state
        found = session.run_with_ort_values(outputs, dict(zip(names, given)))
        state[:] = found[1:]
        return found[0].numpy()

    return run, {"onnxruntime": ort.__version__}, session.get_session_options().intra_op_num_threads
