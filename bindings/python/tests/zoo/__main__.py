"""Writes the zoo: `python -m zoo FOLDER [NAME...]`, one archive a case and form, and the operators of each."""

import sys
import time
from pathlib import Path

import torch

import zoo


def main(folder, names):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    every = zoo.cases()
    counts = {}
    failed = 0
    for name in names or every:
        case = every[name]
        for form in zoo.FORMS:
            if form in case.without:
                continue
            begun = time.monotonic()
            try:
                program = zoo.export(case, form)
                torch.export.save(program, folder / f"{name}.{form}.pt2")
            except Exception as error:  # noqa: BLE001: the list of what failed is the answer
                failed += 1
                print(f"{name}.{form}: {type(error).__name__}: {str(error)[:600]}", flush=True)
                continue
            for target, count in zoo.targets(program).items():
                row = counts.setdefault(target, dict.fromkeys(zoo.FORMS, 0))
                row[form] += count
            print(f"{name}.{form}: {time.monotonic() - begun:.1f} s", flush=True)
    with open(folder / "ops.tsv", "w", encoding="utf-8") as table:
        table.write("\t".join(["op", *zoo.FORMS]) + "\n")
        for target, row in sorted(counts.items()):
            table.write("\t".join([target, *(str(row[form]) for form in zoo.FORMS)]) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
