"""`xm`: the device, steps, and what one process does with the others."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import glassengine as glass
import glassengine.compat.torch_xla.core.xla_model as xm


def test_the_device_is_the_lazy_one(device: torch.device) -> None:
    assert xm.xla_device() == xm.xla_device(0) == xm.xla_device(devkind="CPU") == device
    assert xm.is_xla_tensor(torch.ones(1).to(xm.xla_device())) and not xm.is_xla_tensor(torch.ones(1))
    assert xm.get_xla_supported_devices() == ["lazy:0"] and xm.xla_real_devices([device]) == ["CPU:0"]
    assert xm.xla_device_hw(device) == "CPU"
    for asked in ({"n": 1}, {"devkind": "TPU"}):
        with pytest.raises(glass.GlassError, match="expected: None or"):
            xm.xla_device(**asked)  # type: ignore[arg-type]


def test_a_step_of_an_optimizer_is_recorded_and_a_barrier_runs_it(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    for barrier in (False, True):
        optimizer.zero_grad()
        (parameter * 3).sum().backward()
        assert xm.optimizer_step(optimizer, barrier=barrier) is None
        assert bool(glass.lazy.pending()) is not barrier
    assert parameter.tolist() == [-2.0, -2.0]

    def closure() -> torch.Tensor:
        return (parameter * 3).sum()

    assert xm.optimizer_step(optimizer, optimizer_args={"closure": closure}).item() == -12.0


def test_closures_get_values_and_errors_are_raised(device: torch.device) -> None:
    seen: list[list[float]] = []
    value = torch.ones(2).to(device) * 3
    xm.add_step_closure(lambda one: seen.append(one.tolist()), args=(value,))
    xm.add_step_closure(lambda one: seen.append(one.tolist()), args=(value,), run_async=True)
    assert seen == []
    xm.mark_step(wait=True)
    assert seen == [[3.0, 3.0]] * 2

    def fail() -> None:
        raise ValueError("planted")

    for run_async in (False, True):
        xm.add_step_closure(fail, run_async=run_async)
        with pytest.raises(ValueError, match="planted"):
            xm.mark_step(wait=True)


def test_one_process_does_alone_what_replicas_do_together(device: torch.device) -> None:
    assert (xm.xrt_world_size(), xm.get_ordinal(), xm.get_local_ordinal()) == (1, 0, 0) and xm.is_master_ordinal()
    value = torch.arange(3.0).to(device)
    assert xm.all_reduce(xm.REDUCE_SUM, value).tolist() == [0.0, 1.0, 2.0]
    assert xm.all_reduce(xm.REDUCE_SUM, value, scale=0.5).tolist() == [0.0, 0.5, 1.0]
    several = [value.clone(), value + 1]
    assert xm.all_reduce(xm.REDUCE_MAX, several, scale=2.0) is several
    assert [one.tolist() for one in several] == [[0.0, 2.0, 4.0], [2.0, 4.0, 6.0]]
    assert xm.all_gather(value).tolist() == [0.0, 1.0, 2.0]
    assert xm.rendezvous("tag", b"payload") == [b"payload"]
    assert xm.mesh_reduce("tag", {"loss": value.sum()}, lambda found: [one["loss"].device.type for one in found]) == [
        "cpu"
    ]
    xm.broadcast_master_param(torch.nn.Linear(1, 1).to(device))
    xm.collective_broadcast([value])
    calls: list[int] = []
    xm.do_on_ordinals(calls.append, (1,), (0,))
    xm.do_on_ordinals(calls.append, (2,), (1,))
    assert calls == [1]


def test_several_processes_are_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: gradients of two processes that nothing would add."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device=device))], lr=0.1)
    with pytest.raises(glass.GlassError, match=r"process 1 of 2\n.*torch\.distributed\.all_reduce"):
        xm.optimizer_step(optimizer)
    with pytest.raises(glass.GlassError, match="one process only"):
        xm.rendezvous("tag")
    assert not xm.is_master_ordinal(local=False)


def test_functions_without_meaning_here_are_refused_when_called(device: torch.device) -> None:
    for name in ("reduce_scatter", "get_rng_state", "get_stablehlo", "get_memory_info"):
        refused = getattr(xm, name)
        with pytest.raises(glass.GlassError, match=f"xla_model.{name} is not available\n.*hint: "):
            refused(1, two=2)
    with pytest.raises(glass.GlassError, match="does not take groups"):
        xm.all_reduce(xm.REDUCE_SUM, torch.ones(1), groups=[[0]])
    with pytest.raises(glass.GlassError, match="does not take input_sharding"):
        xm.send_cpu_data_to_device([torch.ones(1)], device, input_sharding="x")
    assert not hasattr(xm, "no_such_name")


def test_printing_is_for_the_first_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    xm.master_print("one", 1)
    monkeypatch.setenv("RANK", "1")
    xm.master_print("two")
    assert capsys.readouterr().out == "one 1\n"


def test_saved_values_are_those_of_one_graph_and_load_without_us(
    device: torch.device, tmp_path: Path, counters: object
) -> None:
    state = {"a": torch.ones(2).to(device) * 2, "b": [torch.arange(3.0).to(device) + 1, "text"]}
    for target in (tmp_path / "a.pt", str(tmp_path / "b.pt"), io.BytesIO()):
        xm.save(state, target)
        if isinstance(target, io.BytesIO):
            target.seek(0)
        loaded = torch.load(target, weights_only=True)
        assert loaded["a"].tolist() == [2.0, 2.0] and loaded["b"][0].tolist() == [1.0, 2.0, 3.0]
        assert loaded["b"][1] == "text" and type(loaded["a"]) is torch.Tensor
    assert counters("UncachedCompile") == counters("TensorRead") == 1  # type: ignore[operator]


def test_other_processes_write_nothing(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    xm.save({}, tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()
    xm.save({}, tmp_path / "a.pt", master_only=False)
    assert (tmp_path / "a.pt").exists()


def test_tensors_can_be_computed_together_and_waited_for(device: torch.device, counters: object) -> None:
    one, two = torch.ones(2).to(device) + 1, torch.ones(3).to(device) + 2
    xm.wait_device_ops()
    assert len(glass.lazy.pending()) == 2
    xm.unlazy([one, two])
    assert glass.lazy.pending() == () and counters("UncachedCompile") == 1  # type: ignore[operator]


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(xm.time, "monotonic", lambda: next(clock))  # type: ignore[attr-defined]
    tracker = xm.RateTracker(smooth_factor=0.5)
    tracker.add(10)
    assert tracker.rate() == 5.0
    tracker.add(30)
    assert tracker.rate() == 0.5 * 15.0 + 0.5 * 5.0
    assert tracker.rate() == 10.0
    assert tracker.global_rate() == 10.0
