"""What is expected: the values are right whether a step goes like an earlier one or not."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glassengine.capture.intake import Intake
from glassengine.recording import background as worker
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.layout.layout import LightTable, Sharding
from glassengine.recording.layout.tensors import light, light_of_blocks
from glassengine.recording.reader import Recording
from glassengine.recording.ring import producer as repetition
from glassengine.recording.ring.producer import Producer, SeenTensors
from glassengine.recording.write import consumer
from glassengine.recording.write import consumer as drain
from glassengine.recording.write.policy import RecordingPolicy

RING = 1 << 20


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many tensors were, and were not, the ones that were expected."""
    counted: Counter[bool] = Counter()
    take = Producer.take_repeat

    def counting(self: Producer, site: str, step: int, tensor: torch.Tensor, rank: int) -> bool:
        found = take(self, site, step, tensor, rank)
        counted[found] += 1
        return found

    monkeypatch.setattr(Producer, "take_repeat", counting)
    return counted


def _check(path: Path, expected: dict[tuple[str, int], torch.Tensor]) -> Recording:
    opened = Recording.open(path)
    assert opened.complete, opened.incomplete_because
    assert {(entry.site, entry.step) for entry in opened.entries} == expected.keys()
    for entry in opened.entries:
        found = opened.tensor(entry)
        assert found.dtype == expected[entry.site, entry.step].dtype
        assert torch.equal(found, expected[entry.site, entry.step]), entry
    return opened


def test_steps_that_go_alike_are_expected(tmp_path: Path, again: Counter[bool]) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0)
    expected = {}
    for step in range(6):
        x = torch.full((4, 4), float(step))
        for site, tensor in {"a": x, "b:in[0]": x.view(16), "b": x + 1, "c": torch.arange(step, step + 3)}.items():
            intake.take(site, step, tensor)
            expected[site, step] = tensor.clone()
        intake.commit(step)
    writer.close()
    # Learned in the first: from the second step on all come as they did.
    assert again[True] == 5 * 4
    opened = _check(tmp_path / "r", expected)
    assert all(opened.entry("a", s).location == opened.entry("b:in[0]", s).location for s in range(6))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_and_kind(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "r"
    writer = BackgroundWriter(path, metadata={}, ring_bytes=data.draw(st.sampled_from([RING, 8 * RING])))
    intake = Intake(writer, RecordingPolicy(), 0)
    expected = {}
    size = data.draw(st.sampled_from([8, 20_000]))  # in a block, and by itself
    shared = torch.zeros(size)
    kinds = st.sampled_from(["fresh", "shared", "changed behind", "strided", "integers", "scalar", "empty", "longer"])
    usual = data.draw(st.lists(kinds, min_size=1, max_size=8))
    for step in range(data.draw(st.integers(3, 6))):
        order = list(enumerate(usual))
        if data.draw(st.integers(0, 3)) == 0:
            order = data.draw(st.permutations(order))
            order = order[: data.draw(st.integers(0, len(order)))]
        shared = shared + 1 if data.draw(st.booleans()) else shared
        for number, kind in order:
            if data.draw(st.integers(0, 9)) == 0:
                kind = data.draw(kinds)
            if kind == "changed behind":
                shared.data[3] = data.draw(st.integers(-5, 5))  # no counter and no address tells
            tensor = {
                "fresh": torch.full((size,), float(step * 10 + number)),
                "strided": torch.arange(2.0 * size)[::2] + step,
                "integers": torch.arange(size) + step,
                "scalar": torch.tensor(float(step)),
                "empty": torch.empty(0),
                "longer": torch.full((size + 1 + step,), float(number)),
            }.get(kind, shared)
            intake.take(f"s{number}", step, tensor)
            expected[f"s{number}", step] = tensor.clone()
        intake.commit(step)
    writer.close()
    _check(path, expected)


@pytest.mark.parametrize("values", [True, False])
def test_large_ones_are_expected_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: bool) -> None:
    looked: list[str] = []
    look = SeenTensors.look

    def counting(self: SeenTensors, site: str, *args: Any, **facts: Any) -> Any:
        looked.append(site)
        return look(self, site, *args, **facts)

    monkeypatch.setattr(SeenTensors, "look", counting)
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(values=values), 0)
    expected = {}
    for step in range(4):
        x = torch.full((200, 200), float(step))
        tensors = {"a": x, "b:in[0]": x, "c": x + 1, "d": x.half() if step == 2 else x}
        for site, tensor in tensors.items():
            if site == "c":
                x.data[3, 5] = 7  # no counter and no address tells
            intake.take(site, step, tensor)
            expected[site, step] = tensor.clone()
        intake.commit(step)
    writer.close()
    # The first one of each step, and what changed its type.
    assert looked == ["a", "b:in[0]", "c", "d", "a", "a", "d", "a", "d"]
    if values:
        opened = _check(tmp_path / "r", expected)
        assert all(opened.entry("a", s).location == opened.entry("b:in[0]", s).location for s in range(4))
        assert all(opened.entry("a", s).location != opened.entry("d", s).location for s in range(4))
    else:
        left_out = Recording.open(tmp_path / "r").left_out
        assert {(item.site, item.step): item.statistics for item in left_out} == {
            place: light(tensor) for place, tensor in expected.items()
        }


