"""Inputs and outputs of a built executable: their order, written beside it, and their device.

A program is exported on the CPU, named and stored there: it is the same for every device. A back-end compiles a moved
copy of it for a GPU. Caches of a session lie on the device; inputs of a step are brought there, and its results go to
the device of the inputs, so that observers find them on the host.

Nothing here was ever run on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.protocol.backend import Run
from glassengine.program.representation.outputs import result_names
from glassengine.program.representation.program import Program, copied_graph, rebuilt
from glassengine.reading.documents import damaged, read_document

_FILE = "io.json"
_MAX_BYTES = 16 << 20
DEVICE = "device"
"""Key of a program's metadata while it is built: what it is built for, "cpu" or "cuda"."""


@dataclass(frozen=True)
class IOOrder:
    """Names in the order in which the executable takes and returns them; `caches` maps `past_*` to `present_*`.

    `device` is what it was built for; `one_token` are the sizes that inputs have in a step of one token, where an
    executable of its own computes it: input -> dimension -> size.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    caches: dict[str, str]
    device: str = "cpu"
    one_token: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


def write_io(program: Program, directory: Path, *, one_token: Mapping[str, Mapping[int, int]] | None = None) -> IOOrder:
    """Write and return the order for `program` in the form that the executable has (mutated or functional)."""
    inputs = tuple(port.name for port in program.inputs)
    order = IOOrder(inputs, tuple(result_names(program)), dict(program.caches), device_of(program), one_token or {})
    (directory / _FILE).write_text(json.dumps(vars(order)))
    return order


def read_io(directory: Path) -> IOOrder:
    """Inverse of `write_io`.

    Raises:
        CorruptError: The file is missing or damaged.
    """
    order = read_document(directory / _FILE, IOOrder, most=_MAX_BYTES, inside=directory, what=_FILE)
    unknown = [name for name in (*order.caches, *order.one_token) if name not in order.inputs]
    if unknown:
        raise damaged(_FILE, directory / _FILE, f"{unknown[0]!r} is not an input")
    return order


def device_of(program: Program) -> str:
    """Return what a program is being built for."""
    return str(program.metadata.get(DEVICE, "cpu"))


def exported_on(program: Program, device: str) -> Any:
    """Return the exported program on `device`, constants and places in the graph included; `program` stays as it is."""
    if device == "cpu":
        return program.exported
    from torch.export.passes import move_to_device_pass

    exported = program.exported
    copied = rebuilt(exported, copied_graph(exported.graph), exported.graph_signature.output_specs)
    # The pass changes what it is given.
    copied._state_dict = dict(exported.state_dict)
    copied._constants = dict(exported.constants)
    return move_to_device_pass(copied, device)


def running_on(run: Run, device: str, caches: Mapping[str, str]) -> Run:
    """Return a function that runs on `device` with tensors from anywhere.

    `run` writes the caches in place, and wants everything on `device`.
    """
    if device == "cpu":
        return run

    def from_anywhere(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        here = next((t.device for name, t in inputs.items() if name not in caches), torch.device("cpu"))
        there = {name: tensor.to(device) for name, tensor in inputs.items()}
        results = run(there)
        for name in caches:
            if there[name] is not inputs[name]:
                inputs[name].copy_(there[name])
        return {name: tensor.to(here) for name, tensor in results.items()}

    return from_anywhere
