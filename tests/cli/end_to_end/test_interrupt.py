"""Ctrl-C in the middle of a check: the status says so, and neither files nor processes are left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import children

# A job in the background inherits "ignore", under which nobody could interrupt it.
SCRIPT = (
    "import signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from glassengine.cli.main import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


# Each step of the untouched model takes long enough for somebody to lose patience.
SLOW_MODEL = """
import time
import torch

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        if not torch.compiler.is_exporting():
            time.sleep(0.3)
        return self.linear(x)

def inputs():
    return [{"x": torch.ones(2, 4)}] * 100
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["building the release engine", "judging: 1 of"])
def test_interrupted_check_of_a_language_model_leaves_nothing(checkpoint: Path, tmp_path: Path, stage: str) -> None:
    interrupt([str(checkpoint)], tmp_path, stage)


def test_interrupted_check_leaves_nothing(tmp_path: Path) -> None:
    file, temporary = tmp_path / "slow.py", tmp_path / "temporary"
    file.write_text(SLOW_MODEL)
    temporary.mkdir()
    interrupt([f"{file}:Slow", "--inputs", f"{file}:inputs"], temporary, "judging: 1 of")


def interrupt(arguments: list[str], tmp_path: Path, stage: str) -> None:
    """Start a check, interrupt it in that stage, and look for what it leaves behind."""
    command = [sys.executable, "-c", SCRIPT, "check", *arguments, "--backend", "eager"]
    process = children.Popen(
        command,
        imports=children.MODELS,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    assert process.stderr is not None
    try:
        assert any(line.startswith(stage) for line in process.stderr), "it never came so far"
        assert any(tmp_path.glob("glassengine-check-*")), "there is something to leave behind"
        # As a terminal does: to the whole group.
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        process.wait(timeout=60)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == 130
    assert "interrupted" in rest and "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
