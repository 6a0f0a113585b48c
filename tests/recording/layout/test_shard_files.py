"""Bytes of shards: only what is in use is mapped, few files are open, and a file that shrinks is an error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import glassengine as glass
from glassengine.compare import pairs
from glassengine.errors import CorruptError, UsageError
from glassengine.recording.layout import shard_files
from glassengine.recording.layout.shard_files import ShardFiles
from glassengine.recording.reader import Recording
from glassengine.recording.source import open_source
from glassengine.recording.write import shard as shards
from glassengine.recording.write import writer
from glassengine.recording.write.writer import RecordingWriter
from glassengine.stores import objects
from glassengine.stores import objects as ranges

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


def recorded(directory: Path, *, wrong: bool = False) -> Path:
    with RecordingWriter(directory, metadata={"x": 1}) as writer:
        for step in range(2):
            for number in range(12):
                values = torch.randn(100, number + 1, generator=torch.Generator().manual_seed(99 * step + number))
                writer.write(f"layer.{number}", step, values * (1.5 if wrong and (step, number) == (1, 7) else 1))
            writer.write("large", step, torch.full((2_100_000 if step else 3,), float(step)))
            writer.commit(step)
    return directory


@pytest.fixture
def url(bucket: str, tmp_path: Path) -> str:
    store = fsspec.filesystem("s3")
    for name in ("a", "b", "c"):
        store.put(f"{recorded(tmp_path / name, wrong=name == 'c')}/", f"{bucket}/{name}/", recursive=True)
    return bucket


def _first(path: str) -> tuple[str, list[float]]:
    opened = open_source(path)
    return str(opened.path), opened.tensor(opened.entries[0])[0].tolist()


def test_a_recording_in_s3(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = glass.Recording.open(tmp_path / "a"), glass.Recording.open(f"{url}/a")
    assert there.complete and str(there.path) == f"{url}/a" and there.entries[0].site == "layer.0"
    for entry in there.entries:
        assert torch.equal(there.tensor(entry), here.tensor(here.entry(entry.site, entry.step)))
    # What another process needs is the text of the path.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_first, (str(there.path),)) == (
            f"{url}/a",
            here.tensor(here.entries[0])[0].tolist(),
        )
    # Compared as those on the disk are.
    monkeypatch.chdir(tmp_path)
    for other, ok in (("b", True), ("c", False)):
        found, wanted = (glass.compare(f"{at}/a", f"{at}/{other}").to_dict() for at in (url, tmp_path))
        assert found["ok"] is wanted["ok"] is ok
        assert str(found).replace(url, str(tmp_path)) == str(wanted)


def test_only_ranges_are_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = glass.Recording.open(f"{url}/a")
    asked: list[int] = []
    read = objects.read
    monkeypatch.setattr(objects, "read", lambda url, start, stop: asked.append(stop - start) or read(url, start, stop))
    opened.tensor("layer.3", 0)
    assert sum(asked) == 4 << 20, "one block"
    opened.tensor("large", 1)
    assert sum(asked) == (4 << 20) + 8_400_000


def test_a_shard_that_is_replaced_is_named(url: str, tmp_path: Path) -> None:
    opened = glass.Recording.open(f"{url}/a")
    shard = "shard-00000.safetensors"
    data = bytearray((tmp_path / "a" / shard).read_bytes())
    data[-5:] = b"12345"
    objects.write(bytes(data), f"{url}/a/{shard}")
    with pytest.raises(CorruptError, match="has changed since it was opened: it was replaced"):
        opened.tensor("large", 1)
    with pytest.raises(CorruptError, match="the checksum does not match"):
        glass.Recording.open(f"{url}/a").tensor("large", 1)
    objects.remove([f"{url}/a/{shard}"])
    with pytest.raises(CorruptError, match="no such object"):
        opened.tensor("large", 1)
    with pytest.raises(CorruptError, match="damaged"):
        glass.Recording.open(f"{url}/a")
    # And what never was there.
    with pytest.raises(UsageError, match="no recording found") as raised:
        glass.Recording.open(f"{url}/z")
    assert f"{url}/z" in str(raised.value)
    with pytest.raises(UsageError, match="no such file"):
        glass.compare(f"{url}/z", f"{url}/a")


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Names of objects -> how many of the next downloads of each have one flipped bit."""
    read, left = objects.read, {}

    def flipped(url: str, start: int, end: int) -> bytes:
        data = bytearray(read(url, start, end))
        for name, number in left.items():
            if url.endswith(name) and number and len(data) > 8:
                left[name] -= 1
                data[len(data) // 2] ^= 4
        return bytes(data)

    monkeypatch.setattr(objects, "read", flipped)
    return left


@pytest.mark.parametrize("state", ["complete", "writing"])
@pytest.mark.parametrize("name", ["index.log", "recording.json"])
def test_s21_a_damaged_download_of_what_says_what_there_is(
    name: str, state: str, url: str, tmp_path: Path, flips: dict[str, int]
) -> None:
    manifest = tmp_path / "a/recording.json"
    manifest.write_text(manifest.read_text().replace('"complete"', f'"{state}"'))
    store = fsspec.filesystem("s3")
    store.put_file(str(manifest), f"{url}/s21/recording.json")
    for file in ("index.log", "shard-00000.safetensors"):
        store.put_file(str(tmp_path / "a" / file), f"{url}/s21/{file}")
    flips[f"s21/{name}"] = 1
    found = glass.Recording.open(f"{url}/s21")
    assert flips == {f"s21/{name}": 0} and found.steps == [0, 1] and len(found.entries) == 26
    # What is damaged where it lies is damaged, each time it is opened.
    flips[f"s21/{name}"] = 1000
    ranges.forget(url)
    for _ in range(2):
        if state == "complete" or name == "recording.json":
            with pytest.raises(CorruptError):
                glass.Recording.open(f"{url}/s21")
        else:
            assert len(glass.Recording.open(f"{url}/s21").steps) < 2
    flips.clear()
    assert glass.Recording.open(f"{url}/s21").steps == [0, 1]


def test_s21_a_damaged_download_of_values(url: str, tmp_path: Path, flips: dict[str, int]) -> None:
    here, there = glass.Recording.open(tmp_path / "a"), glass.Recording.open(f"{url}/a")
    for entry in ("layer.0", "large"):
        for step in (0, 1):
            flips["shard-00000.safetensors"] = 1
            ranges.forget(url)
            assert torch.equal(there.tensor(entry, step), here.tensor(entry, step)) and not any(flips.values())
    flips["shard-00000.safetensors"] = 1000
    ranges.forget(url)
    with pytest.raises(CorruptError, match="recorded values are damaged"):
        there.tensor("large", 1)
    flips.clear()
    assert torch.equal(there.tensor("large", 1), here.tensor("large", 1))


def test_s21_a_damaged_download_of_rows_is_no_difference(
    url: str, tmp_path: Path, flips: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "BLOCK_BYTES", 5000)
    flips["b/shard-00000.safetensors"] = 1
    found = glass.compare(tmp_path / "a", f"{url}/b")
    assert not any(flips.values()) and found.ok and found.verdict == "identical"
