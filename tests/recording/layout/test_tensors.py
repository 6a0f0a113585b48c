"""Light statistics of single tensors against their definition, at the sizes where the way they are taken changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from glassengine import blocks
from glassengine.recording.layout import layout
from glassengine.recording.layout.records import frame
from glassengine.recording.layout.tensors import _MAX_SAMPLED, LENGTH, NUM_QUANTILES, Sketch, light, sketch
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter

SIZES = [0, 1, 2, 100, 8191, 8193, 1 << 17, (1 << 17) + 1, 400_001]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_light_statistics_are_those_of_float64(size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
    # The extremes in the last element and the one before: none may be forgotten.
    x[-2:] = torch.tensor([-1000.0, 2000.0])[-size:].to(dtype) if size else x[-2:]
    found, wide = light(x), x.double()
    assert found.num_nonfinite == 0
    assert (found.min, found.max) == ((float(wide.min()), float(wide.max())) if size else (None, None))
    assert found.norm == pytest.approx(float(wide.norm()), rel=1e-3 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 2])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_not_finite_are_counted_and_left_out(size: int, value: float) -> None:
    x = torch.arange(size, dtype=torch.float32)
    x[-1] = x[0] = value
    found, rest = light(x), x[1:-1].double()
    assert (found.min, found.max, found.num_nonfinite) == (float(rest.min()), float(rest.max()), 2)
    assert found.norm == pytest.approx(float(rest.norm()), rel=1e-5)


def test_squares_that_are_too_large_for_the_dtype() -> None:
    found = light(torch.full((20_000,), 3e38))
    assert found.norm == pytest.approx(3e38 * 20_000**0.5) and found.num_nonfinite == 0


def distance(a: Sketch, b: Sketch) -> float:
    return float(np.linalg.norm(np.subtract(a.projection, b.projection)))


def test_the_numbers_are_those_of_every_machine() -> None:
    found = sketch(torch.arange(1, 101))
    assert found.num_sampled == 100
    assert found.quantiles[:3] == (1.0, 4.0, 7.0) and found.quantiles[-2:] == (96.0, 100.0)
    assert found.projection[:4] == (-168.0, 200.0, 0.0, -246.0) and len(found.projection) == LENGTH


def test_strides_and_blocks_make_no_difference() -> None:
    x = torch.randn(3, 2 * blocks.BLOCK_ELEMENTS + 77, generator=torch.Generator().manual_seed(0))
    whole, strided = sketch(x), sketch(x.t().contiguous().t())
    assert whole.quantiles == strided.quantiles and whole.num_sampled == strided.num_sampled
    assert whole.projection == pytest.approx(strided.projection, rel=1e-9, abs=1e-9)
    # The sum over the pieces is that of the whole: pieces know where they begin.
    halves = [torch.where(torch.arange(x.numel()).view(x.shape) < 100_000, keep, x - keep) for keep in (x, 0 * x)]
    first, second = (np.array(sketch(half).projection) for half in halves)
    assert (first + second).tolist() == pytest.approx(list(whole.projection), rel=1e-9, abs=1e-9)


def test_projections_estimate_how_far_tensors_are_apart() -> None:
    torch.manual_seed(0)
    ratios = []
    for _ in range(50):
        x = torch.randn(4096, dtype=torch.float64)
        y = x + 0.01 * torch.randn_like(x)
        ratios.append((distance(sketch(x), sketch(y)) / float((x - y).norm())) ** 2)
    assert 0.8 < float(np.mean(ratios)) < 1.2 and min(ratios) > 0.3
    y = x.clone()
    y[1234] += 0.5
    assert distance(sketch(x), sketch(y)) == pytest.approx(0.5)


def test_quantiles_ignore_the_order_and_projections_do_not() -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    assert sketch(x.t()).quantiles == sketch(x).quantiles
    assert distance(sketch(x.t()), sketch(x)) > 1
    assert sketch(x * 1.01).quantiles != sketch(x).quantiles


def test_a_large_tensor_is_sampled() -> None:
    x = torch.arange(4 * _MAX_SAMPLED + 3, dtype=torch.float32)
    found = sketch(x)
    assert 0.75 * _MAX_SAMPLED < found.num_sampled <= _MAX_SAMPLED
    expected = np.linspace(0, x.numel() - 1, NUM_QUANTILES)
    assert found.quantiles == pytest.approx(expected.tolist(), abs=x.numel() * 1e-4)


@pytest.mark.parametrize(
    ("tensor", "quantiles", "num_sampled"),
    [
        (torch.zeros(0, 3), (), 0),
        (torch.tensor([float("nan"), float("inf")]), (), 0),
        (torch.tensor([float("nan"), 2.0]), (2.0,) * NUM_QUANTILES, 1),
        (torch.tensor(3 + 4j), (5.0,) * NUM_QUANTILES, 1),
        (torch.tensor([True]), (1.0,) * NUM_QUANTILES, 1),
        (torch.full((999,), 1.7e308, dtype=torch.float64), (1.7e308,) * NUM_QUANTILES, 999),
    ],
)
def test_odd_tensors(tensor: torch.Tensor, quantiles: tuple[float, ...], num_sampled: int) -> None:
    found = sketch(tensor)
    assert (found.quantiles, found.num_sampled) == (quantiles, num_sampled)
    assert np.isfinite(found.projection).all()


def test_a_sketch_is_kept_for_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as writer:
        writer.write("x", 0, torch.randn(10))
        writer.write("empty", 0, torch.randn(0))
        writer.commit(0)
    opened = Recording.open(tmp_path / "r")
    first = [opened.sketch(entry) for entry in opened.entries]
    summaries = [opened.summary(entry) for entry in opened.entries]

    def planted(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("glassengine.recording.layout.tensors.sketch", planted)
    monkeypatch.setattr("glassengine.recording.layout.tensors.summarize", planted)
    again = Recording.open(tmp_path / "r")
    assert [again.sketch(entry) for entry in again.entries] == first
    assert [again.summary(entry) for entry in again.entries] == summaries


@pytest.mark.parametrize(
    "change",
    [{"quantiles": [1.0]}, {"quantiles": 3}, {"projection": []}, {"projection": ["x"] * LENGTH}, {"num_sampled": "1"}],
)
def test_hostile_sketches_are_computed_again(tmp_path: Path, change: dict[str, object]) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as writer:
        writer.write("x", 0, torch.ones(1))
        writer.commit(0)
    (entry,) = Recording.open(tmp_path / "r").entries
    assert entry.location is not None
    key = [entry.location.shard, entry.location.offset, entry.location.checksum, entry.describe()]
    good = {"key": key, "quantiles": [7.0] * NUM_QUANTILES, "projection": [7.0] * LENGTH, "num_sampled": 1}
    (tmp_path / "r" / layout.STATISTICS).write_bytes(frame(good))
    assert Recording.open(tmp_path / "r").sketch(entry).quantiles[0] == 7.0
    (tmp_path / "r" / layout.STATISTICS).write_bytes(frame({**good, **change}))
    assert Recording.open(tmp_path / "r").sketch(entry).quantiles[0] == 1.0
