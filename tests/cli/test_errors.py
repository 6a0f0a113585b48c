"""Ctrl-C ends a command, whoever else heard it first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from glassengine.cli.errors import exit_status, heard

SWALLOWS = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"


@pytest.fixture(autouse=True)
def _default_handlers() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def wait(seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def test_an_import_that_swallows_ctrl_c_does_not_keep_the_command_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swallows_it.py").write_text(SWALLOWS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def command() -> int:
        __import__("swallows_it")
        wait()
        return 0

    began = time.monotonic()
    assert exit_status(command) == 130
    assert time.monotonic() - began < 60
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_handlers_elsewhere_catch_the_signal() -> None:
    def command() -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            wait()
        except KeyboardInterrupt:
            wait(0.6)
        return 7

    assert exit_status(command) == 7


def test_a_second_signal_during_cleanup_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sends_it.py").write_text(SWALLOWS.replace("BaseException", "ValueError"))
    monkeypatch.syspath_prepend(str(tmp_path))
    done = []

    def command() -> int:
        try:
            __import__("sends_it")
        finally:
            wait(0.6)
            done.append(True)
        return 0

    assert exit_status(command) == 130
    assert done == [True]


def test_handlers_of_others_are_let_be() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heard():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
