"""fresh.py: what a program finds in a forked process is what it finds behind `python -c "import torch"`."""

import os
import signal
import subprocess

import fresh
import pytest

pytest.importorskip("torch")


def test_nothing_of_rapt_or_of_another_program_is_there():
    first = fresh.run("import rapt.torch, os, sys; rapt.torch.register_backend(); os.environ['LEFT'] = sys.path[0] = 'left'; left = 1")
    assert (first.returncode, first.stdout, first.stderr) == (0, "", "")
    second = fresh.run(
        "import os, sys, __main__\n"
        "print([name for name in sys.modules if name.startswith('rapt')], 'LEFT' in os.environ, [sys.path[0]])\n"
        "print(sorted(name for name in vars(__main__) if not name.startswith('__')))"
    )
    assert second.stdout == "[] False ['']\n['os', 'sys']\n", second


def test_words_streams_folder_and_variables_are_the_programs_own(tmp_path):
    done = fresh.run(
        "import os, sys; print(sys.argv, sys.stdin.read(), os.getcwd(), dict(os.environ), __name__, file=sys.stderr)",
        "a", input="text", cwd=tmp_path, env={"ONE": "1"},
    )  # fmt: skip
    assert done.stderr == f"['-c', 'a'] text {tmp_path} {{'ONE': '1'}} __main__\n" and not done.stdout


def test_a_program_ends_as_the_interpreter_ends_it():
    ended = fresh.run(
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "raise SystemExit(7)"
    )
    assert (ended.returncode, ended.stdout) == (7, "thread\nat exit\n")
    raised = fresh.run("1 / 0")
    assert raised.returncode == 1 and raised.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_crash_is_a_negative_status_and_a_late_program_is_killed():
    assert fresh.run("import os; os.abort()").returncode == -signal.SIGABRT
    with pytest.raises(subprocess.TimeoutExpired):
        fresh.run("import time; time.sleep(100)", timeout=0.2)
    assert fresh.run("print(1)").stdout == "1\n"
