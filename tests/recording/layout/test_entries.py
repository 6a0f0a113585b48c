"""Reading grows with what is read, and no faster: counted in calls of functions, which no other program changes."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.compare.compare import compare
from glassengine.recording.layout import layout
from glassengine.recording.layout import records as frames
from glassengine.recording.layout.entries import Entries
from glassengine.recording.layout.index import read_index
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.layout.records import commit_frame, frame
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter


def calls(run: Callable[[], Any]) -> int:
    """Return how many functions of Python `run` calls."""
    count = 0

    def see(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def record(path: Path, steps: int, tensors: int = 2) -> Path:
    with RecordingWriter(path, metadata={}) as w:
        for step in range(steps):
            for number in range(tensors):
                w.write(f"m.{number}", step, torch.full((2,), float(step + number)))
            w.commit(step)
    return path


def as_version_3(index: bytes, steps: int) -> bytes:
    """An index as it was: JSON, every tensor described in every step."""
    opened = read_index(io.BytesIO(index), {0: 1 << 40})
    found = []
    for step in range(steps):
        entries = opened.entries.of_step(step)
        for entry in entries:
            place = entry.location
            assert place is not None
            shared = {"site": entry.site, "dtype": entry.dtype, "shape": entry.shape, "axes": {}, "node": None}
            where = {"step": step, "rank": 0, "shard": place.shard, "offset": place.offset, "checksum": place.checksum}
            found.append(frame({"kind": "tensor", **shared, "nbytes": entry.nbytes, **where}))
        found.append(frame({"kind": "commit", "step": step, "num_tensors": len(entries), "num_left_out": 0}))
    return b"".join(found)


def test_s9_opening_calls_nothing_for_each_step(tmp_path: Path) -> None:
    few, many = (record(tmp_path / str(steps), steps) for steps in (200, 800))
    Recording.open(few)
    assert calls(lambda: Recording.open(many)) < calls(lambda: Recording.open(few)) + 50


def test_s9_recordings_of_version_3_open_in_linear_time_and_say_the_same(tmp_path: Path) -> None:
    counts = []
    for steps in (200, 400):
        path = record(tmp_path / str(steps), steps)
        new = list(Recording.open(path).entries)
        (path / layout.INDEX).write_bytes(as_version_3((path / layout.INDEX).read_bytes(), steps))
        assert list(Recording.open(path).entries) == new
        counts.append(calls(lambda path=path: Recording.open(path)))
    assert counts[1] < 2.1 * counts[0]


def test_s9_comparing_and_looking_up_are_linear(tmp_path: Path) -> None:
    few, many = (record(tmp_path / str(steps), steps) for steps in (100, 200))
    compare(few, few)
    assert calls(lambda: compare(many, many)) < 2.1 * calls(lambda: compare(few, few))
    assert calls(lambda: compare(many, many)) < 200 * 400
    opened = Recording.open(many)
    assert calls(lambda: [opened.entry("m.1", step) for step in opened.steps]) < 200 * 20
    wide = [Recording.open(record(tmp_path / f"w{n}", 1, n)) for n in (300, 600)]
    named = [calls(lambda r=r: [r.entry(site, 0) for site in r.sites()]) for r in wide]
    assert named[1] < 2.1 * named[0]


def test_entries_are_a_sequence(tmp_path: Path) -> None:
    entries = Recording.open(record(tmp_path / "r", 3)).entries
    every = tuple(entries)
    assert isinstance(entries, Entries) and entries == every and every == tuple(entries[:]) and len(entries) == 6
    assert [entries[i] for i in (0, 3, -1)] == [every[0], every[3], every[5]] and entries[1:3] == every[1:3]
    with pytest.raises(IndexError):
        entries[6]
    assert entries != every[:5] and every[2] in entries and entries.of_step(1) == list(every[2:4])
    only = entries.filtered(lambda site: site == "m.1")
    assert [entry.step for entry in only] == [0, 1, 2] and only[0] == every[1]
    assert entries.steps_of("m.0", 0) == [0, 1, 2] and entries.steps_of("m.0", 1) == []


def test_what_is_described_after_it_is_used_ends_the_index() -> None:
    part = {"site": "a", "dtype": "float32", "shape": [4], "axes": {}, "node": None, "nbytes": 16}
    group = frame({"kind": "group", "group": 0, "rank": 0, "tensors": [part]})

    def block(step: int, offset: int) -> bytes:
        return frames.block_frame(0, step, layout.Location(0, offset, 0)) + commit_frame(step, 1, 0, None)

    good = read_index(io.BytesIO(group + block(0, 0) + block(1, 64)), {0: 128})
    assert good.damage is None and good.steps == [0, 1]
    assert read_index(io.BytesIO(block(0, 0) + group + block(1, 64)), {0: 128}).steps == []
    assert read_index(io.BytesIO(group + block(0, 0) + group + block(1, 64)), {0: 128}).steps == [0]


def test_s4_bytes_belong_to_one_step_and_a_step_is_committed_once() -> None:
    part = {"site": "a", "dtype": "float32", "shape": [4], "axes": {}, "node": None, "nbytes": 16}
    index = frame({"kind": "group", "group": 0, "rank": 0, "tensors": [part]})
    for step, offset in ((5, 0), (3, 64), (4, 128), (9, 64), (2, 192)):
        index += frames.block_frame(0, step, layout.Location(0, offset, 0)) + commit_frame(step, 1, 0, None)
    found = read_index(io.BytesIO(index), {0: 1 << 20})
    assert found.steps == [5, 3, 4] and "overlap" in str(found.damage)
    assert [entry.step for entry in found.entries] == [3, 4, 5]
    again = index[: -2 * 80] + frames.block_frame(0, 3, layout.Location(0, 256, 0)) + commit_frame(3, 1, 0, None)
    assert "impossible step 3" in str(read_index(io.BytesIO(again), {0: 1 << 20}).damage)


def test_long_indices_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path / "r", 40)
    whole = Recording.open(path)
    monkeypatch.setattr(frames, "_PIECE_BYTES", 97)
    assert Recording.open(path).entries == whole.entries and whole.complete
    index = (path / layout.INDEX).read_bytes()
    (path / layout.INDEX).write_bytes(index[:-50] + bytes([index[-50] ^ 1]) + index[-49:])
    found = read_index(io.BytesIO((path / layout.INDEX).read_bytes()), {0: 1 << 40})
    assert found.steps == list(range(39)) and "checksum" in str(found.damage)


def test_tensors_without_values_are_in_order(tmp_path: Path) -> None:
    items = [LeftOut("a", step, 0, "because") for step in (2, 0, 1)]
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        for item in items:
            w.leave_out(item)
            w.commit(item.step)
    opened = Recording.open(tmp_path / "r")
    assert opened.left_out == sorted(items, key=lambda item: item.step) and opened.left_out[1].step == 1
    assert [item.step for item in opened.skipped] == [0, 1, 2]
