"""Calls of the system fail while something is written: the program ends as documented, what is left is whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler, and Linux")


def walked(*arguments: str, timeout: float = 600) -> str:
    command = [sys.executable, str(HERE / "walk.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@needs_compiler
def test_a_few_calls_that_fail(tmp_path: Path) -> None:
    kinds = ("ENOSPC, lasting", "short")
    told = [word for kind in kinds for word in ("--kind", kind)]
    table = walked("--most", "3", "--table", str(tmp_path / "table"), *told, "record", "json")
    assert "0 problems of 0 kinds" in table and table.count("    after  ") == 4, table
    assert table in (tmp_path / "table").read_text()


@needs_compiler
@pytest.mark.slow
def test_every_call_that_fails() -> None:
    assert "0 problems of 0 kinds" in walked("--most", "60", timeout=4 * 3600)
