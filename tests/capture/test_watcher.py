"""A watched run: which steps are recorded, that their values are those of then, and what it says of all others."""

from __future__ import annotations

import logging
import signal
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import glassengine as glass
from glassengine.errors import GlassError
from glassengine.recording.series import SeriesReader
from glassengine.recording.write.policy import Watch
from tests import children

Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Net(nn.Module):
    """Layers of which one writes to what another has made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = batch(step)
    if step == 20:
        x[1, 2] = torch.nan
    optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def kept_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gradients are memory that is used again, and two backwards add to it."""
    x = batch(step)
    if step == 20:
        x[1, 2] = torch.inf
    loss = model(x).square().mean()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    model(batch(step + 1000)).square().mean().backward()
    optimizer.step()


def train(directory: Path, step: Step, count: int = 24, **options: Any) -> glass.Recording:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with glass.record(model, directory, gradients=True, optimizer=optimizer, **options):
        for number in range(count):
            step(model, optimizer, number)
    return glass.Recording.open(directory)


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one, 7.0), torch.nan_to_num(other, 7.0))


@pytest.mark.parametrize(("step", "bad"), [(ordinary, 20), (kept_gradients, 40)])
def test_values_are_those_of_a_full_recording(step: Step, bad: int, tmp_path: Path) -> None:
    full = train(tmp_path / "full", step)
    watched = train(tmp_path / "watched", step, watch=Watch(before=2))
    assert watched.steps == [bad - 2, bad - 1, bad] and watched.complete
    for number in watched.steps:
        wanted = {entry.site: entry for entry in full.entries if entry.step == number}
        found = {entry.site: entry for entry in watched.entries if entry.step == number}
        lost = {item.site for item in watched.left_out if item.step == number}
        assert found.keys() | lost == wanted.keys() and not found.keys() & lost
        assert not lost, lost
        for site, entry in found.items():
            assert equal(watched.tensor(entry), full.tensor(wanted[site])), (number, site)
    assert watched.metadata["watch"]["events"][0]["step"] == bad


def test_a_write_that_is_not_counted_costs_the_value_and_never_gives_another(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            seen.append(y)
            return y

    model = nn.Sequential(Keeps(), nn.Tanh())
    with glass.record(model, tmp_path / "run", watch=Watch(every=1000, before=0)) as recorder:
        for number in range(10):
            model(batch(number))
            if number == 8:
                seen[-1].data.add_(1.0)
            if number == 9:
                seen[-1].add_(1.0)
        recorder._watcher._outside._signals = 1  # type: ignore[union-attr]
    recording = glass.Recording.open(tmp_path / "run")
    (item,) = [item for item in recording.left_out if item.site == "0"]
    assert item.step == 9 and "written to" in item.reason
    assert "0" not in recording.sites(9) and "1" in recording.sites(9)
    # Uncounted: found by its norm.
    with glass.record(model, tmp_path / "other", watch=Watch(before=0)) as recorder:
        for number in range(10):
            model(batch(number))
        seen[-1].data.add_(1.0)
        recorder._watcher._outside._signals = 1  # type: ignore[union-attr]
    lost = glass.Recording.open(tmp_path / "other").left_out
    assert {item.site for item in lost} == {"0", "1:in[0]"}
    assert all("unnoticed" in item.reason for item in lost)


def test_tensors_that_do_not_fit_the_memory_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    recording = train(tmp_path / "run", ordinary, watch=Watch(ring_bytes=6000))
    everything = train(tmp_path / "full", ordinary)
    for number in (18, 19, 20):
        wanted = {entry.site for entry in everything.entries if entry.step == number}
        found = set(recording.sites(number)) if number in recording.steps else set()
        lost = {item.site for item in recording.left_out if item.step == number}
        assert found | lost == wanted and not found & lost
    assert all("6000 bytes" in item.reason for item in recording.left_out)
    assert recording.metadata["watch"]["num_cut"] > 0
    last = [site for site in everything.sites(20) if site in recording.sites(20)]
    assert last, "the newest are there"


def test_an_exception_leaves_the_last_steps(tmp_path: Path) -> None:
    def fails(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 15:
            raise ValueError("broken data")
        ordinary(model, optimizer, step)

    with pytest.raises(ValueError, match="broken"):
        train(tmp_path / "run", fails, watch=True)
    recording = glass.Recording.open(tmp_path / "run")
    assert recording.steps == [12, 13, 14]
    assert "broken data" in recording.metadata["watch"]["events"][0]["why"][0]


def test_a_run_without_triggers_records_no_values_and_changes_nothing(tmp_path: Path) -> None:
    def clean(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        ordinary(model, optimizer, step + 100)

    recording = train(tmp_path / "run", clean, count=70, watch=True)
    assert recording.complete and recording.steps == [] and not recording.metadata["watch"]["events"]
    plain, optimizer = Net(), None
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
    for number in range(70):
        clean(plain, optimizer, number)
    watched, other = Net(), None
    other = torch.optim.AdamW(watched.parameters(), 1e-3)
    with glass.record(watched, tmp_path / "again", watch=True, gradients=True, optimizer=other):
        for number in range(70):
            clean(watched, other, number)
    for one, two in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_a_nan_in_step_731_of_1000_leaves_steps_729_to_731(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        ordinary(model, optimizer, 20 if number == 731 else number + 100)
        if number == 731:
            # As a scaler of gradients does: the step is skipped.
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.1)
            optimizer.state.clear()

    recording = train(tmp_path / "run", step, count=1000, watch=Watch(loss=None))
    assert recording.steps == [729, 730, 731] and not recording.left_out
    full = {entry.site for entry in train(tmp_path / "full", ordinary, count=3).entries if entry.step == 2}
    assert all(set(recording.sites(number)) == full for number in recording.steps)
    assert len(list(SeriesReader(tmp_path / "run").rows())) == 1000


KILLED = """
import os, signal, sys, torch
import glassengine as glass
model = torch.nn.Linear(3, 2)
with glass.record(model, sys.argv[1], watch=glass.Watch(every=10, before=1)) as recorder:
    for step in range(40):
        if step == 35:
            recorder.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, 3)).sum().backward()
"""


def test_a_process_that_is_killed_leaves_its_series_and_the_steps_that_were_recorded(tmp_path: Path) -> None:
    done = children.run([sys.executable, "-c", KILLED, str(tmp_path / "run")])
    assert done.returncode == -signal.SIGKILL
    recording = glass.Recording.open(tmp_path / "run")
    assert recording.steps == [0, 9, 10, 19, 20, 29, 30] and not recording.complete
    reader = SeriesReader(tmp_path / "run")
    assert [row.step for row in reader.rows()] == list(range(34))  # the last one had not ended
    assert [event["event"] for event in reader.events] == [0, 10, 20, 30] and "loss" in reader.names


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
