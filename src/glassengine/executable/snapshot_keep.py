"""Inputs of an execution kept until its outputs are known to be good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassengine.executable.graph import CapturedGraph
from glassengine.executable.snapshot_policy import KeepInputs
from glassengine.executable.snapshot_tensors import copied, obstacle

if TYPE_CHECKING:
    from glassengine.executable.observers import Execution


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
        inputs = execution.inputs
        overwritten = inputs.keys() if self._how != "reference" else overwritten_inputs(execution)
        return {
            name: self._copied(execution, name, value) if name in overwritten and obstacle(value) is None else value
            for name, value in inputs.items()
        }

    def release(self, execution: Execution, kept: Mapping[str, Any] | None) -> None:
        """Take back what `keep` returned; it is not to be used any more."""
        for name, value in (kept or {}).items():
            original = execution.inputs.get(name)
            if isinstance(value, Tensor) and value is not original:
                self._rooms.setdefault(self._key(execution, name, original), []).append(value)

    def _copied(self, execution: Execution, name: str, tensor: Tensor) -> Tensor:
        rooms = self._rooms.get(self._key(execution, name, tensor))
        values = tensor.detach()
        if self._how == "host":
            values = values.to("cpu")
        return copied(values, tensor.shape, tensor.stride(), rooms.pop() if rooms else None)

    def _key(self, execution: Execution, name: str, tensor: Tensor | None) -> tuple[object, ...]:
        assert tensor is not None
        shape = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return (execution.executable.number, name, *shape)


def overwritten_inputs(execution: Execution) -> frozenset[str]:
    """Return the inputs that a run may write to, by what is known without reading a graph from disk.

    No graph shows that compiled backward graphs put results where activations were, nor that an engine writes into its
    caches.
    """
    graph = execution.executable.graph
    if not isinstance(graph, CapturedGraph) or graph.kind == "engine":
        return frozenset(execution.inputs)
    found = {spec.name for spec in graph.inputs if spec.is_mutated or spec.kind == "saved"}
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
