"""A forward that has ended is in the recording, however its process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from glassengine.recording import layout
from glassengine.recording.reader import Recording

# Every value says which site and step it belongs to. Each forward that has ended is told by a byte on stdout.
PRELUDE = """
import os, signal, sys, time
import torch
from torch import nn
import glassengine as glass
from glassengine.recording.worker import BackgroundWriter

torch.set_num_threads(1)

class Model(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.parts = nn.ModuleList(nn.Identity() for _ in sizes)
        self.weight = nn.Parameter(torch.zeros(3))
    def forward(self, step):
        for number, (part, size) in enumerate(zip(self.parts, self.sizes)):
            part(torch.full((size,), float(step * 100 + number)))
        return self.weight * 0 - float(step)

KINDS = eval(os.environ["KINDS"])
BackgroundWriter.__init__.__kwdefaults__["ring_bytes"] = int(os.environ["RING"])

def run(kind, path, out=1, end=lambda step: None):
    sizes, options = KINDS[kind]
    model = Model(sizes)
    step = 0
    with glass.record(model, path, **options):
        os.write(out, b"b")
        while True:
            result = model(step)
            if kind == "gradients":
                result.sum().backward()
                model.weight.grad = None
            os.write(out, b"x")
            end(step)
            step += 1
"""

# The ring is small: it is soon full, begins over and over, and a quarter of it, 1 MiB, is what large tensors exceed.
RING = 4 << 20
KINDS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "tiny": ([50 + number for number in range(12)], {}),
    "large": ([200_000, 20, 100_000, 1_500_000, 30_000], {}),
    "light": ([50, 60_000, 200_000], {"values": False}),
    "gradients": ([50, 60_000], {"gradients": True}),
    "kept": ([50, 60_000, 300_000], {"values": ["parts.1", "parts.2"]}),
}

# One process that has imported everything makes a child for each moment; imports would take most of the time.
KILLER = """
for number, (kind, moment, path) in enumerate(zip(*[iter(sys.argv[1:])] * 3)):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run(kind, path, tell)
        finally:
            os._exit(1)
    os.close(tell)
    count = len(os.read(told, 1))
    time.sleep(float(moment))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while data := os.read(told, 1 << 16):
        count += len(data)
    os.close(told)
    print(count - 1, flush=True)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2] / "src"
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "KINDS": repr(KINDS), "RING": str(RING)},
    )


def right_steps(path: Path, kind: str) -> int:
    """Return how many steps there are; each is whole and has the right values."""
    opened = Recording.open(path)
    assert opened.steps == list(range(len(opened.steps)))
    for step in opened.steps:
        entries = {entry.site: entry for entry in opened.entries if entry.step == step}
        left = {item.site: item for item in opened.left_out if item.step == step}
        assert not entries.keys() & left.keys()
        for number in range(len(KINDS[kind][0])):
            for site in (f"parts.{number}", f"parts.{number}:in[0]"):
                value = step * 100 + number
                if site in entries:
                    tensor = opened.tensor(entries[site])
                    assert torch.equal(tensor, torch.full_like(tensor, value)), (step, site)
                else:
                    statistics = left[site].statistics
                    assert statistics is not None and (statistics.min, statistics.max) == (value, value), (step, site)
        assert "." in entries or "." in left
    return len(opened.steps)


def kill(tmp_path: Path, kinds: list[tuple[str, float]]) -> list[tuple[str, int, int]]:
    """Return for each moment the kind, how many forwards had ended for certain, and how many there are."""
    arguments = [item for number, (kind, moment) in enumerate(kinds) for item in (kind, moment, tmp_path / str(number))]
    said, errors = start(KILLER, *arguments).communicate(timeout=1200)
    counts = list(map(int, said.split()))
    assert len(counts) == len(kinds), errors
    return [
        (kind, count, right_steps(tmp_path / str(n), kind))
        for n, ((kind, _), count) in enumerate(zip(kinds, counts, strict=True))
    ]


def test_s8_no_finished_forward_is_lost(tmp_path: Path) -> None:
    kinds = [(kind, moment) for kind in KINDS for moment in (0.02, 0.15)]
    for number, (kind, ended, found) in enumerate(kill(tmp_path, kinds)):
        assert ended <= found <= ended + 1, kind
        assert not Recording.open(tmp_path / str(number)).complete
        # Recovered once, and there from then on.
        assert not (tmp_path / str(number) / layout.RING).exists()
        assert right_steps(tmp_path / str(number), kind) == found


ENDINGS = {
    "os._exit": ("os._exit(3)", 3),
    "an error": ("raise ValueError('planted')", 1),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


def test_s8_however_the_process_ends(tmp_path: Path) -> None:
    code = f"""
    for ending, (code, _) in {ENDINGS!r}.items():
        for kind in KINDS:
            if not os.fork():
                def end(step):
                    if step == 3:
                        exec(code)
                try:
                    run(kind, f"{{sys.argv[1]}}/{{ending}}/{{kind}}", os.open(os.devnull, os.O_WRONLY), end)
                finally:
                    os._exit(1)
            print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    said, errors = start(code, tmp_path).communicate(timeout=100)
    expected = [status for _, status in ENDINGS.values() for _ in KINDS]
    assert list(map(int, said.split())) == expected, errors
    for ending in ENDINGS:
        for kind in KINDS:
            assert right_steps(tmp_path / ending / kind, kind) == 4, (ending, kind)
            opened = Recording.open(tmp_path / ending / kind)
            if ending in ("os._exit", "SIGKILL"):
                assert opened.incomplete_because
            else:
                assert opened.incomplete_because in ("stopped by ValueError: planted", "stopped by SIGTERM")
            if kind == "gradients":
                assert {entry.step for entry in opened.select("weight:grad")} == {0, 1, 2, 3}
                assert opened.stopped.get(3) == {"SIGTERM": "SIGTERM", "an error": None}.get(
                    ending, "the end of its process"
                )


def test_s15_a_forked_child_that_leaves_leaves_the_recording_alone(tmp_path: Path) -> None:
    code = """
    sizes, _ = KINDS["tiny"]
    model = Model(sizes)
    with glass.record(model, sys.argv[1]):
        for step in range(2):
            model(step)
        pid = os.fork()
        if pid == 0:
            for step in range(500):
                model(7)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        model(2)
    """
    said, errors = start(code, tmp_path / "r").communicate(timeout=100)
    assert (said, errors) == ("0\n", "")
    assert Recording.open(tmp_path / "r").complete and right_steps(tmp_path / "r", "tiny") == 3
