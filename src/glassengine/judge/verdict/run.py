"""Run all sides of a check in lockstep with the reference and keep the score of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.end_to_end import results_of, with_model
from glassengine.judge.exclusions.padding import valid_mask
from glassengine.judge.replay.arithmetic import PLAIN, Arithmetic
from glassengine.judge.replay.reference import ReferenceRun
from glassengine.judge.sides.protocol import Side
from glassengine.judge.step_inputs import by_name, empty_caches
from glassengine.judge.verdict.collectives import judge_collectives
from glassengine.judge.verdict.gauges import leave_out_gauges
from glassengine.judge.verdict.score import Score
from glassengine.numerics.ops import FLOAT32_SUMS, Accumulation
from glassengine.numerics.verdict import Reference
from glassengine.program.export.examples import named_inputs
from glassengine.program.representation.program import Program

Made = Mapping[str, torch.Tensor]
"""Results of the untouched model in a step, by name."""


def run_cases(
    program: Program,
    cases: Sequence[Case],
    model: Side | None,
    scores: Sequence[Score],
    *,
    coarsest: torch.dtype | None,
    accumulation: Accumulation = FLOAT32_SUMS,
    arithmetic: Arithmetic = PLAIN,
    on_step: Callable[[Case, int, Mapping[str, float]], None],
    gauges: bool = True,
) -> None:
    """Run every case on the reference and on all sides, and judge every tensor of every step.

    Args:
        program: The baseline program.
        cases: What to run.
        model: The untouched baseline; its greedy choice is the next token of everybody. None where there are none.
        scores: One per side, `model`'s among them.
        coarsest: Dtype of the coarsest side.
        accumulation: How the sides' products are summed.
        arithmetic: What the sides compute more coarsely, op by op.
        on_step: Called after each step with the relative noise floor of each node in the case so far.
        gauges: Whether these are all cases: what is written in another gauge is left out at their end.
    """
    results: dict[str, list[str]] = {}
    for name in results_of(program):
        results.setdefault(program.output_nodes[name], []).append(name)
    for case in cases:
        how: Any = {"coarsest": coarsest, "accumulation": accumulation, "arithmetic": arithmetic}
        reference = ReferenceRun(program, **how)
        for score in scores:
            score.begin(case)
        inputs: Any = None
        for step in range(case.num_steps):
            inputs = inputs_of(case, step, inputs, model)
            num_seen = int(inputs.cache_position[-1]) + 1 if isinstance(inputs, StepInputs) else 0
            for score in scores:
                score.begin_step(num_seen)
                score.side.step(inputs)
            made = scores[0].side.results() if scores[0].side is model else {}
            named = by_name(inputs)
            if step == 0:
                named |= empty_caches(program, named)

            def observe(node: Node, value: Reference, step: int = step, case: Case = case, made: Made = made) -> None:
                tied = False
                for score in scores:
                    tied |= score.visit(node, value, case, step, tied=tied)
                if node.name in results:
                    own = next((made[name] for name in results[node.name] if name in made), None)
                    _compare_results(scores, node.name, (value, with_model(value, own)), made, (case.name, step))

            def valid(node: Node, value: torch.Tensor, inputs: Any = inputs) -> torch.Tensor | None:
                if not isinstance(inputs, StepInputs):
                    return None
                return valid_mask(program.sites.by_node[node.name][0], value, inputs)

            with torch.no_grad():
                reference.step(named, observe, valid)
            before = {} if isinstance(inputs, StepInputs) else named_inputs(inputs)
            for score in scores:
                score.results.end_step(score.side.results(), made, (case.name, step))
                if model is not None and model.written is not None and score.side.written is not None:
                    score.results.compare_inputs(before, score.side.written, model.written, (case.name, step))
                    score.results.compare_plain(score.side.plain, model.plain, (case.name, step))
                score.end_step(named)
                judge_collectives(score, case, step)
            on_step(case, step, reference.relative_floors)
        for score in scores:
            score.end_case()
    if gauges:
        leave_out_gauges(scores, first_inputs(program, cases[0]))


def first_inputs(program: Program, case: Case) -> dict[str, torch.Tensor]:
    """Return the inputs of the first step of a case by name, with empty caches."""
    named = by_name(inputs_of(case, 0, None, None))
    return named | empty_caches(program, named)


def _compare_results(
    scores: Sequence[Score], node: str, references: tuple[Reference, Reference], made: Made, where: tuple[str, int]
) -> None:
    """Compare the results of all sides; the untouched model, the first of them, is no part of its own floor."""
    for score in scores:
        known = references[score is not scores[0]]
        theirs = score.side.results()
        score.results.compare(node, known, theirs, made, where=where, may_tie=score.may_tie)


def inputs_of(case: Case, step: int, before: Any, model: Side | None) -> Any:
    """Return the inputs of a step.

    Args:
        case: What runs.
        step: Of it.
        before: Inputs of the step before it; of the first step they are not read.
        model: Has run the step before, and chooses the next token where the case does not prescribe it.
    """
    if case.input_ids is None:
        return case.steps[step]
    if step == 0:
        return StepInputs.first(case)
    if before.to_come is not None and before.to_come.shape[1]:
        return before.following(before.to_come[:, 0])
    assert model is not None and model.logits is not None
    return before.following(model.logits[:, -1].argmax(-1))
