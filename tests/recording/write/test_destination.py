"""Recordings that go to a store while they are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import commands
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.layout import layout
from glassengine.recording.write import destination
from glassengine.recording.write.destination import directory_of
from glassengine.recording.write.writer import StoredWriter
from glassengine.stores import objects
from glassengine.stores.places import RemotePath

URL = "memory://runs/a"
TARGET = RemotePath(URL)
STEPS, SITES, SIZE = 20, 4, 4096


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_in_memory: None) -> Path:
    monkeypatch.setenv("GLASS_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setattr(destination, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(destination, "PATIENCE_S", 0.2)
    monkeypatch.setattr(layout, "HEADER_BYTES", 1 << 12)
    return tmp_path / "spool"


BeforePut = Callable[[Callable[[str], object]], None]


@pytest.fixture
def before_put(monkeypatch: pytest.MonkeyPatch) -> BeforePut:
    """Return what has a function see the URL of each object before it is put; it may wait, or raise."""
    put = objects.put
    return lambda first: monkeypatch.setattr(objects, "put", lambda path, url: (first(url), put(path, url)))


def refuse(part: str) -> Callable[[str], None]:
    """Return a store that cannot be used for objects with this in their names."""

    def refused(url: str) -> None:
        if part in url:
            raise UsageError("the store cannot be used", got="planted")

    return refused


def values(step: int, site: int) -> torch.Tensor:
    return torch.full((SIZE,), float(100 * step + site))


def write(spool_bytes: int = 1 << 18, *, overwrite: bool = False) -> StoredWriter:
    writer = StoredWriter(TARGET, metadata={"x": 1}, spool_bytes=spool_bytes, overwrite=overwrite)
    for step in range(STEPS):
        for site in range(SITES):
            writer.write(f"layer.{site}", step, values(step, site))
        writer.commit(step)
    writer.close()
    return writer


def require_all(recording: glass.Recording) -> None:
    assert recording.complete and recording.steps == list(range(STEPS))
    for step in range(STEPS):
        for site in range(SITES):
            assert torch.equal(recording.tensor(f"layer.{site}", step), values(step, site))


def test_shards_go_first_and_the_manifest_last(spool: Path, before_put: BeforePut) -> None:
    order: list[str] = []
    before_put(lambda url: order.append(url.rpartition("/")[2]))
    writer = write()
    assert writer.deliver() is None
    shards = [name for name in order if name.startswith("shard")]
    assert len(shards) > 5 and order[-2:] == [layout.INDEX, layout.MANIFEST]
    # What the index names was there before it.
    assert order.index(shards[1]) < len(order) - 1 - order[::-1].index(layout.INDEX)
    require_all(glass.Recording.open(URL))
    assert list(spool.iterdir()) == [], "nothing is left here"


def test_sealed_shards_can_be_read_before_the_end() -> None:
    writer = StoredWriter(TARGET, metadata={}, spool_bytes=1 << 18)
    assert not glass.Recording.open(URL).steps
    for step in range(STEPS):
        for site in range(SITES):
            writer.write(f"layer.{site}", step, values(step, site))
        writer.commit(step)
    deadline = time.monotonic() + 20
    while len(glass.Recording.open(URL).steps) < STEPS - 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    found = glass.Recording.open(URL)
    assert not found.complete and STEPS - 6 <= len(found.steps) < STEPS
    assert torch.equal(found.tensor("layer.1", 3), values(3, 1))
    writer.close()
    assert writer.deliver() is None


def test_waiting_uploads_are_bounded(spool: Path, before_put: BeforePut) -> None:
    """A slow store: who writes waits, and neither disk nor memory takes more."""
    most, spool_bytes = [0], 1 << 18

    def slow(_: str) -> None:
        time.sleep(0.03)
        size = sum(file.stat().st_blocks * 512 for file in spool.rglob("shard*"))
        most[0] = max(most[0], size)

    before_put(slow)
    begun = time.monotonic()
    writer = write(spool_bytes)
    took = time.monotonic() - begun
    assert writer.deliver() is None
    assert took > 0.1 and most[0] <= 1.6 * spool_bytes
    require_all(glass.Recording.open(URL))


def test_a_store_that_fails_in_passing(before_put: BeforePut) -> None:
    failures = [3]

    def failing(url: str) -> None:
        if "shard" in url and failures[0]:
            failures[0] -= 1
            raise UsageError("the store cannot be used", got="500")

    before_put(failing)
    assert write().deliver() is None
    require_all(glass.Recording.open(URL))


def test_a_store_that_goes_away(spool: Path, before_put: BeforePut) -> None:
    """The recording stops, what was written stays here, and is brought there later."""
    before_put(refuse("shard-00002"))
    net, x = Net(), torch.ones(30_000)
    with pytest.raises(GlassError, match="planted"), glass.record(net, URL, spool_bytes=1 << 20) as recorder:
        for step in range(12):
            assert torch.equal(net(x * step), x * step + 15), "the model goes on"
            recorder.wait()
    before_put(lambda _: None)
    done = commands.upload(URL)
    assert not done.complete and 2 <= done.num_steps < 12 and not any(spool.iterdir())
    found = glass.Recording.open(URL)
    for step in found.steps:
        assert torch.equal(found.tensor("parts.3", step), x * step + 6)


def test_a_store_that_does_not_answer_at_the_end(
    spool: Path, caplog: pytest.LogCaptureFixture, before_put: BeforePut
) -> None:
    before_put(refuse("shard-00009"))
    problem = write(1 << 19).deliver()
    assert problem is not None and "planted" in str(problem) and f"glass upload {URL}" in str(problem.hint)
    assert not glass.Recording.open(URL).complete and len(glass.Recording.open(URL).steps) > 3
    assert f"was not uploaded: glass upload {URL}" in caplog.text
    # What was being made when a process was killed is not part of it.
    (left,) = spool.iterdir()
    for name in ("index.log.copy", "shard-00001.safetensors.hollow", "recording.json.tmp"):
        (left / "recording" / name).write_bytes(b"x")
    with pytest.raises(UsageError, match="exists already"):
        write()
    before_put(lambda _: None)
    found = commands.upload(URL)
    assert (found.num_steps, found.complete) == (STEPS, True)
    assert all(item.name.startswith(("shard-0", "index.log", "recording.json")) for item in objects.listed(URL))
    assert not any(item.name.endswith((".copy", ".hollow", ".tmp", ".part")) for item in objects.listed(URL))
    require_all(glass.Recording.open(URL))
    assert not directory_of(TARGET).parent.exists()
    with pytest.raises(UsageError, match="nothing waits here"):
        commands.upload(URL)


def test_an_unusable_store_is_found_before_the_model_runs(spool: Path, before_put: BeforePut) -> None:
    before_put(refuse(""))
    net = nn.ReLU()
    with pytest.raises(UsageError, match="planted"), glass.record(net, URL):
        raise AssertionError("not reached")
    assert not any(spool.iterdir())


def test_existing_recordings_are_replaced_on_demand_only() -> None:
    assert write().deliver() is None
    with pytest.raises(UsageError, match="exists already"):
        write()
    objects.write(b"x", f"{URL}/notes.txt")
    assert write(overwrite=True).deliver() is None
    require_all(glass.Recording.open(URL))
    assert objects.read(f"{URL}/notes.txt", 0, 1) == b"x"
    objects.write(b"x", "memory://other/notes.txt")
    with pytest.raises(UsageError, match="other files"):
        StoredWriter(RemotePath("memory://other"), metadata={})
    writer = StoredWriter(RemotePath("memory://third"), metadata={})
    there = objects.listed("memory://third")
    with pytest.raises(UsageError, match="being written"):
        StoredWriter(RemotePath("memory://third"), metadata={}, overwrite=True)
    assert there and objects.listed("memory://third") == there, "what it has uploaded is left alone"
    writer.close()
    assert writer.deliver() is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            x = part(x + number)
        return x


@pytest.mark.parametrize("when_behind", ["wait", "cut"])
def test_a_model_whose_store_is_slow(when_behind: str, before_put: BeforePut) -> None:
    slow = threading.Event()
    before_put(lambda url: "shard" in url and slow.wait(0.02))
    net, x = Net(), torch.ones(30_000)
    with glass.record(net, URL, spool_bytes=1 << 20, when_behind=when_behind) as recorder:  # type: ignore[arg-type]
        for step in range(12):
            net(x * step)
            recorder.wait()
    slow.set()
    found = glass.Recording.open(URL)
    assert found.complete and len(found.steps) == 12 and str(recorder.path) == URL
    left_out = [item for item in found.left_out if item.reason == "the store did not keep up"]
    assert bool(left_out) == (when_behind == "cut")
    assert all(item.statistics is not None for item in left_out)
    for entry in found.entries:
        if entry.site == "parts.3":
            assert torch.equal(found.tensor(entry), x * entry.step + 6)


def test_an_invalid_answer_to_a_slow_store() -> None:
    with pytest.raises(UsageError, match="wait, cut"):
        glass.record(nn.ReLU(), URL, when_behind="drop")  # type: ignore[arg-type]


def test_a_recording_of_this_machine_is_uploaded_whole(tmp_path: Path) -> None:
    with glass.record(net := Net(), tmp_path / "run"):
        net(torch.ones(10))
    found = commands.upload(tmp_path / "run", URL)
    assert found.complete and found.num_steps == 1
    assert glass.compare(tmp_path / "run", URL).ok
    with pytest.raises(UsageError, match="something already"):
        commands.upload(tmp_path / "run", URL)
    with pytest.raises(UsageError, match="DIR URL"):
        commands.upload(tmp_path / "none", "memory://other")


def test_a_process_that_ends_does_not_wait_for_a_store_that_hangs(
    monkeypatch: pytest.MonkeyPatch, before_put: BeforePut
) -> None:
    over = threading.Event()
    before_put(lambda url: "shard" in url and over.wait(60))
    monkeypatch.setattr(destination, "_LAST_S", 0.2)
    writer = write(1 << 24)
    problem = writer.deliver(0.1)
    over.set()
    assert problem is None or "does not answer" in str(problem)
    writer._uploads._thread.join()
    if problem is not None:
        assert commands.upload(URL).complete
    require_all(glass.Recording.open(URL))


def test_a_process_that_ends_does_not_wait_for_room(
    spool: Path, monkeypatch: pytest.MonkeyPatch, before_put: BeforePut
) -> None:
    """As SIGTERM does while the model waits for a store that has gone."""
    monkeypatch.setattr(destination, "PATIENCE_S", 60.0)
    before_put(refuse("shard"))
    writer = BackgroundWriter(URL, metadata={}, spool_bytes=1 << 20)
    for step in range(20):
        writer.write("x", step, torch.full((40_000,), float(step)))
        writer.commit(step)
    begun = time.monotonic()
    with pytest.raises(GlassError, match="planted"):
        writer.close("stopped by SIGTERM", patience_s=0.1)
    assert time.monotonic() - begun < 20
    before_put(lambda _: None)
    assert commands.upload(URL).num_steps == 20


def test_a_directory_of_a_process_that_was_killed_before_it_began() -> None:
    directory_of(TARGET).parent.mkdir(parents=True)
    assert write().deliver() is None
    require_all(glass.Recording.open(URL))


def test_the_ranks_of_a_run() -> None:
    for rank in range(3):
        writer = StoredWriter(RemotePath(f"{URL}/rank{rank}"), metadata={"rank": rank})
        writer.write("x", 0, torch.full((5,), float(rank)), rank=rank)
        writer.commit(0)
        writer.close()
        assert writer.deliver() is None
    found = glass.open(URL)
    assert found.complete and [entry.rank for entry in found.entries] == [0, 1, 2]
    assert [found.tensor(entry)[0].item() for entry in found.entries] == [0.0, 1.0, 2.0]
    assert glass.compare(URL, URL).ok


@pytest.mark.parametrize("kind", ["link", "bytes", "large"])
def test_a_list_of_what_is_there_that_cannot_be_read_uploads_no_hollow_shard(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "_MOST_DONE_BYTES", 100)
    directory, there = tmp_path / "recording", tmp_path / "there"
    directory.mkdir()
    there.write_text("x\n", encoding="ascii")
    assert destination.uploaded(directory) == set()
    if kind == "link":
        (directory / destination.DONE).symlink_to(there)
    else:
        (directory / destination.DONE).write_bytes(b"\xff" if kind == "bytes" else bytes(101))
    with pytest.raises(CorruptError):
        destination.upload_rest(directory, TARGET, lambda function: function())
    assert objects.listed(URL) == []
