"""The inputs of a step as sides and their replays take them: by name, with caches that nothing was written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glassengine.judge.cases import StepInputs
from glassengine.program.export.examples import named_inputs
from glassengine.program.representation.program import Program

Given = StepInputs | Mapping[str, Any]
"""Inputs of a step: of a program that generates, or keyword arguments of a plain module."""


def by_name(given: Given) -> dict[str, torch.Tensor]:
    """Return the inputs of a step by the names of the program's ports, caches left out."""
    return given.named() if isinstance(given, StepInputs) else named_inputs(given)


def empty_caches(program: Program, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return zeroed caches for the batch and cache length of `named`; none where the program has no caches."""
    if program.layout is None:
        return {}
    dtype = next(getattr(torch, port.dtype) for port in program.inputs if port.name in program.caches)
    batch, length = named["attention_mask"].shape
    return program.layout.allocate(batch, length, dtype)
