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
from glassengine.program.representation.signature import quiet
from glassengine.program.user_code.module_state import holding
from glassengine.program.user_code.tracing import SPECIALIZED, WITH_VALUES, WRITTEN_DOWN, written_down


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
        return traced_program(module, example, dynamic, metadata=told, with_values=True, **options)
    except UsageError as first:
        try:
            with torch.no_grad(), quiet(), holding(module, None):
                repeated = written_down(module, example)
            told = {**known, SPECIALIZED: WRITTEN_DOWN}
            return traced_program(repeated, example, dynamic, metadata=told, with_values=True, **options)
        except Exception:
            raise first from first.__cause__
