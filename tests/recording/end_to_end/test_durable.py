"""A forward that has ended is in the recording, however its process ends."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.errors import GlassError
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.layout import layout
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.reader import Recording
from glassengine.recording.ring import file as ring_file
from glassengine.recording.write import shard as shards
from tests import children

# Every value says which site and step it belongs to. Each forward that has ended is told by a byte on stdout.
PRELUDE = """
import os, signal, sys, time
import torch
from torch import nn
import glassengine as glass
from glassengine.recording.background import BackgroundWriter

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

# One process that has imported everything makes a child for each moment; imports would take most of the time. Of two
# ranks each is killed at a moment of its own.
KILLER = """
def begin(kind, path, rank):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if rank is not None:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
            run(kind, path, tell)
        finally:
            os._exit(1)
    os.close(tell)
    return child, told

for kind, moment, path in zip(*[iter(sys.argv[1:])] * 3):
    ranks, kind = ((0, 1), "tiny") if kind == "ranks" else ((None,), kind)
    children = [begin(kind, path, rank) for rank in ranks]
    counts = [len(os.read(told, 1)) for _, told in children]
    for number, (child, told) in enumerate(children):
        time.sleep(float(moment) / len(children))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while data := os.read(told, 1 << 16):
            counts[number] += len(data)
        os.close(told)
        print(counts[number] - 1, flush=True)
"""


def start(code: str, *arguments: object, ring: int = RING) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3] / "src"
    return children.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "KINDS": repr(KINDS), "RING": str(ring)},
    )


def right_steps(path: Path, kind: str) -> int:
    """Return how many steps there are; each is whole and has the right values."""
    opened = Recording.open(path)
    assert opened.steps == list(range(len(opened.steps)))
    left_out: dict[int, dict[str, LeftOut]] = {}
    for item in opened.left_out:
        left_out.setdefault(item.step, {})[item.site] = item
    for step in opened.steps:
        entries = {entry.site: entry for entry in opened.entries.of_step(step)}
        left = left_out.get(step, {})
        assert not entries.keys() & left.keys()
        for number in range(len(KINDS["tiny" if kind == "ranks" else kind][0])):
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


def kill(tmp_path: Path, moments: list[tuple[str, float]], ring: int = RING) -> list[tuple[str, int, int]]:
    """Return for each recording the kind, how many forwards had ended for certain, and how many there are."""
    paths = [tmp_path / str(number) for number in range(len(moments))]
    arguments = [item for (kind, moment), path in zip(moments, paths, strict=True) for item in (kind, moment, path)]
    said, errors = start(KILLER, *arguments, ring=ring).communicate(timeout=2000)
    counts = list(map(int, said.split()))
    places: list[tuple[str, Path]] = []
    for (kind, _), path in zip(moments, paths, strict=True):
        places += [(kind, path / "rank0"), (kind, path / "rank1")] if kind == "ranks" else [(kind, path)]
    assert len(counts) == len(places), errors
    found = []
    for (kind, path), count in zip(places, counts, strict=True):
        assert not Recording.open(path).complete
        # Recovered once, and there from then on.
        assert not (path / layout.RING).exists()
        found.append((kind, count, right_steps(path, kind)))
        shutil.rmtree(path)
    return found


def test_s8_no_finished_forward_is_lost(tmp_path: Path) -> None:
    moments = [(kind, moment) for kind in KINDS for moment in (0.02, 0.15)]
    for kind, ended, found in kill(tmp_path, [*moments, ("ranks", 0.1)]):
        assert ended <= found <= ended + 1, kind


