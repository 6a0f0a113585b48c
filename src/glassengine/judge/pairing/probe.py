"""Runs a few steps of a candidate's program and keeps all its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from glassengine.capture.observers import run_program
from glassengine.judge.cases import Case, StepInputs, by_name, empty_caches
from glassengine.program.kinds.image_text import ROWS
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs

NUM_STEPS = 2
"""Two, so that tensors of one shape in one step are distinguished by the other."""
_MOST_TOKENS = 16


@dataclass(frozen=True)
class ProbeStep:
    """What a program was given (by input) and made (by node) in one step.

    `real` [B, S] marks the tokens other than padding, if there is some.
    """

    inputs: Mapping[str, Any]
    values: Mapping[str, torch.Tensor]
    real: torch.Tensor | None = None


def probe(program: Program, cases: Sequence[Case]) -> list[ProbeStep]:
    """Run two steps of the first case: of a causal LM, two rows without padding and a decode step.

    Of a plain module the two with the most elements: a batch of one has shapes in common that a larger one has not.
    With padding among its steps there is a third one that has it, the two have none: programs may count positions
    otherwise beside padding.
    """
    steps: list[ProbeStep] = []
    caches: dict[str, torch.Tensor] = {}
    inputs: Any = None
    case = _short(cases[0])
    of_module = _of_module(case) if case.input_ids is None else []
    for number in range(len(of_module) or min(NUM_STEPS, case.num_steps)):
        if case.input_ids is None:
            inputs = of_module[number]
        else:
            inputs = StepInputs.first(case) if number == 0 else inputs.following(case.input_ids[:, 0])
        named = by_name(inputs)
        if program.layout is not None and not caches:
            caches = empty_caches(program, named)
        values: dict[str, torch.Tensor] = {}

        def keep(node: Node, value: Any, values: dict[str, torch.Tensor] = values) -> None:
            if is_tensor_node(node) and isinstance(value, torch.Tensor):
                values[node.name] = value

        given = {**named, **caches}
        outputs = run_program(program, given, keep)
        steps.append(ProbeStep(given, values, _padding(inputs) if number >= NUM_STEPS else None))
        caches = {past: outputs[present] for past, present in program.caches.items()}
    return steps


def _of_module(case: Case) -> list[Mapping[str, Any]]:
    largest = sorted(case.steps, key=_num_elements, reverse=True)
    padded = next((step for step in largest if _padding(step) is not None), None)
    if padded is None:
        return largest[:NUM_STEPS]
    without = [{**step, **_ones(step)} for step in largest]
    return [*(without * NUM_STEPS)[:NUM_STEPS], padded]


def _ones(step: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the masks of padding of a step, as if there were none."""
    return {
        name: torch.ones_like(value)
        for name, value in step.items()
        if name.endswith("attention_mask") and isinstance(value, torch.Tensor) and value.dim() == 2
    }


def _padding(step: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which tokens of a step are real, not padding; None if all are."""
    masks = [step[name].bool() for name in _ones(step)]
    return next((mask for mask in masks if not bool(mask.all())), None)


def _num_elements(step: Mapping[str, Any]) -> int:
    return sum(tensor.numel() for tensor in named_inputs(step).values())


def _short(case: Case) -> Case:
    """Return a case of few tokens, whose rows differ and have no padding."""
    if case.input_ids is None:
        return case

    def two_rows(table: torch.Tensor) -> torch.Tensor:
        row = table[:1, -_MOST_TOKENS:]
        return torch.cat([row, row.flip(-1)])

    ids = two_rows(case.input_ids)
    constants = {name: two_rows(value) if name == ROWS else value for name, value in case.constants.items()}
    ones = torch.ones_like(ids)
    return replace(case, num_steps=NUM_STEPS, input_ids=ids, attention_mask=ones, tokens=None, constants=constants)
