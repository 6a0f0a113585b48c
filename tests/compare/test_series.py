"""Where the series of two runs part: a planted change is found at its step, other seeds and rounding are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from glassengine.compare.series import compare_series
from glassengine.errors import IncomparableError, UsageError
from glassengine.recording.series import MEASURED, NONFINITE, SeriesLog, SeriesReader

Curve = Callable[[int], float]


def write(path: Path, steps: int, curves: dict[str, Curve], first: int = 0) -> Path:
    path.mkdir()
    log = SeriesLog(path)
    for name in curves:
        log.column(name, "number" if name == "loss" else "norm")
    for step in range(first, steps):
        values = np.array([curve(step) for curve in curves.values()], dtype=np.float32)
        states = np.where(np.isfinite(values), MEASURED, NONFINITE).astype(np.uint8)
        bad = [(int(at), -1, 0.0) for at in np.flatnonzero(states == NONFINITE)]
        log.row(step, 0.0, states, np.nan_to_num(values), bad)
    log.close()
    return path


def noisy(seed: int, factor: float = 1.0, since: int = 0) -> Curve:
    rng = np.random.default_rng(seed)
    draws = np.exp(rng.normal(0, 0.05, 5000))
    return lambda step: float((factor if step >= since else 1.0) * (1 + 5 * 0.99**step) * draws[step])


def test_other_seeds_are_within_the_variation_and_a_jump_is_found(tmp_path: Path) -> None:
    names = [f"layer{number}" for number in range(20)]
    one = write(tmp_path / "one", 2000, {name: noisy(at) for at, name in enumerate(names)})
    other = write(tmp_path / "other", 2000, {name: noisy(100 + at) for at, name in enumerate(names)})
    result = compare_series(one, other)
    assert result.ok and result.standing == "within the variation", result.first_parting
    assert result.first_difference is not None and result.first_difference.step == 0
    broken = {name: noisy(100 + at, 4.0 if at >= 7 else 1.0, 1234) for at, name in enumerate(names)}
    result = compare_series(one, write(tmp_path / "broken", 2000, broken))
    assert not result.ok and result.num_apart == 13
    assert result.first_parting is not None
    assert (result.first_parting.step, result.first_parting.site) == (1234, "layer7")


def test_equal_runs_are_the_same_and_the_first_difference_is_named(tmp_path: Path) -> None:
    one = write(tmp_path / "one", 300, {"a": noisy(1), "loss": lambda step: -1.0 / (step + 1)})
    assert compare_series(one, one).standing == "same"
    changed = {"a": noisy(1, 1.0001, 77), "loss": lambda step: -1.0 / (step + 1)}
    result = compare_series(one, write(tmp_path / "other", 300, changed))
    assert result.ok and result.first_difference is not None
    assert (result.first_difference.step, result.first_difference.site) == (77, "a")


def test_values_not_finite_on_one_side_part_the_series_at_once(tmp_path: Path) -> None:
    one = write(tmp_path / "one", 50, {"a": noisy(1)})
    bad = write(tmp_path / "bad", 50, {"a": lambda step: float("nan") if step == 3 else noisy(1)(step)})
    result = compare_series(one, bad)
    assert not result.ok and result.first_parting is not None and result.first_parting.step == 3
    assert result.first_parting.candidate is None
    assert compare_series(bad, bad).standing == "same"


def test_few_steps_are_uncalibrated_and_none_is_an_error(tmp_path: Path) -> None:
    one, other = (write(tmp_path / str(seed), 10, {"a": noisy(seed)}) for seed in (1, 2))
    result = compare_series(one, other)
    assert not result.ok and result.standing == "uncalibrated"
    with pytest.raises(IncomparableError, match="nothing in common"):
        compare_series(one, write(tmp_path / "late", 30, {"a": noisy(1)}, first=20))
    with pytest.raises(UsageError, match="no series"):
        compare_series(one, tmp_path / "nowhere")


def test_series_that_end_early_are_read_up_to_there(tmp_path: Path) -> None:
    one = write(tmp_path / "one", 60, {"a": noisy(1), "b": noisy(2)})
    file = one / "series.log"
    whole = file.read_bytes()
    for data, damage in (
        (whole[:-3], "ends inside"),
        (whole[:-3] + b"xyz", "checksum"),
        (whole + b"\xff" * 9, "claims"),
    ):
        file.write_bytes(data)
        reader = SeriesReader(one)
        assert len(list(reader.rows())) == (60 if "claims" in damage else 59)
        assert reader.damage is not None and damage in reader.damage
    result = compare_series(one, one)
    assert any("end early" in note for note in result.notes)