@pytest.mark.slow
def test_s8_five_hundred_kills(tmp_path: Path) -> None:
    chance = random.Random(0)
    table: dict[str, list[int]] = {}
    for batch in range(10):
        moments = [(kind, chance.uniform(0, 0.6)) for kind in KINDS for _ in range(9)]
        moments += [("ranks", chance.uniform(0, 0.6)) for _ in range(3)]
        chance.shuffle(moments)
        for kind, ended, found in kill(tmp_path, moments, ring=RING if batch % 2 else 256 << 20):
            row = table.setdefault(kind, [0, 0, 0, 0])
            for place, count in enumerate((1, ended, found, max(0, ended - found))):
                row[place] += count
            assert found <= ended + 1
    sys.stdout.write(f"kills, ended, found, lost: {table}\n")
    assert sum(row[0] for row in table.values()) >= 500
    assert not any(row[3] for row in table.values())


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


def test_what_is_not_durable_is_lost_by_a_kill_only(tmp_path: Path) -> None:
    code = """
    for ending, code in {"SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)", "an error": "raise ValueError",
                         "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)"}.items():
        for durable in (True, False):
            path = f"{sys.argv[1]}/{ending}/{durable}"
            if not os.fork():
                def end(step):
                    if step == 30:
                        print(os.path.exists(path + "/ring.part"), flush=True)
                        exec(code)
                KINDS["tiny"][1]["durable"] = durable
                try:
                    run("tiny", path, os.open(os.devnull, os.O_WRONLY), end)
                finally:
                    os._exit(1)
            os.wait()
    """
    said, errors = start(code, tmp_path).communicate(timeout=100)
    assert said.split() == ["True", "False"] * 3, errors
    for ending in ("SIGTERM", "an error"):
        for durable in (True, False):
            assert right_steps(tmp_path / ending / str(durable), "tiny") == 31
    assert right_steps(tmp_path / "SIGKILL" / "True", "tiny") == 31
    # How many is chance; what there is, is right.
    assert right_steps(tmp_path / "SIGKILL" / "False", "tiny") <= 31


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


@pytest.mark.parametrize("what", ["removed", "cut"])
@pytest.mark.parametrize("which", ["shard", "sealed shard", "index"])
def test_s15_files_that_go_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, what: str
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 if which == "sealed shard" else 1 << 30)
    recorder = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)

    def record(step: int) -> None:
        recorder.write("x", step, torch.full((20_000,), float(step)))
        recorder.commit(step)
        recorder.wait()

    for step in range(3):
        record(step)
    name = {"shard": "shard-00000.part", "sealed shard": "shard-00001.safetensors", "index": "index.log"}[which]
    file = tmp_path / "r" / name
    file.unlink() if what == "removed" else os.truncate(file, 9)
    for step in range(3, 6):
        record(step)
    with pytest.raises(GlassError) as raised:
        recorder.close()
    safe = 1 if which == "sealed shard" else 0
    assert (raised.value.hint or "").startswith(
        f"{safe} completed steps are safe" if safe else "no completed step is safe"
    )
    if what == "cut" or which != "index":
        opened = Recording.open(tmp_path / "r")
        # The step that could not be written is in the ring still.
        num_left = int(which != "sealed shard")
        assert (f"in ring.part: {num_left} more" in str(raised.value)) == (num_left > 0)
        assert not opened.complete and opened.steps == [0][:safe] + [3][:num_left]
        assert not num_left or torch.equal(opened.tensor("x", 3), torch.full((20_000,), 3.0))


def test_s10_without_memory_for_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GlassError, match="no memory to record into"):
        BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=1 << 60)


def test_a_ring_without_a_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ring_file, "_take_room", full)
    recorder = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    assert "a killed process loses the last steps" in caplog.text and "4 MiB" in caplog.text
    recorder.write("x", 0, torch.ones(3))
    recorder.commit(0, token_ids=[[1, 2]])
    recorder.close()
    assert Recording.open(tmp_path / "r").complete


