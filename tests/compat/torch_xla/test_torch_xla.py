"""What `torch_xla` itself has: its device, steps, compiled regions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine import environment
from glassengine.compat import torch_xla


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_device_and_its_steps(device: torch.device, counters: Callable[[str], int]) -> None:
    assert torch_xla.device() == torch_xla.device(0) == device and torch_xla.devices() == [device]
    assert torch_xla.device_count() == 1 and torch_xla.real_devices() == ["CPU:0"]
    with pytest.raises(glass.GlassError, match="device 1"):
        torch_xla.device(1)
    value = torch.ones(1, device=torch_xla.device()) + 1
    torch_xla.sync(wait=True)
    assert glass.lazy.pending() == () and value.item() == 2.0 and counters("TensorRead") == 0
    with torch_xla.step():
        value = value + 1
    assert glass.lazy.pending() == () and counters("MarkStep") == 2


def test_a_compiled_function_is_one_graph_apart_from_what_is_around_it(
    device: torch.device, counters: Callable[[str], int]
) -> None:
    compiled = torch_xla.compile(double, full_graph=True)
    value = torch.ones(1).to(device) + 1
    for _ in range(3):
        value = compiled(value)
        assert glass.lazy.pending() == ()
    assert value.item() == 16.0 and counters("UncachedCompile") == 2 and counters("MarkStep") == 3

    @torch_xla.compile()
    def other(x: torch.Tensor) -> float:
        return (x * 3).sum().item()

    assert other(value) == 48.0


def test_a_value_that_would_cut_a_graph_is_refused(device: torch.device) -> None:
    """Planted: `.item()` within a graph that is to be whole."""

    def reads(x: torch.Tensor) -> float:
        return (x + 1).sum().item()

    whole = torch_xla.compile(reads, full_graph=True)
    with pytest.raises(
        glass.GlassError, match=r"inside of reads \(full_graph=True\)(.|\n)*item\(\) at .*test_torch_xla"
    ):
        whole(torch.ones(2).to(device))
    assert reads(torch.ones(2).to(device)) == 4.0


def test_too_many_graphs_are_an_error(device: torch.device) -> None:
    limited = torch_xla.compile(double, max_different_graphs=2)
    for size in (1, 2, 1, 2):
        limited(torch.ones(size).to(device))
    with pytest.raises(glass.GlassError, match=r"double was compiled too often\n.*3 graphs"):
        limited(torch.ones(3).to(device))


def test_eager_mode_runs_each_operation_and_a_compiled_function_does_not(
    device: torch.device, counters: Callable[[str], int]
) -> None:
    experimental = torch_xla.experimental
    experimental.eager_mode(True)
    try:
        value = torch.ones(2).to(device) * 2 + 1
        assert experimental.is_eager_mode() and counters("UncachedCompile") == 2 and glass.lazy.pending() == ()
        torch_xla.compile(lambda x: x * 3 - 1)(value)
        assert counters("UncachedCompile") == 3 and experimental.is_eager_mode()
        with experimental.eager_mode_context(False):
            value - 1
            assert counters("UncachedCompile") == 3
    finally:
        experimental.eager_mode(False)


def test_autocast_and_seeds(device: torch.device) -> None:
    for where in (device, "lazy", "lazy:0"):
        with torch_xla.amp.autocast(where):
            assert (torch.ones(2, 2).to(device) @ torch.ones(2, 2).to(device)).dtype == torch.bfloat16
    with pytest.raises(glass.GlassError, match="needs no scaled gradients"):
        torch_xla.amp.GradScaler()
    assert torch_xla.amp.syncfree.AdamW is torch.optim.AdamW
    torch_xla.manual_seed(7)
    first = torch.rand(3, device=device)
    torch.manual_seed(7)
    assert torch.equal(first.cpu(), torch.rand(3))


def test_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    xr = torch_xla.runtime
    assert (xr.world_size(), xr.global_ordinal(), xr.local_ordinal(), xr.process_index(), xr.process_count()) == (
        *(1, 0, 0, 0, 1),
    )
    assert xr.global_device_count() == xr.addressable_device_count() == xr.global_runtime_device_count() == 1
    assert xr.addressable_runtime_device_count() == 1 and xr.device_type() == "CPU"
    assert not xr.using_pjrt() and not xr.is_spmd()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert (xr.world_size(), xr.global_ordinal()) == (4, 2)
    monkeypatch.setenv("GLASS_CACHE_DIR", "before")
    xr.initialize_cache("kept")
    assert environment.cache_dirs()["glassengine"] == Path("kept")
    with pytest.raises(glass.GlassError, match="does not take readonly"):
        xr.initialize_cache("kept", readonly=True)
    with pytest.raises(glass.GlassError, match=r"runtime\.use_spmd is not available"):
        xr.use_spmd()
