"""A script ends within a process as it would with it, and leaves the process as it was."""

from __future__ import annotations

import atexit
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from glassengine.capture.run_script import script_ended
from glassengine.recording.reader import Recording
from tests import children


def test_f19_pools_and_threads_that_are_left_open() -> None:
    done: list[str] = []
    mine = ThreadPoolExecutor(1)
    assert mine.submit(int).result() == 0
    with script_ended():
        pool = ThreadPoolExecutor(2)
        assert pool.submit(abs, -1).result() == 1
        pool.submit(lambda: (time.sleep(0.1), done.append("late work")))
        threading.Thread(target=lambda: (time.sleep(0.2), done.append("thread"))).start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    assert sorted(done) == ["late work", "thread"]
    assert mine.submit(int).result() == 0  # what the process had before goes on
    with pytest.raises(RuntimeError):
        pool.submit(int)
    mine.shutdown()


def test_f19_a_pool_of_processes_that_is_left_open() -> None:
    with script_ended():
        pool = ProcessPoolExecutor(1)
        assert pool.submit(abs, -2).result() == 2
    with pytest.raises(RuntimeError):
        pool.submit(int)


def test_f19_what_is_registered_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[object] = []
    stop = threading.Event()

    def fail() -> None:
        raise ValueError("planted")

    with script_ended():
        thread = threading.Thread(target=stop.wait)
        thread.start()
        threading._register_atexit(stop.set)  # type: ignore[attr-defined]
        atexit.register(done.append, "first")
        assert atexit.register(fail) is fail
        atexit.register(lambda: done.append(thread.is_alive()))
        atexit.register(done.clear)
        atexit.unregister(done.clear)
        with pytest.raises(TypeError):
            atexit.register(3)  # type: ignore[arg-type]
    assert done == [False, "first"] and "planted" in capsys.readouterr().err


def test_finalizers_are_those_of_the_process(tmp_path: Path) -> None:
    # A process of its own, in which nothing has used a finalizer or a pool before the script does.
    code = """
import weakref, sys
from glassengine.capture.run_script import script_ended
class Owner: pass
weakref.finalize._registered_with_atexit = False
owner = Owner()
with script_ended():
    weakref.finalize(owner, print, "at the end")
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
print(ThreadPoolExecutor(1).submit(int).result())
print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "0\nstill here\nat the end\n"), done.stderr


SCRIPT = """
import atexit, threading, torch
from concurrent.futures import ThreadPoolExecutor

net = torch.nn.Linear(2, 2).requires_grad_(False)

def at_the_end():
    threading.main_thread().join()
    net(torch.ones(2))

pool = ThreadPoolExecutor(2)
print(tuple(pool.submit(net, torch.ones(2)).result().shape))
threading.Thread(target=at_the_end).start()
atexit.register(lambda: (net(torch.ones(2)), print("end")))
"""


@pytest.mark.parametrize("how", ["record", "auto"])
def test_f19_a_recorded_script_ends_as_with_python(tmp_path: Path, how: str) -> None:
    first = "import glassengine.auto\n" if how == "auto" else ""
    (tmp_path / "script.py").write_text(first + textwrap.dedent(SCRIPT))
    record = [] if how == "auto" else ["-m", "glassengine", "record", "-o", "glass-recording", "--"]
    command = [sys.executable, *record, "script.py"]
    done = children.run(command, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (0, "(2,)\nend\n"), done.stderr
    opened = Recording.open(tmp_path / "glass-recording" / "Linear")
    assert opened.complete and opened.steps == [0, 1, 2]
