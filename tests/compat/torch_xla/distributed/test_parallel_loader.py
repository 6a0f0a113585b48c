"""`pl`: batches on the lazy device, each the begin of a step."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import glassengine as glass
import glassengine.compat.torch_xla.distributed.parallel_loader as pl


class Batch(UserDict[str, torch.Tensor]):
    """What tokenizers return: no dictionary, and moved by its own method."""

    def to(self, device: Any) -> Batch:
        return Batch({name: value.to(device) for name, value in self.items()})


def test_each_batch_is_a_step(device: torch.device) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0).view(6, 1), torch.arange(6))
    loader = pl.MpDeviceLoader(torch.utils.data.DataLoader(data, batch_size=2), device)
    before, sums = glass.compat.current_step(), []
    started = torch.ones(1).to(device) + 1  # what is pending before the first batch has a graph of its own
    for inputs, labels in loader:
        assert [one.op for one in glass.lazy.pending()] == []
        assert glass.lazy.is_lazy(inputs) and labels.dtype == torch.int64
        sums.append(inputs.sum())
    assert glass.compat.current_step() - before == len(loader) == 3 and glass.lazy.pending() == ()
    assert [float(one) for one in sums] == [1.0, 5.0, 9.0] and started.item() == 2.0


def test_batches_of_all_kinds_are_moved(device: torch.device) -> None:
    batches = [{"x": [torch.ones(1), "text"], "n": 3}, Batch(x=torch.ones(2))]
    first, second = pl.ParallelLoader(batches, [device], loader_prefetch_size=8).per_device_loader(device)
    assert glass.lazy.is_lazy(first["x"][0]) and first["x"][1] == "text" and first["n"] == 3
    assert type(second) is Batch and glass.lazy.is_lazy(second["x"])


@pytest.mark.parametrize(("number", "steps"), [(2, 3), (5, 1), (1, 5)])
def test_several_batches_can_be_one_step(device: torch.device, number: int, steps: int) -> None:
    before = glass.compat.current_step()
    for (value,) in pl.MpDeviceLoader([(torch.ones(1),)] * 5, device, batches_per_execution=number):
        value + 1
    assert glass.compat.current_step() - before == steps


def test_an_error_of_the_loader_is_raised(device: torch.device) -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        list(pl.MpDeviceLoader(batches(), device))


def test_functions_of_several_devices_are_refused(device: torch.device) -> None:
    with pytest.raises(glass.GlassError, match="2 devices"):
        pl.ParallelLoader([], [device, device])
    with pytest.raises(glass.GlassError, match="input_sharding"):
        pl.MpDeviceLoader([], device, input_sharding="x")
