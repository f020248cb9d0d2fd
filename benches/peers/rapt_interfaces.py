"""Rapt by its two interfaces: `rapt.attention` on torch tensors, and torch's own SDPA after `rapt.torch.register_backend()`."""

import torch

import inputs

import rapt
import rapt.torch
from peers import Prepared
from peers import torch_training
from peers.torch_sdpa import Tensors, calls, grad_context, read, tensor, tight

from rapt.bench import check


class Codes:
    """A row's inputs with K and V as codes, which `rapt.quantize` makes of the row's numbers."""

    def __init__(self, row, copies):
        made = inputs.make(row)
        self.q = tensor(made.q, row.dtype)
        self.mask = None if made.mask is None else tensor(made.mask, row.dtype)
        numbers = (torch.from_numpy(inputs.to_float(x, row.dtype)) for x in (made.k, made.v))
        kv = [check.quantized(x, *format)[0] for x, format in zip(numbers, row.formats)]
        self.kv = [tuple(check.each_tensor(codes, torch.clone) for codes in kv) for _ in range(copies)]


class Engine:
    def __init__(self, threads, arguments):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        (self.interface,) = arguments
        if self.interface == "sdpa":
            rapt.torch.register_backend()

    def versions(self):
        # `where` and `isa` go into the record: which build was measured, and what it chose to run.
        return {"rapt": rapt.__version__, "torch": torch.__version__, "isa": rapt.doctor()["isa"]}

    @staticmethod
    def served(before=None):
        """What was served so far; an error where nothing was since `before`, or something fell back: a figure counts only if Rapt did
        the work."""
        now = rapt.torch.stats()
        if before is not None and (now["served"] <= before["served"] or now["fallback"] != before["fallback"]):
            raise RuntimeError(f"not served by rapt: {now['fallback']}")
        return now

    def prepare(self, row, copies):
        if row.kind == "train":
            return torch_training.prepare(row, self.served)
        tensors = Tensors(row, copies) if row.formats is None else Codes(row, copies)
        if self.interface == "sdpa":
            function, options = torch.nn.functional.scaled_dot_product_attention, tensors.sdpa_options(row)
        else:
            function, options = rapt.attention, self.options(row, tensors)
        made = calls(row, tensors, function, options)

        def output():
            if self.interface == "attention":
                return read(made[0]())
            before = self.served()
            result = read(made[0]())
            self.served(before)
            return result

        # Nor of Rapt, whose threads start when it is first asked.
        note = "" if row.kind == "first" else self.explained(row, tensors)
        return Prepared(
            made, output, note=note, context=grad_context(row), tight=tight(row, tensors, function, options)
        )

    @staticmethod
    def options(row, tensors):
        """What `rapt.attention` and `rapt.explain` are given after q, k, v."""
        options = {} if row.causal == "none" else {"causal": row.causal}
        options |= {"window": (row.window - 1, 0)} if row.window else {}
        options |= {} if row.compute == "exact" else {"compute": row.compute}
        return options if tensors.mask is None else {**options, "mask": tensors.mask}

    def explained(self, row, tensors):
        """The plan's first line: which kernel."""
        k, v = tensors.kv[0]
        plan = rapt.explain(tensors.q, k, v, **self.options(row, tensors))
        return " ".join(str(plan).splitlines()[0].split()[1:])
