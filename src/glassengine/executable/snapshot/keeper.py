"""Inputs of an execution kept until its outputs are known to be good."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glassengine import spans
from glassengine.executable.counters import registry
from glassengine.executable.graph import CapturedGraph, Execution
from glassengine.executable.snapshot.policy import KeepInputs
from glassengine.executable.snapshot.tensors import copied, obstacle


class Keeper:
    """Keeps inputs as they are before a run, in memory that later runs use again.

    Args:
        how: "reference" copies what the run may overwrite and holds on to the rest; "device" copies everything on its
            device; "host" copies everything into main memory.
    """

    def __init__(self, how: KeepInputs) -> None:
        self._how = how
        self._rooms: dict[tuple[object, ...], list[Tensor]] = {}

    def keep(self, execution: Execution) -> dict[str, Any]:
        """Return the inputs of an execution that begins, by name."""
        if self._how == "reference":
            return self._kept(execution)
        start = time.perf_counter_ns()
        with spans.span("transfer", execution.executable.name):
            kept = self._kept(execution)
        if self._how == "host":
            registry.sample("TransferFromDeviceTime", time.perf_counter_ns() - start, "ns")
            size = sum(value.nbytes for value in kept.values() if isinstance(value, Tensor))
            registry.sample("InboundData", size, "bytes")
        return kept

    def _kept(self, execution: Execution) -> dict[str, Any]:
        kept = dict(execution.inputs)
        number = execution.executable.number
        rooms: list[Tensor] = []
        values: list[Tensor] = []
        for name in kept if self._how != "reference" else overwritten_inputs(execution):
            value = kept[name]
            if not isinstance(value, Tensor):
                continue
            free = self._rooms.get(_key(number, name, value))
            if free:
                kept[name] = free.pop()
                rooms.append(kept[name])
                values.append(value)
            elif obstacle(value) is None:
                moved = value.detach().to("cpu") if self._how == "host" else value.detach()
                kept[name] = copied(moved, value.shape, value.stride())
        if rooms:
            # One call for all of them: most are small, and a call takes longer than the copy.
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(rooms, values)
        return kept

    def release(self, execution: Execution, kept: Mapping[str, Any]) -> None:
        """Take back what `keep` returned; it is not to be used any more."""
        number = execution.executable.number
        for name, value in kept.items():
            original = execution.inputs[name]
            # What is expanded cannot be written to.
            if value is not original and 0 not in value.stride():
                self._rooms.setdefault(_key(number, name, original), []).append(value)


def _key(number: int, name: str, tensor: Tensor) -> tuple[object, ...]:
    return (number, name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def overwritten_inputs(execution: Execution) -> frozenset[str]:
    """Return the inputs that a run may write to, by what is known without reading a graph from disk.

    An engine may write into its caches, which its graph does not show.
    """
    graph = execution.executable.graph
    if not isinstance(graph, CapturedGraph) or graph.kind == "engine":
        return frozenset(execution.inputs)
    found = {spec.name for spec in graph.inputs if spec.is_mutated}
    if not found:
        return frozenset()
    storages = {_storage(execution.inputs.get(name)) for name in found} - {None}
    return frozenset(name for name, value in execution.inputs.items() if name in found or _storage(value) in storages)


def rng_states(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state of the generator of the CPU and of each accelerator that has an input, by device."""
    states = {"cpu": torch.get_rng_state()}
    for device in dict.fromkeys(value.device for value in inputs.values() if isinstance(value, Tensor)):
        if device.type not in ("cpu", "meta"):
            states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """Put every generator into the state that `rng_states` found."""
    for name, state in states.items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if obstacle(value) is None else None
