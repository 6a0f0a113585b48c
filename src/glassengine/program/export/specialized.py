"""Export of modules that look at values: for one step alone, by the exporter, else by writing its ops down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from glassengine.errors import UsageError
from glassengine.program.export.examples import example_of, fixed_inputs, named_inputs
from glassengine.program.export.export import traced_program
from glassengine.program.listing.listing import OnStage
from glassengine.program.representation.program import FIXED_INPUTS, Program
from glassengine.program.representation.signature import named_results, quiet
from glassengine.program.user_code.module_state import holding, run_alone
from glassengine.program.user_code.specialized import SPECIALIZED, WITH_VALUES, WRITTEN_DOWN, written_down


def export_specialized(
    module: nn.Module,
    step: Mapping[str, Any],
    *,
    metadata: dict[str, Any] | None = None,
    on_stage: OnStage | None = None,
    keeps_state: bool = False,
) -> Program:
    """Export a module that looks at values, for the inputs of one step alone; how, is in the metadata.

    Args:
        module: As for `export_module`.
        step: Keyword arguments.
        metadata: As for `export_module`.
        on_stage: As for `export_module`.
        keeps_state: As for `export_module`.

    Raises:
        UsageError: It cannot be traced that way, either.
    """
    example = dict(step)
    options: dict[str, Any] = {"kind": "module", "prefix": "", "output_names": None, "layout": None}
    options |= {"input_names": list(named_inputs(example)), "on_stage": on_stage, "keeps_state": keeps_state}
    known = {**(metadata or {}), FIXED_INPUTS: fixed_inputs(example)}
    _, dynamic = example_of([example])
    try:
        told = {**known, SPECIALIZED: WITH_VALUES}
        program = traced_program(module, example, dynamic, metadata=told, with_values=True, **options)
        if _repeats(program, module, example):
            return program
        first = UsageError(f"the program that was exported of {type(module).__name__} gives other results than it")
    except UsageError as error:
        first = error
    try:
        with torch.no_grad(), quiet(), holding(module, None):
            repeated = written_down(module, example)
        told = {**known, SPECIALIZED: WRITTEN_DOWN}
        return traced_program(repeated, example, dynamic, metadata=told, with_values=True, **options)
    except Exception:
        raise first from first.__cause__


def _repeats(program: Program, module: nn.Module, example: Mapping[str, Any]) -> bool:
    """Whether a program gives what its module gives: values that an exporter propagates may be others."""
    given = named_inputs(example)
    tensors = {**program.weights(), **{port.node: given[port.name] for port in program.inputs if port.name in given}}
    placeholders = [node.name for node in program.graph.find_nodes(op="placeholder")]
    if any(name not in tensors for name in placeholders):
        return True  # it takes what only a run of its own can say
    own = named_results(run_alone(module, example))
    with torch.no_grad():
        values = torch.fx.Interpreter(program.exported.graph_module).run(*(tensors[name] for name in placeholders))
    nodes = [getattr(node, "name", None) for node in program.graph.output_node().args[0]]
    found = {name: dict(zip(nodes, values, strict=True)).get(node) for name, node in program.output_nodes.items()}
    return all(
        found[name].shape == value.shape
        and torch.allclose(found[name].double(), value.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
        for name, value in own.items()
        if isinstance(found.get(name), torch.Tensor) and not value.is_complex()
    )