def test_what_is_equal_by_chance_once_is_proved_again(tmp_path: Path, again: Counter[bool]) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0)
    expected = {}
    x = torch.ones(8)
    for step in range(8):
        for site in ("a", "b", "c"):
            if step >= 5 and site == "b":
                x.data.add_(step)
            intake.take(site, step, x)
            expected[site, step] = x.clone()
        intake.commit(step)
    writer.close()
    assert again[True] and again[False]
    opened = _check(tmp_path / "r", expected)
    same = [opened.entry("a", s).location == opened.entry("b", s).location for s in range(8)]
    assert same == [True] * 5 + [False] * 3


@pytest.mark.parametrize("size", [8, 20_000])
def test_steps_that_change_are_learned_anew(tmp_path: Path, again: Counter[bool], size: int) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0)
    expected, found = {}, []
    for step in range(8):
        before = again[True]
        for number, site in enumerate("abcd"):
            tensor = torch.full((size + (site == "c" and step >= 3),), 10.0 * step + number)
            intake.take(site, step, tensor)
            expected[site, step] = tensor
        intake.commit(step)
        found.append(again[True] - before)
    writer.close()
    _check(tmp_path / "r", expected)
    assert found == [0, 4, 4, 2, 2, 4, 4, 4]


def test_parts_of_distributed_tensors_are_looked_at(tmp_path: Path, again: Counter[bool]) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    sharding = Sharding((8,), ("S(0)",), (2,), ("tp",), (0,))
    for step in range(4):
        for site, how in (("a", sharding), ("b", None), ("c", None)):
            tensor = torch.ones(4 if site == "a" else 20_000)
            writer.write(site, step, tensor, sharding=None if step == 3 else how)
        writer.commit(step)
    writer.close()
    entries = Recording.open(tmp_path / "r").entries
    assert [entry.step for entry in entries if entry.sharding is not None] == [0, 1, 2]
    assert again[True] and {entry.site for entry in entries if entry.sharding is not None} == {"a"}


def test_a_site_that_comes_twice_is_told_however_it_came(tmp_path: Path, again: Counter[bool]) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0)
    for step in range(4):
        for site in ("a", "b", "a"):
            intake.take(site, step, torch.full((4,), float(step)))
        intake.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert again[True] == 3 * 2 and opened.complete and len(opened.entries) == 8
    assert [item.reason for item in opened.left_out] == ["the step has another tensor of that name"] * 4


@pytest.mark.parametrize("values", [False, ["a"]])
def test_what_is_measured_is_expected_too(tmp_path: Path, again: Counter[bool], values: bool | list[str]) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(values=values), 0)
    for step in range(5):
        x = torch.full((6,), float(step))
        for site, tensor in {"a": x, "b": x, "c": x.view(torch.int32), "d": x + 1}.items():
            intake.take(site, step, tensor)
        intake.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert again[True] >= 9 and opened.complete
    assert {entry.site for entry in opened.entries} == (set() if values is False else {"a"})
    for item in opened.left_out:
        assert item.statistics is not None
        wanted = item.step + 1.0 if item.site == "d" else float(item.step)
        if item.site == "c":
            wanted = float(torch.tensor(wanted).view(torch.int32))
        assert item.statistics.min == wanted, item


