"""Whether a program holds for a dynamic size of 1.

The exporter takes a size of 1 for a constant, so a dynamic dimension is traced with another one and 2 is its bound.
Most graphs are right below it nevertheless, and a batch of 1 is what users run first. Where a step of the inputs has
such a size, the graph is run on it and its results are held against those of the module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from glassengine.program.representation.program import Program
from glassengine.program.user_code.module_state import run_alone
from glassengine.sites import port_leaves


def small_sizes(module: nn.Module, program: Program, steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return dynamic size -> 1 for those that a step has and for which program and module agree.

    Args:
        module: What was exported, with its weights.
        program: Its program.
        steps: Keyword arguments, as it was exported with.
    """
    found: dict[str, int] = {}
    for step in steps:
        leaves = [leaf for _, leaf in port_leaves(":in", dict(step))]
        tensors = {port.name: leaf for port, leaf in zip(program.inputs, leaves, strict=True)}
        of_one = {
            name
            for port in program.inputs
            for name, size in zip(port.shape, tensors[port.name].shape, strict=True)
            if isinstance(name, str) and size == 1
        }
        if of_one and _agree(module, program, step, tensors):
            found |= dict.fromkeys(of_one, 1)
    return found


def _agree(module: nn.Module, program: Program, step: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    values = {port.node: tensors[port.name].clone() for port in program.inputs} | program.weights()
    placeholders = [values.get(node.name) for node in program.graph.find_nodes(op="placeholder")]
    specs = program.exported.graph_signature.output_specs
    with torch.no_grad():
        expected = run_alone(module, step)
        try:
            results = torch.fx.Interpreter(program.exported.graph_module).run(*placeholders, enable_io_processing=False)
        except RuntimeError:  # an assertion of the graph, or shapes that do not fit
            return False
    actual = [value for spec, value in zip(specs, results, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    leaves = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    return len(actual) == len(leaves) and all(_close(a, b) for a, b in zip(actual, leaves, strict=True))


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are the same but for rounding; a graph that does not hold is wrong by far more."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    tolerance = math.sqrt(torch.finfo(expected.dtype).eps)
    scale = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
