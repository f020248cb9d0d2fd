"""The table behind the line `beside PyTorch` of `rapt doctor`: on which processors Rapt was timed beside stock PyTorch, and its slowest request.

    python benches/beside_torch.py             writes bindings/python/python/rapt/_beside_torch.json
    python benches/beside_torch.py --check     exits with 1 if that file is not what the records give

A record of benches/record counts that has attention on the CPU beside stock PyTorch, of other groups than codes and caches. The speed of a request is PyTorch's time
divided by that of the same call while Rapt is registered, or of `rapt.attention` where the record has no such column. Rows that copy
their inputs first are left out, since Rapt does not, first calls of a process, which are no speed, and forward with backward. Needs nothing beyond Python.
"""

import gzip
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benches/record"
OUT = ROOT / "bindings/python/python/rapt/_beside_torch.json"


def speeds(record):
    """(ratio, row, dtype) of every request that stock PyTorch answered too."""
    for row in record["rows"]:
        us = row.get("us", {}) if row.get("kind") not in ("first", "train") else {}
        ours = us.get("rapt-sdpa") or us.get("rapt")
        if us.get("stock") and ours and not row["row"].endswith("_copy") and not {"codes", "cache"} & set(row["groups"]):
            yield us["stock"] / ours, row["row"], row["dtype"]


def entries():
    for path in sorted(RECORDS.glob("*.json.gz")):
        record = json.loads(gzip.decompress(path.read_bytes()))
        family = re.search(r"\(family (\d+) model (\d+)\)", record["machine"].get("cpu", ""))
        found = sorted(speeds(record)) if family and isinstance(record.get("rows"), list) else []
        if not found:
            continue
        ratio, row, dtype = found[0]
        yield {
            "family": int(family[1]),
            "model": int(family[2]),
            "isa": record["peers"]["rapt"]["isa"],
            "threads": record["machine"]["threads"],
            "date": record["machine"]["date"][:10],
            "torch": record["peers"]["stock"]["torch"],
            "requests": len(found),
            "slowest": {"speed": round(ratio, 2), "row": row, "dtype": dtype},
        }


def main(arguments):
    text = json.dumps(list(entries()), indent=1) + "\n"
    if arguments == ["--check"]:
        if OUT.read_text(encoding="utf-8") != text:
            print(f"{OUT.relative_to(ROOT)} is not current: run `python benches/beside_torch.py`", file=sys.stderr)
            return 1
        return 0
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
