"""A process that records into an S3 server and is killed: every step that it completed can be read there."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.cli import main as cli
from tests import children

# Small shards, so that there are many; the store is slow, so that some wait.
SCRIPT = """
import os, sys, time
import torch
from torch import nn
import glassengine as glass
from glassengine.recording.write import destination

destination.SHARD_BYTES = 400_000

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(3))
    def forward(self, step):
        for number, part in enumerate(self.parts):
            part(torch.full((40_000 + number,), 10.0 * step + number))
        return torch.full((3,), -step)

net, counter = Net(), sys.argv[2]
with glass.record(net, sys.argv[1]):
    for step in range(int(sys.argv[3])):
        net(step)
        with open(counter, "w") as file:
            file.write(str(step))
        time.sleep(0.05)
"""


def start(code: str, *arguments: object, **variables: str) -> children.Popen:
    root = Path(__file__).parents[3] / "src"
    words = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return children.Popen(words, env={**os.environ, **variables, "PYTHONPATH": str(root)})


def require(url: str, at_least: int) -> glass.Recording:
    found = glass.Recording.open(url)
    assert len(found.steps) >= at_least and found.steps == list(range(len(found.steps)))
    for step in found.steps:
        for number in range(3):
            wanted = torch.full((40_000 + number,), 10.0 * step + number)
            assert torch.equal(found.tensor(f"parts.{number}", step), wanted)
    return found


def test_a_killed_recording(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, counter = f"{bucket}/run", tmp_path / "counter"
    spool = str(tmp_path / "spool")
    monkeypatch.setenv("GLASS_SPOOL_DIR", spool)
    process = start(SCRIPT, url, counter, 10_000, GLASS_SPOOL_DIR=spool)
    deadline = time.monotonic() + 60
    while not counter.exists() or int(counter.read_text() or 0) < 12:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert cli.main(["upload", url]) == 2, "it is being written"
    assert "being written" in capsys.readouterr().err
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = int(counter.read_text() or 0)
    # Without this machine: what was sealed and uploaded.
    assert not require(url, 0).complete
    # With it: all that was completed.
    assert cli.main(["upload", url]) == 0
    assert "incomplete" in capsys.readouterr().out
    assert not require(url, last + 1).complete
    assert not any(Path(spool).iterdir())


def test_a_recording_that_ends(bucket: str, tmp_path: Path) -> None:
    process = start(SCRIPT, f"{bucket}/run", tmp_path / "counter", 8, GLASS_SPOOL_DIR=str(tmp_path / "spool"))
    assert process.wait() == 0
    assert require(f"{bucket}/run", 8).complete
    assert not any((tmp_path / "spool").iterdir())
