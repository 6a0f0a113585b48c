"""Copies of a process that has imported torch behave as processes that begin afresh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import children

TELL = """
import os, sys
print(__name__, __spec__ and __spec__.name, sys.argv, sys.path[0], os.getcwd(), os.getppid())
print(os.environ.get("GIVEN"), sys.stdin.read(), sys.stdout.encoding)
print(sorted(vars(sys.modules["__main__"])), type(__loader__).__name__, __builtins__)
print("error", file=sys.stderr)
"""


def both(*words: str, **options: Any) -> list[tuple[int, str, str]]:
    """Return how a copy and a process of its own end and what they print."""
    options = {"input": "given", "capture_output": True, "text": True, "env": os.environ | {"GIVEN": "1"}} | options
    given = options.pop("input")
    found = []
    for start in (children.Popen, subprocess.Popen):
        options.pop("capture_output", None)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = start([sys.executable, *words], **pipes, **options)
        out, error = process.communicate(given)
        found.append((process.returncode, out, error))
    return found


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_it_is_told_what_a_new_process_is_told(how: str, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    words = {"-c": ("-c", TELL, "a", "--b"), "-m": ("-m", "tell", "a"), "script": ("tell.py", "a", "-c")}[how]
    copy, new = both(*words, cwd=tmp_path)
    assert copy[0] == 0 and str(os.getpid()) in copy[1]
    assert copy == new


def test_descriptors_are_passed_on() -> None:
    read, write = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), b'through'); print(sys.argv[2] in os.listdir('/proc/self/fd'))"
    words = [sys.executable, "-c", code, str(write), str(read)]
    done = children.run(words, pass_fds=(write,))
    assert done.stdout == "False\n" and os.read(read, 20) == b"through"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('why')", 1),
        ("import os; os._exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import atexit, sys; atexit.register(print, 'at the end'); raise ValueError('planted')", 1),
        ("def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as error:\n    raise KeyError(2) from error", 1),
        ("import warnings; warnings.warn('planted')", 0),
    ],
)
def test_it_ends_as_a_new_process_ends(code: str, status: int) -> None:
    copy, new = both("-c", code)
    assert copy == new and copy[0] == status


def test_signals_reach_it_and_it_is_waited_for() -> None:
    code = "import time; print('begun', flush=True); time.sleep(600)"
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = children.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        assert process.poll() is None
        process.send_signal(sent)
        assert process.wait(60) == -sent
        process.stdout.close()


def test_torch_is_there_and_nothing_of_this_package() -> None:
    code = "import sys; print('torch' in sys.modules, [name for name in sys.modules if 'glass' in name])"
    assert children.run([sys.executable, "-c", code], check=True).stdout == "True []\n"


@pytest.mark.parametrize(("words", "variables"), [(["-I"], {}), ([], {"PYTHONHASHSEED": "1"})])
def test_what_cannot_be_copied_begins_afresh(words: list[str], variables: dict[str, str]) -> None:
    code = "import sys; print('torch' in sys.modules)"
    command = [sys.executable, *words, "-c", code]
    done = children.run(command, env=os.environ | variables)
    assert (done.returncode, done.stdout) == (0, "False\n")
