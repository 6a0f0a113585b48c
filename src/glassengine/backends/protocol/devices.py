"""Executables on an accelerator: where a program is compiled for, and how tensors get there and back.

A program is exported on the CPU, named and stored there: it is the same for every device. What a back-end compiles for
a GPU is a moved copy of it. Caches of a session lie on the device; inputs of a step are brought there, and its results
go to the device of the inputs, so that observers find them on the host.

Nothing here was ever run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glassengine.backends.protocol.backend import Run
from glassengine.program.representation.program import Program, copied_graph, rebuilt

DEVICE = "device"
"""Key of a program's metadata while it is built: what it is built for, "cpu" or "cuda"."""


def device_of(program: Program) -> str:
    """Return what a program is being built for."""
    return str(program.metadata.get(DEVICE, "cpu"))


def moved(program: Program, device: str) -> Any:
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


def brought(run: Run, device: str, caches: Mapping[str, str]) -> Run:
    """Return a function that runs on `device` with tensors from anywhere.

    Args:
        run: Writes the caches in place; wants everything on `device`.
        device: "cpu" or "cuda".
        caches: `past_*` inputs -> results.
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
