"""Workers that are processes: results in order; a worker that dies once, or always, or that is not awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from glassengine.workers import Died
from glassengine.workers.processes import Processes

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

def answer(request):
    print("this is no result")
    word, _, rest = request.decode().partition(" ")
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "once":
        if not Path(rest).exists():
            Path(rest).touch()
            os._exit(7)
    if word == "sleep":
        Path(rest).touch()
        time.sleep(60)
    return request.upper()
"""


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    (tmp_path / "answering.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def answer(request: bytes) -> bytes:
        return request

    answer.__module__ = "answering"
    found = Processes(answer, 2)
    yield found
    found.close()


def test_results_come_in_the_order_of_the_requests(processes: Processes, tmp_path: Path) -> None:
    requests = [b"a", b"once " + str(tmp_path / "mark").encode(), b"die", *(b"x%d" % i for i in range(30))]
    found = list(processes.run(requests))
    assert found == [*(request.upper() for request in requests[:2]), Died("killed by SIGKILL"), *(
        request.upper() for request in requests[3:]
    )]  # fmt: skip


def test_abandoned_workers_end(processes: Processes, tmp_path: Path) -> None:
    began = time.monotonic()
    mark = tmp_path / "begun"
    with closing(
        processes.run([b"first", b"sleep " + str(mark).encode(), b"sleep " + str(tmp_path / "other").encode()])
    ) as results:
        assert next(results) == b"FIRST"
        while not mark.exists():
            time.sleep(0.01)
    assert list(processes.run([b"later"])) == [b"LATER"]
    assert time.monotonic() - began < 30