def test_threads_that_share_a_step(tmp_path: Path, again: Counter[bool]) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0)
    expected = {
        (f"t{t}.s{n}", s): torch.full((5,), t * 100.0 + n + s) for t in range(3) for n in range(9) for s in range(20)
    }

    def deliver(own: int, step: int) -> None:
        for number in range(9):
            intake.take(f"t{own}.s{number}", step, expected[f"t{own}.s{number}", step])

    for step in range(20):
        threads = [threading.Thread(target=deliver, args=(own, step)) for own in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        intake.commit(step)
    writer.close()
    _check(tmp_path / "r", expected)
    assert again[True]


def test_steps_that_are_open_side_by_side(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0)
    expected = {}
    for pair in range(0, 12, 2):
        for site in ("a", "b", "c"):
            for step in (pair, pair + 1):
                expected[site, step] = torch.full((3,), float(step))
                intake.take(site, step, expected[site, step])
        intake.commit(pair + 1)
        intake.commit(pair)
    writer.close()
    _check(tmp_path / "r", expected)


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_copy_that_is_interrupted_loses_one_tensor(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    writer = BackgroundWriter(tmp_path / "r", metadata={})
    intake = Intake(writer, RecordingPolicy(), 0)
    expected = {}
    move = repetition.MEMMOVE

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    for step in range(5):
        for site in ("a", "b", "c"):
            tensor = torch.full((4,), float(step))
            if (site, step) == (lost, 3):
                monkeypatch.setattr(repetition, "MEMMOVE", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    intake.take(site, step, tensor)
                monkeypatch.setattr(repetition, "MEMMOVE", move)
                continue
            expected[site, step] = tensor
            intake.take(site, step, tensor)
        intake.commit(step)
    writer.close()
    _check(tmp_path / "r", expected)
    # Nothing of ours failed on the way, to be made good by the long way.
    assert "takes the long way" not in caplog.text


def test_blocks_that_are_full(tmp_path: Path, again: Counter[bool]) -> None:
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)  # a block takes 128 KiB
    intake = Intake(writer, RecordingPolicy(), 0)
    expected = {}
    for step in range(5):
        for number in range(20):
            expected[f"s{number}", step] = torch.full((5000,), step * 20.0 + number)
            intake.take(f"s{number}", step, expected[f"s{number}", step])
        intake.commit(step)
    writer.close()
    assert again[True] >= 40
    _check(tmp_path / "r", expected)


def test_steps_that_go_alike_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counting(data: memoryview, count: int, *rest: Any) -> list[LightTable]:
        counts.append(count)
        return light_of_blocks(data, count, *rest)

    monkeypatch.setattr(drain, "light_of_blocks", counting)
    monkeypatch.setattr(worker, "_PERIOD_S", 1e9)
    monkeypatch.setattr(consumer, "_LOOK_S", 0.3)
    # Small enough that slots go around its end several times.
    writer = BackgroundWriter(tmp_path / "r", metadata={}, ring_bytes=RING)
    intake = Intake(writer, RecordingPolicy(values=False), 0)
    expected: dict[tuple[str, int], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for step in range(120):
        x = torch.randn(700, generator=generator)
        if step % 7 == 3:
            x[step] = float("nan")
        if step == 60:
            intake.take("only here", step, x)
            expected["only here", step] = x
        for site, tensor in {"a": x, "a again": x, "b": (x > 0), "c": x.bfloat16(), "d": (x * 1e-30).double()}.items():
            intake.take(site, step, tensor)
            expected[site, step] = tensor.clone()
        intake.commit(step)
    writer.close()
    opened = Recording.open(tmp_path / "r")
    assert opened.complete and {(item.site, item.step) for item in opened.left_out} == expected.keys()
    for item in opened.left_out:
        wanted = light(expected[item.site, item.step])
        assert item.statistics is not None and item.statistics.num_nonfinite == wanted.num_nonfinite, item
        assert (item.statistics.min, item.statistics.max) == (wanted.min, wanted.max), item
        assert item.statistics.norm == pytest.approx(wanted.norm, rel=1e-5), item
    # What came before the usual ones is a block of its own.
    assert max(counts) > 3 and sum(counts) == 120 + 1
