"""Forwards that had ended when a disk ran full are not lost, and what cannot be finished is not left behind."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from glassengine.errors import GlassError, UsageError
from glassengine.recording import recovery as rescue
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.reader import Recording
from glassengine.recording.write import destination
from glassengine.recording.write.writer import RecordingWriter

RING = 1 << 19


class Disk:
    """Where every write below a directory fails from the `first`-th on; `lasts` or once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, below: Path) -> None:
        self.first, self.lasts, self._seen = 1 << 30, True, 0
        self._below = str(below)
        self._real = os.writev
        monkeypatch.setattr(os, "writev", self._write)

    def fill(self, *, after: int = 0, lasts: bool = True) -> None:
        self.first, self.lasts, self._seen = after + 1, lasts, 0

    def free(self) -> None:
        self.first = 1 << 30

    def _write(self, descriptor: int, buffers: Sequence[bytes | memoryview]) -> int:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self._below):
            self._seen += 1
            if self._seen == self.first or (self.lasts and self._seen > self.first):
                raise OSError(errno.ENOSPC, "No space left on device")
        return self._real(descriptor, buffers)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    return Disk(monkeypatch, tmp_path / "r")


def write(recorder: BackgroundWriter, steps: Sequence[int], size: int = 1000) -> list[int]:
    """Write steps, and return those that ended before anything failed."""
    ended = []
    for step in steps:
        recorder.write("x", step, torch.full((size,), float(step)))
        recorder.commit(step)
        ended += [step] * (recorder.failure is None)
    return ended


def steps_of(path: Path) -> list[int]:
    opened = Recording.open(path)
    assert not opened.complete and "No space left" in (opened.incomplete_because or "")
    for step in opened.steps:
        assert bool((opened.tensor("x", step) == step).all())
    return opened.steps


def names(path: Path) -> set[str]:
    return {item.name for item in path.iterdir()}


def test_steps_that_a_full_disk_has_no_room_for_are_recovered(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    write(recorder, range(2))
    recorder.wait()
    disk.fill()
    write(recorder, range(2, 5))
    with pytest.raises(UsageError) as raised:
        recorder.close()
    assert "2 completed steps are safe" in str(raised.value)
    assert "in ring.part: 3 more, recovered when the recording is opened" in str(raised.value)
    # As long as it is full they are recovered elsewhere, each time.
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert steps_of(tmp_path / "r") == [0, 1, 2, 3, 4]
        assert "ring.part" in names(tmp_path / "r") and "cannot be kept" in caplog.text
    disk.free()
    for _ in range(2):
        assert steps_of(tmp_path / "r") == [0, 1, 2, 3, 4]
        assert names(tmp_path / "r") >= {"recovered"} and not names(tmp_path / "r") & {"ring.part", "recovered.part"}
    BackgroundWriter(tmp_path / "r", metadata={}, overwrite=True).close()
    assert names(tmp_path / "r") == {"index.log", "recording.json"}


@pytest.mark.parametrize("after", range(5))
def test_a_disk_that_is_full_for_a_moment(tmp_path: Path, disk: Disk, after: int) -> None:
    recorder = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    disk.fill(after=after, lasts=False)
    ended = write(recorder, range(3))
    recorder.wait()
    ended += write(recorder, range(3, 6))  # the program goes on
    try:
        recorder.close()
    except UsageError:
        assert steps_of(tmp_path / "r")[: len(ended)] == ended
    else:
        assert Recording.open(tmp_path / "r").steps == ended == list(range(6))
    assert not [name for name in names(tmp_path / "r") if name.endswith((".part", ".tmp"))]


def test_the_model_does_not_wait_for_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    recorder = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    disk.fill()
    write(recorder, range(200), size=20_000)  # many times the ring, and one in pieces
    recorder.write("large", 200, torch.zeros(1 << 20))
    with pytest.raises(UsageError):
        recorder.close()
    # What the ring could not hold any more is gone, and what it holds is not half of that.
    left = steps_of(tmp_path / "r")
    assert left == list(range(len(left)))


def test_a_recording_that_cannot_begin_leaves_nothing(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., None] = destination.save_manifest

    def full(path: Path, manifest: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(destination, "save_manifest", full)
    with pytest.raises(UsageError, match="No space left"):
        RecordingWriter(tmp_path / "r", metadata={})
    assert not names(tmp_path / "r")
    monkeypatch.setattr(destination, "save_manifest", real)
    disk.fill()
    writer = RecordingWriter(tmp_path / "r", metadata={})
    with pytest.raises(GlassError, match="no completed step is safe"):
        writer.write("x", 0, torch.zeros(3))
    with pytest.raises(GlassError):
        writer.write("x", 1, torch.zeros(3))
    writer.close()
    assert names(tmp_path / "r") == {"index.log", "recording.json"}


def test_what_a_kill_left_of_the_beginning_is_replaced(tmp_path: Path) -> None:
    RecordingWriter(tmp_path / "r", metadata={}).close()
    (tmp_path / "r" / "recording.json").unlink()
    with pytest.raises(UsageError, match="--overwrite"):
        RecordingWriter(tmp_path / "r", metadata={})
    RecordingWriter(tmp_path / "r", metadata={}, overwrite=True).close()
    (tmp_path / "r" / "recording.json").unlink()
    (tmp_path / "r" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        RecordingWriter(tmp_path / "r", metadata={}, overwrite=True)


def test_a_ring_that_cannot_be_read_now_is_not_removed(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    disk.fill()
    ended = write(recorder, range(3))
    recorder.wait()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(rescue.LeftRing, "read", broken)
        with pytest.raises(UsageError, match=r"in ring\.part: possibly some more"):
            recorder.close()
    disk.free()
    assert steps_of(tmp_path / "r")[: len(ended)] == ended


def test_short_reads_and_writes_lose_nothing(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.pread, os.write
    recorder = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    disk.fill()
    ended = write(recorder, range(3))
    with pytest.raises(UsageError):
        recorder.close()
    disk.free()
    with monkeypatch.context() as short:
        short.setattr(os, "pread", lambda file, count, at: real_read(file, -(-count // 2), at))
        short.setattr(os, "write", lambda file, data: real_write(file, data[: -(-len(data) // 2)]))
        assert steps_of(tmp_path / "r")[: len(ended)] == ended
        opened = Recording.open(tmp_path / "r")
        expected = [opened.summary(entry) for entry in opened.entries]
    again = Recording.open(tmp_path / "r")
    kept = [again._statistics.summary(entry) for entry in again.entries]
    assert kept == expected
