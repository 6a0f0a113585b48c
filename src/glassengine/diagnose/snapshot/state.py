"""The execution of a snapshot put back into place: its graph, its device, and the settings that change results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from glassengine.errors import CorruptError
from glassengine.executable.graph.graph import CapturedGraph, InputSpec
from glassengine.executable.snapshot.keeper import set_rng_states
from glassengine.executable.snapshot.reader import Snapshot
from glassengine.program.representation.program import OnnxGraph

_PRECISIONS = ("highest", "high", "medium")
_MAX_THREADS = 4096


def captured_graph(snapshot: Snapshot) -> CapturedGraph:
    """Return the graph of a snapshot as it was captured; the tensors that it held itself are buffers.

    Raises:
        UsageError: It has no graph.
        CorruptError: It is damaged.
    """
    specs = tuple(
        InputSpec(
            entry.name,
            "buffer" if entry.kind == "constant" else entry.kind,  # type: ignore[arg-type]
            entry.dtype,
            entry.shape,
            entry.stride,
            entry.device,
            entry.requires_grad,
            entry.is_mutated,
        )
        for entry in snapshot.inputs
    )
    kind: Any = snapshot.kind
    translated = snapshot.onnx
    onnx = None
    if translated is not None:
        onnx = OnnxGraph(translated.file, {node.name: name for name, node in translated.values.items()})
    return CapturedGraph(snapshot.graph.graph_module, specs, snapshot.output_names, kind, onnx=onnx)


@contextmanager
def as_recorded(snapshot: Snapshot) -> Iterator[None]:
    """Put the settings of the recorded process into effect, and this one's back in the end."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    settings = snapshot.meta.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    threads, precision = settings.get("num_threads"), settings.get("float32_matmul_precision")
    state = torch.get_rng_state()
    try:
        if type(threads) is int and 0 < threads <= _MAX_THREADS:
            torch.set_num_threads(threads)
        if precision in _PRECISIONS:
            torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(settings.get("deterministic_algorithms") is True)
        set_random_states(snapshot)
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.use_deterministic_algorithms(before[2])
        torch.set_rng_state(state)


def device_of(snapshot: Snapshot) -> str:
    """Return the accelerator that it ran on if this machine has it, else the CPU."""
    used = {entry.device for entry in snapshot.inputs if entry.is_tensor} - {"cpu"}
    here = torch.accelerator.current_accelerator()
    found = next(iter(sorted(used)), "cpu")
    return found if here is not None and found.partition(":")[0] == here.type else "cpu"


def set_random_states(snapshot: Snapshot) -> None:
    """Put the generators of the devices that are here into the recorded state."""
    here = torch.accelerator.current_accelerator()
    known = {"cpu"} if here is None else {"cpu", here.type}
    states = {name: state for name, state in snapshot.rng_states.items() if name.partition(":")[0] in known}
    try:
        set_rng_states(states)
    except (RuntimeError, TypeError) as error:
        raise CorruptError("the random states of the snapshot cannot be used", got=str(error)) from error