def left_by_a_kill(path: Path) -> list[int]:
    """Leave a recording as a killed process does; return the steps that had ended."""
    code = """
    from glassengine.recording.write import consumer
    consumer.Consumer.work = lambda self: time.sleep(1e9)  # nothing gets to disk
    recorder = BackgroundWriter(sys.argv[1], metadata={})
    for step in range(3):
        recorder.write("x", step, torch.arange(5000.0) + step)
        recorder.write("large", step, torch.arange(30_000.0) + step)
        recorder.write("same", step, torch.arange(3.0))
        recorder.measure("light", step, torch.arange(7.0), rank=0, reason="because")
        recorder.commit(step, token_ids=[[step, 7], [step]])
    recorder.write("x", 3, torch.zeros(5))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    start(code, path).communicate(timeout=60)
    return [0, 1, 2]


def test_s8_what_is_recovered_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = left_by_a_kill(tmp_path / "r")
    names = {file.name for file in (tmp_path / "r").iterdir()}
    assert layout.RING in names

    def copy() -> Path:
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tmp_path / "r", target)
        return target

    def right(path: Path) -> bool:
        opened = Recording.open(path)
        assert opened.steps == steps and not opened.complete
        assert opened.metadata["token_ids"] == [[0, 7, 1, 7, 2, 7], [0, 1, 2]]
        assert [item.site for item in opened.left_out] == ["light"] * 3
        return all(
            torch.equal(opened.tensor("x", step), torch.arange(5000.0) + step)
            and torch.equal(opened.tensor("large", step), torch.arange(30_000.0) + step)
            for step in steps
        )

    mkdir = Path.mkdir

    def refuse(place: Path, *options: Any, **more: Any) -> None:
        if place.name == f"{layout.RECOVERED}.part":
            raise PermissionError(errno.EACCES, "planted")
        mkdir(place, *options, **more)

    # Nobody may write there: the directory stays what it is, however often it is read.
    path = copy()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        assert right(path) and right(path)
    assert {file.name for file in path.iterdir()} == names
    # It is recovered once; one that was killed while it recovered leaves nothing in the way.
    (path / f"{layout.RECOVERED}.part").mkdir()
    assert right(path) and right(path)
    assert {file.name for file in path.iterdir()} == names - {layout.RING} | {layout.RECOVERED}
    # It can be replaced.
    BackgroundWriter(path, metadata={}, overwrite=True, ring_bytes=RING).close()
    assert not (path / layout.RECOVERED).exists()
    # A process that lives on, another machine, and a ring that its writer gave up.
    for owner in ("alive", "elsewhere", "stopped"):
        path = copy()
        with monkeypatch.context() as patch:
            if owner == "alive":
                patch.setattr(ring_file.Owner, "has_ended", lambda self: False)
            elif owner == "elsewhere":
                patch.setattr(ring_file.Owner, "this", classmethod(lambda cls: cls(1, 2, 3, b"x" * 36)))
            else:
                with (path / layout.RING).open("r+b") as file:
                    file.seek(768)
                    file.write(b"\1")
            assert Recording.open(path).steps == [] and (path / layout.RING).exists()


def test_s8_a_damaged_ring_gives_no_wrong_step(tmp_path: Path) -> None:
    left_by_a_kill(tmp_path / "r")
    ring = (tmp_path / "r" / layout.RING).read_bytes()
    last = int.from_bytes(ring[512:520], "little")
    assert last
    used = [range(88), range(256, 264), range(320, 328), range(512, 520)]
    notes = ring_file.FIRST + RING
    used.append(range(notes, notes + last + 400))
    chance = random.Random(0)
    (tmp_path / "r" / layout.RING).unlink()
    for number in range(60):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "r", path)
        place = chance.choice(list(used[number % 5]))
        with (path / layout.RING).open("wb") as file:
            file.write(ring[:4096])
            file.truncate(len(ring))
            for start, end in ((ring_file.FIRST, ring_file.FIRST + (1 << 20)), (notes, notes + (1 << 16))):
                file.seek(start)
                file.write(ring[start:end])
            file.seek(place)
            file.write(bytes([ring[place] ^ 1 << chance.randrange(8)]))
        opened = Recording.open(path)
        assert set(opened.steps) <= {0, 1, 2}
        for step in opened.steps:
            assert torch.equal(opened.tensor("x", step), torch.arange(5000.0) + step)
            assert torch.equal(opened.tensor("large", step), torch.arange(30_000.0) + step)
