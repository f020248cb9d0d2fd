"""The zoo in files, so that archives of one torch are run beside another.

    python -m zoo FOLDER [NAME...]           writes one archive a case and form, what torch says of each case, and the
                                             operators of each
    python -m zoo --check FOLDER [NAME...]   runs those archives with Rapt and compares with what torch said

Writing needs torch and transformers, checking needs torch and rapt.
"""

import sys
import time
from pathlib import Path

import torch

import zoo
from zoo import record


def told(error):
    return f"{type(error).__name__}: {str(error)[:600]}"


def write(folder, names):
    """Writes the programs; 1 where torch could not export one."""
    folder.mkdir(parents=True, exist_ok=True)
    every = zoo.cases()
    counts = {}
    failed = 0
    for name in names or every:
        case = every[name]
        begun = time.monotonic()
        said = list(record.calls(case))
        for form in zoo.FORMS:
            if form in case.without:
                continue
            try:
                program = zoo.export(case, form)
                torch.export.save(program, folder / f"{name}.{form}.pt2")
            except Exception as error:  # noqa: BLE001: the list of what failed is the answer
                failed += 1
                print(f"{name}.{form}: {told(error)}", flush=True)
                continue
            for call in () if case.has_state else said[1:]:
                call.refused[form] = record.refuses(program, call.given)
            for target, count in zoo.targets(program).items():
                row = counts.setdefault(target, dict.fromkeys(zoo.FORMS, 0))
                row[form] += count
        record.saved(said, folder / f"{name}.calls")
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    with open(folder / "ops.tsv", "w", encoding="utf-8") as table:
        table.write("\t".join(["op", *zoo.FORMS]) + "\n")
        for target, row in sorted(counts.items()):
            table.write("\t".join([target, *(str(row[form]) for form in zoo.FORMS)]) + "\n")
    (folder / "torch").write_text(torch.__version__)
    return 1 if failed else 0


def check(folder, names):
    """Runs the archives; 1 where one is refused or differs."""
    import pt2_compare
    import rapt

    passed = refused = failed = 0
    for path in sorted(folder.glob("*.pt2")):
        name, form = path.name.split(".")[:2]
        if names and name not in names:
            continue
        case = zoo.cases()[name]
        # Makes the class of its result known, which is then what the program returns.
        case.build()
        try:
            model = rapt.load(path)
            run = model.session() if case.has_state else model
            for call in record.read(folder / f"{name}.calls"):
                ours = record.copied(call.given)
                try:
                    got = run(*ours[0], **ours[1])
                except rapt.ShapeError:
                    if not call.refused.get(form):
                        raise
                    refused += 1
                    continue
                where = f"{name}.{form} at {call.sizes}"
                pt2_compare.compare(got, call.results, call.exact, where)
                pt2_compare.compare(ours, call.after, call.exact_after, f"{where}, inputs")
                passed += 1
        except (rapt.RaptError, AssertionError) as error:
            failed += 1
            print(f"{path.name}: {told(error)}", flush=True)
    wrote = (folder / "torch").read_text()
    print(f"archives of torch {wrote} beside torch {torch.__version__}: {passed} calls as torch has them", end="")
    print(f", {refused} refused by both, {failed} programs failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        sys.exit(check(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(write(Path(sys.argv[1]), sys.argv[2:]))
