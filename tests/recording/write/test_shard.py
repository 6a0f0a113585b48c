"""Shards are made with the index, or while it has a name: who removes the directory finds nothing new in it."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.recording.reader import Recording
from glassengine.recording.write import shard as shards
from glassengine.recording.write.consumer import Consumer
from glassengine.recording.write.writer import RecordingWriter

NET = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())


def test_s23_the_thread_that_writes_makes_no_file_behind_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, put = threading.Event(), Consumer._put
    monkeypatch.setattr(Consumer, "_put", lambda *given: may_write.wait(30) and put(*given))
    with glass.record(NET, tmp_path / "here"):
        NET(torch.ones(2))
        before = sorted((tmp_path / "here").iterdir())
        may_write.set()
        NET(torch.ones(2))
        time.sleep(0.3)
        assert sorted((tmp_path / "here").iterdir()) == before
    assert Recording.open(tmp_path / "here").steps == [0, 1]


def test_s23_a_directory_is_taken_away_right_behind_a_call(tmp_path: Path) -> None:
    for number in range(40):
        recording = glass.record(NET, tmp_path / f"{number}")
        recording.__enter__()
        NET(torch.ones(2))
        shutil.rmtree(tmp_path / f"{number}")
        NET(torch.ones(2))
        with pytest.raises(glass.GlassError, match="cannot be written"):
            recording.__exit__(None, None, None)


@pytest.mark.parametrize("when", ["before a value", "behind a full shard", "behind a step"])
def test_s23_what_comes_into_the_place_of_a_directory_is_left_alone(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)
    writer = RecordingWriter(tmp_path / "here", metadata={})
    if when != "before a value":
        writer.write("a", 0, torch.ones(2))
    if when == "behind a step":
        writer.commit(0)
    shutil.rmtree(tmp_path / "here")
    (tmp_path / "here").mkdir()
    with pytest.raises(glass.GlassError, match="cannot be written"):
        writer.write("b", 1, torch.ones(2))
        writer.commit(1)
    writer.close()
    assert list((tmp_path / "here").iterdir()) == []


def test_s23_a_shard_that_takes_nothing_does_not_stay(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "none", metadata={}) as writer:
        assert (tmp_path / "none/shard-00000.part").exists()
        writer.write("empty", 0, torch.ones(0))
        writer.commit(0)
    with RecordingWriter(tmp_path / "nothing", metadata={}) as writer:
        writer.commit(0)
    assert [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("none", "nothing")] == [
        ["index.log", "recording.json", "shard-00000.safetensors"],
        ["index.log", "recording.json"],
    ]
    assert Recording.open(tmp_path / "none").complete and Recording.open(tmp_path / "nothing").complete
