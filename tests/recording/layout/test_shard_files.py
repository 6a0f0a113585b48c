"""Bytes of shards: only what is in use is mapped, few files are open, and a file that shrinks is an error."""

from __future__ import annotations

import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.errors import CorruptError
from glassengine.recording.layout import shard_files
from glassengine.recording.layout.shard_files import ShardFiles
from glassengine.recording.read.reader import Recording
from glassengine.recording.write import shards, writer

MIN_MAPPED_BYTES = 1 << 20
COUNT = MIN_MAPPED_BYTES // 4
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(autouse=True)
def small_ranges_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "MIN_MAPPED_BYTES", MIN_MAPPED_BYTES)


def _write(path: Path, count: int, num: int, monkeypatch: pytest.MonkeyPatch, *, shard_bytes: int = 1 << 31) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", shard_bytes)
    with writer.RecordingWriter(path, metadata={}) as opened:
        for index in range(num):
            opened.write(f"x{index}", 0, torch.full((count,), float(index)))
        opened.commit(0)


def _num_mapped(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def _num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@linux
def test_what_is_not_used_any_more_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "r", COUNT, 8, monkeypatch)
    opened = Recording.open(tmp_path / "r")
    for index in range(8):
        assert float(opened.tensor(f"x{index}").mean()) == index
        assert _num_mapped(tmp_path) == 0
    view = opened.tensor("x3").view(2, -1)[1]
    del opened
    gc.collect()
    # A view is enough to keep the bytes, the recording is not needed.
    assert _num_mapped(tmp_path) == 1 and float(view[-1]) == 3
    del view
    assert _num_mapped(tmp_path) == 0


@linux
def test_many_tensors_and_many_shards_need_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "r", COUNT, 40, monkeypatch, shard_bytes=MIN_MAPPED_BYTES)
    assert len(list((tmp_path / "r").glob("shard-*"))) == 40
    before = _num_open()
    opened = Recording.open(tmp_path / "r")
    kept = [opened.tensor(f"x{index}") for index in range(40)]
    assert [float(tensor[0]) for tensor in kept] == list(range(40))
    assert _num_open() - before <= 20
    del opened
    gc.collect()
    assert _num_open() == before
    assert [float(tensor[-1]) for tensor in kept] == list(range(40))


@pytest.mark.parametrize("count", [4, COUNT])
def test_a_shard_that_has_become_shorter(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "r", count, 2, monkeypatch)
    opened = Recording.open(tmp_path / "r")
    (file,) = (tmp_path / "r").glob("shard-*")
    os.truncate(file, file.stat().st_size - 1)
    assert float(opened.tensor("x0")[0]) == 0
    with pytest.raises(CorruptError, match="shorter"):
        opened.tensor("x1")


def test_every_range_is_what_the_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "r", 3 * COUNT, 1, monkeypatch)
    (path,) = (tmp_path / "r").glob("shard-*")
    files = ShardFiles(tmp_path / "r")
    data = path.read_bytes()[-files.data_bytes[0] :]
    for offset in (0, 1, 4095, 4096, 5000):
        for size in (1, MIN_MAPPED_BYTES - 1, MIN_MAPPED_BYTES, MIN_MAPPED_BYTES + 4097):
            assert bytes(files.read(0, offset, size)) == data[offset : offset + size]


def test_threads_that_read_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "r", 1 << 15, 24, monkeypatch, shard_bytes=1 << 17)
    assert len(list((tmp_path / "r").glob("shard-*"))) == 24
    opened = Recording.open(tmp_path / "r")

    def read(number: int) -> bool:
        return float(opened.tensor(f"x{number % 24}")[-1]) == number % 24

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(400)))


def test_s15_a_shard_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "r", COUNT, 1, monkeypatch)
    monkeypatch.setattr(shard_files, "MIN_MAPPED_BYTES", 64 << 20)
    opened = Recording.open(tmp_path / "r")
    kept = opened.tensor("x0")
    (file,) = (tmp_path / "r").glob("shard-*")
    preadv = os.preadv

    def cut(*arguments: Any) -> int:
        os.truncate(file, 1 << 19)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(CorruptError, match="shorter"):
        opened.tensor("x0")
    # What was read before is there still.
    assert float(kept.sum()) == 0
