"""Numbers reach trackers; what a tracker raises reaches the recording's metadata and never the model."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import glassengine as glass
from glassengine.errors import GlassError

Numbers = list[tuple[int, dict[str, float]]]


def run(path: Path, *trackers: Any, count: int = 6) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    with glass.record(model, path, watch=glass.Watch(trackers=trackers, tracker_every=2)) as recorder:
        for step in range(count):
            model(torch.ones(1, 3)).sum().backward()
            recorder.number("lr", 0.5**step)
    found: dict[str, Any] = glass.Recording.open(path).metadata["watch"]
    return found


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    run(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("lr")] == [(0, 1.0), (2, 0.25), (4, 0.0625)]
    assert "in[0]/(model)" in events.Tags()["scalars"] and "loss" in events.Tags()["scalars"]


def test_a_tracker_that_raises_ends_alone(tmp_path: Path) -> None:
    found: Numbers = []

    def broken(step: int, numbers: Mapping[str, float]) -> None:
        raise OSError("the network is away")

    problems = run(tmp_path / "run", broken, lambda step, numbers: found.append((step, dict(numbers))))["trackers"]
    assert problems == {"broken": "OSError: the network is away"}
    assert [step for step, _ in found] == [0, 2, 4] and found[1][1]["lr"] == 0.25


def test_packages_get_what_their_functions_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run_of_user = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run_of_user))
    mlflow = types.SimpleNamespace(
        active_run=lambda: types.SimpleNamespace(info=types.SimpleNamespace(run_id="r")),
        log_metrics=lambda metrics, **options: logged.append((metrics, options["step"], options["run_id"])),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run(tmp_path / "run", "wandb", "mlflow", count=1)
    assert logged[0]["glass/step"] == 0 and logged[0]["glass/lr"] == 1.0
    assert logged[1][0]["glass/in_0_/_model_"] > 0 and logged[1][1:] == (0, "r")


def test_a_package_that_is_missing_or_cannot_begin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(GlassError, match="not installed"):
        run(tmp_path / "one", "wandb")

    def fails() -> None:
        raise RuntimeError("no server")

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(active_run=fails))
    with pytest.raises(GlassError, match="mlflow cannot begin"):
        run(tmp_path / "two", "mlflow")
