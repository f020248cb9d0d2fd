"""Writes promotion.tsv beside it: torch.result_type of every pair of dtypes in every pair of ranks."""

import itertools
import pathlib

import torch

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
          torch.float16, torch.bfloat16, torch.float32, torch.float64]  # fmt: skip
NUMBERS = {"bool": True, "int64": 1, "float64": 1.0}


def operands():
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        yield "dims", name, torch.ones(2, dtype=dtype)
        yield "zero_dims", name, torch.ones((), dtype=dtype)
    for name, number in NUMBERS.items():
        yield "number", name, number


lines = [f"# torch {torch.__version__.split('+')[0]}: rank and dtype of two operands, and torch.result_type of them"]
for (rank_a, a, x), (rank_b, b, y) in itertools.product(operands(), repeat=2):
    result = str(torch.result_type(x, y)).removeprefix("torch.")
    lines.append("\t".join([rank_a, a, rank_b, b, result]))
(pathlib.Path(__file__).parent / "promotion.tsv").write_text("\n".join(lines) + "\n")
