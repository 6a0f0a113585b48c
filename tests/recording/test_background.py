"""The thread that writes: memory is bounded, bytes are right, whatever the sizes and however slow the disk."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from glassengine.errors import GlassError, UsageError
from glassengine.recording import background as worker
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.layout import records
from glassengine.recording.layout.index import read_index
from glassengine.recording.layout.layout import ALIGNMENT, LeftOut, LightStatistics
from glassengine.recording.reader import Recording
from glassengine.recording.ring import producer as repetition
from glassengine.recording.ring import ring as pinned
from glassengine.recording.ring.ring import Ring
from glassengine.recording.write import shard
from glassengine.recording.write.consumer import Consumer

RING = 1 << 20


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sizes_in_any_order(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "r"
    writer = BackgroundWriter(path, metadata={}, ring_bytes=RING)
    written: dict[tuple[str, int], torch.Tensor] = {}
    sizes = st.sampled_from([0, 1, 3, 16, 17, 1000, 16_384, 20_000, 70_000, 300_000])
    for step in range(data.draw(st.integers(1, 4))):
        for number in range(data.draw(st.integers(0, 12))):
            tensor = torch.full((data.draw(sizes),), step * 1000.0 + data.draw(st.integers(0, 5)))
            if data.draw(st.booleans()) and tensor.numel() > 1:
                tensor = tensor[::2]
            written[f"s{number}", step] = tensor
            writer.write(f"s{number}", step, tensor)
        writer.commit(step)
    writer.close()
    opened = Recording.open(path)
    assert opened.complete and len(opened.entries) == len(written)
    for entry in opened.entries:
        assert torch.equal(opened.tensor(entry), written[entry.site, entry.step])


def test_a_large_tensor_behind_a_ring_that_is_nearly_full(tmp_path: Path) -> None:
    written = {f"s{number}": torch.full((16_384 * (4 - number // 3),), float(number)) for number in range(4)}
    written["large"] = torch.arange(150_000.0)

    def record() -> None:
        writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
        for site, tensor in written.items():
            writer.write(site, 0, tensor)
        writer.commit(0)
        writer.close()

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the model and the thread that writes wait for one another"
    opened = Recording.open(tmp_path / "r")
    assert {entry.site for entry in opened.entries} == set(written)
    assert all(torch.equal(opened.tensor(entry), written[entry.site]) for entry in opened.entries)


def test_equal_bytes_of_a_step_are_stored_once(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    x = torch.randn(40_000)
    for step in range(2):
        writer.write("out", step, x)
        writer.write("in", step, x.view(200, 200))
        writer.write("other", step, x + 1)
        writer.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    places = {(entry.site, entry.step): entry.location for entry in opened.entries}
    assert places["out", 0] == places["in", 0] != places["other", 0] and places["out", 0] != places["out", 1]
    assert torch.equal(opened.tensor("in", 1), x.view(200, 200))


def test_equal_bytes_within_a_block_are_stored_once(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    expected = {}
    x = torch.randn(30, 4)
    for step in range(20):
        x += 1
        y = x * 2
        sites = {"out": x, "in": x.view(-1), "y": y, "bits": x.view(torch.int32), "part": x[:15], "again": x}
        for site, tensor in sites.items():
            writer.write(site, step, tensor)
            expected[site, step] = tensor.clone()
        # Behind the version counter's back, and no address or size differs.
        x.data[-1, -1] = -step
        writer.write("changed", step, x)
        expected["changed", step] = x.clone()
        writer.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and len(opened.entries) == len(expected)
    for entry in opened.entries:
        assert torch.equal(opened.tensor(entry), expected[entry.site, entry.step]), entry
    places = {site: opened.entry(site, 7).location for site in (*sites, "changed")}
    assert places["out"] == places["in"] == places["bits"]
    assert len({str(places[site]) for site in ("out", "y", "part", "changed")}) == 4
    # One description for all steps, and any reader of safetensors finds the names.
    assert (tmp_path / "r" / "index.log").read_bytes().count(b'"kind":"group"') == 1
    (shard_file,) = (tmp_path / "r").glob("*.safetensors")
    with safe_open(shard_file, "pt") as file:
        aliases = json.loads(file.metadata()["aliases"])
        assert torch.equal(file.get_tensor(aliases["step3/rank0/in"]["of"]).view(-1), expected["in", 3])
        assert aliases["step3/rank0/bits"]["dtype"] == "I32" and aliases["step3/rank0/in"]["file"] == shard_file.name


def test_blocks_are_described_once_and_verified_as_a_whole(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    for step in range(50):
        for number in range(40):
            writer.write(f"site{number}", step, torch.full((number + 1,), step + number))
        writer.commit(step)
    writer.close()
    assert (tmp_path / "r" / "index.log").stat().st_size < 25_000
    opened = Recording.open(tmp_path / "r")
    assert len(opened.entries) == 2000
    assert all(float(opened.tensor(entry)[0]) == entry.step + int(entry.site[4:]) for entry in opened.entries)
    file = tmp_path / "r" / "shard-00000.safetensors"
    location = opened.entry("site7", 3).location
    assert location is not None and location.block is not None
    damaged = bytearray(file.read_bytes())
    damaged[8 + int.from_bytes(damaged[:8], "little") + location.offset] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(GlassError, match="checksum does not match"):
        Recording.open(tmp_path / "r").tensor("site7", 3)


def test_shapes_that_never_repeat_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_MAX_SEEN", 10)
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    for step in range(600):
        writer.write("grows", step, torch.full((step + 1,), step))
        writer.write("stays", step, torch.tensor(step))
        assert max(len(writer._seen.all), len(writer._seen.last)) <= 10
        writer.commit(step)
    writer.close()
    groups = writer._writer._groups
    assert len(groups._groups) <= 256 and len(groups._alone) <= 1 << 14
    opened = Recording.open(tmp_path / "r")
    assert all(int(opened.tensor(entry).max()) == entry.step for entry in opened.entries)


def test_a_slow_disk_slows_the_model_and_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all = shard.write_all

    def slow(file: Any, buffers: Any) -> None:
        time.sleep(0.02)
        write_all(file, buffers)

    monkeypatch.setattr(shard, "write_all", slow)
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    start = time.perf_counter()
    most = 0
    for step in range(10):
        for number in range(4):
            writer.write(f"s{number}", step, torch.full((30_000 + number,), float(step)))
            most = max(most, writer._ring.in_use)
        writer.commit(step)
    assert most <= RING
    assert time.perf_counter() - start > 0.05
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and all(float(opened.tensor(entry)[-1]) == entry.step for entry in opened.entries)


def test_a_thread_that_has_died_does_not_hang_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Consumer, "work", lambda self: None)
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    with pytest.raises(GlassError, match="its thread has ended"):
        for step in range(10):
            writer.write("x", step, torch.zeros(60_000))
    with pytest.raises(GlassError, match="its thread has ended"):
        writer.close()
    assert Recording.open(tmp_path / "r").incomplete_because == "its thread has ended"


def test_a_bug_in_the_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Consumer, "_put_stored", planted)
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    for step in range(100):
        writer.write("x", step, torch.zeros(60_000))
        writer.commit(step)
    with pytest.raises(ZeroDivisionError, match="planted"):
        writer.close()
    opened = Recording.open(tmp_path / "r")
    assert not opened.complete and opened.incomplete_because == "stopped by ZeroDivisionError"


def test_a_copy_that_is_interrupted_loses_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    writer.write("before", 0, torch.ones(10))
    fill_from, num_calls = Ring.fill_from, 0

    def interrupted(self: Ring, position: int, tensor: torch.Tensor, num_bytes: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        fill_from(self, position, tensor, num_bytes)

    monkeypatch.setattr(Ring, "fill_from", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.write("large", 0, torch.ones(300_000))
    monkeypatch.undo()
    writer.write("after", 0, torch.full((300_000,), 2.0))
    writer.commit(0)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and opened.sites() == ["before", "after"]
    assert torch.equal(opened.tensor("after"), torch.full((300_000,), 2.0))
    from safetensors.torch import load_file

    (file,) = (tmp_path / "r").glob("shard-*.safetensors")
    assert torch.equal(load_file(file)["step0/rank0/after"], opened.tensor("after"))


def test_many_threads(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)

    def work(step: int) -> None:
        for number in range(60):
            size = (10, 20_000, 300_000)[number % 3] if number < 6 else 10
            writer.write(f"s{number}", step, torch.full((size,), step * 100 + number))

    threads = [threading.Thread(target=work, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in range(4):
        writer.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and len(opened.entries) == 240
    for entry in opened.entries:
        tensor = opened.tensor(entry)
        assert torch.equal(tensor, torch.full_like(tensor, entry.step * 100 + int(entry.site[1:])))


class Copying:
    """Stands for an accelerator: its copies are done when somebody waits for them."""

    def __init__(self) -> None:
        self.num_waits = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self, device: torch.device) -> Copying:
        return self

    def synchronize(self) -> None:
        self.num_waits += 1


def test_copies_from_an_accelerator_are_waited_for_by_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Remote(torch.Tensor):
        is_cpu = False

    device = Copying()
    monkeypatch.setattr(pinned, "_allocate", device.allocate)
    monkeypatch.setattr(pinned, "_event", device.event)
    monkeypatch.setattr(pinned.PinnedCopies, "takes", staticmethod(lambda tensor: isinstance(tensor, Remote)))
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    x = torch.randn(500, 300)
    for step in range(6):
        writer.write("x", step, (x + step).as_subclass(Remote))
        writer.write("y", step, (x.t() * step).as_subclass(Remote))
        writer.commit(step)
    writer.close()
    assert device.num_waits == 12 and writer._pinned._in_flight == 0
    opened = Recording.open(tmp_path / "r")
    assert opened.complete
    for step in range(6):
        assert torch.equal(opened.tensor("x", step), x + step) and torch.equal(opened.tensor("y", step), x.t() * step)


@pytest.mark.cuda
def test_copies_from_a_gpu(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    x = torch.randn(2000, 300, device="cuda")
    expected = []
    for step in range(4):
        writer.write("x", step, x)
        writer.write("t", step, x.t())
        expected.append(x.cpu())
        x.mul_(2)
        writer.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    for step, tensor in enumerate(expected):
        assert torch.equal(opened.tensor("x", step), tensor) and torch.equal(opened.tensor("t", step), tensor.t())


def test_what_is_left_out_comes_back(tmp_path: Path) -> None:
    item = LeftOut("x", 0, 3, "planted", "float32", (2, 3), LightStatistics(-1.0, 2.0, 3.0, 4))
    bare = LeftOut("y", 0, 0, "planted")
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    for given_item in (item, bare):
        writer.leave_out(given_item)
    writer.commit(0, stopped="a planted reason")
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert opened.left_out == (item, bare) and opened.stopped == {0: "a planted reason"}
    assert opened.incomplete_because == "step 0 was stopped by a planted reason"


def test_what_cannot_be_recorded_is_refused_at_once(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    writer.write("x", 0, torch.eye(3))
    with pytest.raises(UsageError, match="sparse"):
        writer.write("x", 0, torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match="a longer name"):
        writer.write("x" * 20_000, 0, torch.eye(3))
    writer.commit(0)
    writer.close()
    assert Recording.open(tmp_path / "r").sites() == ["x"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * ALIGNMENT), st.integers(0, 4)), max_size=60))
def test_slots_of_the_ring_never_overlap(requests: list[tuple[int, int]]) -> None:
    ring = Ring(8 * ALIGNMENT)
    live: list[tuple[int, int]] = []

    def release() -> None:
        position, size = live.pop(0)
        ring.release(position + size)

    for size, num_released in requests:
        position = ring.reserve(size, release)
        start = position % ring.num_bytes
        assert start % ALIGNMENT == 0 and start + size <= ring.num_bytes
        for other, length in live:
            begin = other % ring.num_bytes
            assert start + size <= begin or begin + length <= start
        live.append((position, size))
        for _ in range(min(num_released, len(live))):
            release()
    assert ring.in_use >= sum(size for _, size in live)


def test_the_ring_starts_over_when_it_is_empty() -> None:
    ring = Ring(1 << 16)
    for _ in range(100):
        position = ring.reserve(1000, pytest.fail)
        assert position % ring.num_bytes == 0
        ring.release(position + 1000)
    assert worker.RING_BYTES >= 1 << 26


def test_statistics_of_a_block_are_those_of_each_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "float32": torch.randn(3, 5),
        "bfloat16": torch.randn(101).bfloat16(),
        "float16": torch.randn(33).half(),
        "int64": torch.tensor([-7, 3, 900]),
        "bool": torch.tensor([True, False, True]),
        "not finite": torch.tensor([1.0, float("nan"), -2.0, float("inf")]),
        "nothing finite": torch.full((2,), float("nan")).half(),
        "overflows": torch.tensor([-3e200, 4e200], dtype=torch.float64),
        "below float32's squares": torch.full((9,), 1e-30),
        "zeros": torch.zeros(5),
        "large": torch.randn(1 << 16),
        "large, strided": torch.randn(300, 200).T,
        "large bfloat16": torch.randn(1 << 16).bfloat16(),
        "large bool": torch.randn(1 << 16) > 0,
        "large, not finite": torch.randn(1 << 15).index_fill(0, torch.tensor([5]), float("nan")),
        "last": torch.randn(7).to(torch.float64),
    }
    # At the address of the one before, and of another dtype.
    tensors |= {f"{site}, bits": tensors[site].view(torch.int16) for site in ("bfloat16", "large bfloat16")}
    tensors = {site: tensors[site] for site in sorted(tensors)}
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    for step in range(3):
        for site, tensor in tensors.items():
            assert writer.measure(site, step, tensor, rank=0, reason="because")
            assert writer.measure(f"{site} again", step, tensor, rank=0, reason="because")
        assert not writer.measure("complex", step, torch.zeros(5, dtype=torch.complex64), rank=0, reason="because")
        writer.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert len(opened.left_out) == 6 * len(tensors)
    for item in opened.left_out:
        tensor, found = tensors[item.site.removesuffix(" again")], item.statistics
        assert found is not None and item.reason == "because" and item.shape == tuple(tensor.shape)
        finite = tensor.double()[tensor.double().isfinite()]
        assert found.num_nonfinite == tensor.numel() - finite.numel()
        assert found.min == (float(finite.min()) if len(finite) else None)
        assert found.max == (float(finite.max()) if len(finite) else None)
        scale = float(finite.abs().max() if len(finite) else 0.0) or 1.0
        assert found.norm == pytest.approx(scale * float((finite / scale).norm()), rel=1e-6)


def _rows(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"group": 1},
        {"step": -1},
        {"reason": 3},
        {"rows": 3},
        {"rows": "?"},
        {"rows": ""},
        {"rows": _rows(0.0, 1.0)},
        {"rows": _rows(0.0, 1.0, 1.0, 1.0)},
        {"rows": _rows(0.0, 1.0, -1.0)},
        {"rows": _rows(0.0, 1.0, math.nan)},
        {"rows": _rows(0.0, math.inf, 1.0)},
        {"rows": _rows(math.nan, 1.0, 1.0)},
        {"num_nonfinite": None},
        {"num_nonfinite": [[0]]},
        {"num_nonfinite": [[1, 1]]},
        {"num_nonfinite": [[0, -1]]},
        {"num_nonfinite": [["0", 1]]},
    ],
)
def test_statistics_of_a_block_are_not_trusted(change: dict[str, Any]) -> None:
    tensor = {"site": "a", "dtype": "float32", "shape": [2], "axes": {}, "node": None, "nbytes": 8}
    group = {"kind": "group", "group": 0, "rank": 0, "tensors": [tensor]}
    measured = {"kind": "measured", "group": 0, "step": 2, "reason": "because", "num_nonfinite": [[0, 1]]}
    measured["rows"] = _rows(0.0, 1.0, 1.0)
    commit = records.commit_frame(2, 0, 1, None)
    good = read_index(io.BytesIO(records.frame(group) + records.frame(measured) + commit), {})
    assert good.left_out[0].statistics == LightStatistics(0.0, 1.0, 1.0, 1) and good.damage is None
    bad = read_index(io.BytesIO(records.frame(group) + records.frame({**measured, **change}) + commit), {})
    assert bad.damage and not bad.steps and not bad.left_out
