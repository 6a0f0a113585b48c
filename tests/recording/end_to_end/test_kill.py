"""However a recording process ends, every step it completed can be read, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from glassengine.recording.reader import Recording
from tests import children

# A model whose tensors say which step and which site they belong to: small ones, some that are shared, a large one.
MODEL = """
import os, signal, sys, time
import torch
from torch import nn
import glassengine as glass
from glassengine.errors import GlassError

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(12))
        self.large = nn.Identity()
    def forward(self, step):
        for number, part in enumerate(self.parts):
            part(torch.full((50 + number,), step * 100 + number))
        self.large(torch.full((60_000,), step))
        return torch.full((3,), -step)

model = Model()
# What starts the tests may ignore interruptions, and whatever it starts with it.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

# One process that has imported everything makes a child for each moment; imports would take most of the time.
KILLER = """
path, moments = sys.argv[1], [float(text) for text in sys.argv[2:]]
for number, moment in enumerate(moments):
    started, begin = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with glass.record(model, f"{path}/{number}"):
                os.write(begin, b"x")
                step = 0
                while True:
                    model(step)
                    step += 1
        finally:
            os._exit(1)
    os.close(begin)
    os.read(started, 1)
    os.close(started)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3] / "src"
    return children.Popen(
        [sys.executable, "-c", MODEL + textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def intact_steps(path: Path) -> int:
    """Return how many steps are completed, all of whose tensors are there and right."""
    opened = Recording.open(path)
    assert opened.steps == list(range(len(opened.steps)))
    whole = [step for step in opened.steps if step not in opened.stopped]
    for step in whole:
        entries = [entry for entry in opened.entries if entry.step == step]
        assert len(entries) == 2 * 13 + 1
        for entry in entries:
            part = entry.site.removeprefix("parts.").partition(":")[0]
            value = -step if entry.site == "." else step if part == "large" else step * 100 + int(part)
            tensor = opened.tensor(entry)
            assert torch.equal(tensor, torch.full_like(tensor, value)), (step, entry.site)
    return len(whole)


def kill_at(path: Path, moments: list[float]) -> list[int]:
    path.mkdir()
    done = start(KILLER, path, *moments)
    _, said = done.communicate(timeout=600)
    assert done.returncode == 0, said
    found = []
    for number in range(len(moments)):
        opened = Recording.open(path / str(number))
        assert not opened.complete and opened.incomplete_because
        found.append(intact_steps(path / str(number)))
    return found


def test_killed_at_some_moments(tmp_path: Path) -> None:
    found = kill_at(tmp_path / "r", [0.4 * (number + 0.5) / 4 for number in range(4)])
    assert sum(steps > 0 for steps in found) >= 2


@pytest.mark.slow
def test_killed_at_a_hundred_moments(tmp_path: Path) -> None:
    found = kill_at(tmp_path / "r", [1.0 * (number + 0.5) / 100 for number in range(100)])
    assert sum(steps > 0 for steps in found) >= 90


def test_interrupted_from_the_keyboard(tmp_path: Path) -> None:
    child = start(
        """
        step = 0
        with glass.record(model, sys.argv[1]):
            print("begun", flush=True)
            while True:
                model(step)
                step += 1
        """,
        tmp_path / "r",
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=600)
    assert child.returncode != 0 and "KeyboardInterrupt" in said
    opened = Recording.open(tmp_path / "r")
    assert opened.incomplete_because == "stopped by KeyboardInterrupt"
    assert intact_steps(tmp_path / "r") > 0
    assert not list((tmp_path / "r").glob("*.part"))


def test_full_disk(tmp_path: Path) -> None:
    child = start(
        """
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 24, 2 ** 24))
        try:
            with glass.record(model, sys.argv[1]):
                for step in range(100):
                    model(step)
                print("the model went on", flush=True)
        except GlassError as error:
            print(error)
        """,
        tmp_path / "r",
    )
    said, _ = child.communicate(timeout=600)
    assert "the model went on" in said and "cannot be written" in said and "File too large" in said
    steps = intact_steps(tmp_path / "r")
    assert 0 < steps < 100
    assert f"{steps} completed steps are safe" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_becomes_read_only(tmp_path: Path) -> None:
    child = start(
        """
        try:
            with glass.record(model, sys.argv[1]) as recorder:
                model(0)
                recorder.wait()
                os.chmod(sys.argv[1], 0o500)
        except GlassError as error:
            print(error)
        """,
        tmp_path / "r",
    )
    said, _ = child.communicate(timeout=600)
    (tmp_path / "r").chmod(0o700)
    assert "Permission denied" in said
    assert intact_steps(tmp_path / "r") == 1 and not Recording.open(tmp_path / "r").complete


def test_a_directory_that_goes_away(tmp_path: Path) -> None:
    child = start(
        """
        try:
            with glass.record(model, sys.argv[1]) as recorder:
                model(0)
                recorder.wait()
                os.rename(sys.argv[1], sys.argv[1] + "-moved")
                model(1)
        except GlassError as error:
            print(error)
        """,
        tmp_path / "r",
    )
    said, _ = child.communicate(timeout=600)
    assert "No such file" in said and "2 completed steps are safe" in said
    assert intact_steps(tmp_path / "r-moved") == 2 and not Recording.open(tmp_path / "r-moved").complete
