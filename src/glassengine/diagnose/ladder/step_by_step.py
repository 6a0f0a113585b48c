"""Parts of a check of plain modules that have a program each: steps with other numbers, or with another state.

A number among the arguments becomes part of the graph, so steps with other numbers are other programs. What a module
remembers (a cache in its buffers, written in place) is an implicit input of a step: each step is exported and
run with what the unchanged module held before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from glassengine.errors import IncomparableError, UsageError
from glassengine.judge.sides.arguments import Arguments, matched
from glassengine.program import LoadedModel, Program, export_program
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.user_code.module_state import ModuleState, changes_state, states_before
from glassengine.program.user_code.tracing import SPECIALIZED
from glassengine.progress import Progress, Work
from glassengine.results import Findings, Result, Skipped, SliceMaxima

Step = Mapping[str, Any]
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class StepStage:
    """Steps that one program runs.

    Attributes:
        baseline: With the state that it begins with, where it has one.
        candidate: Likewise.
        steps: What is run.
        numbers: Which of all steps they are.
        ours: Program of the baseline; None where it is not exported yet.
        theirs: Program of the candidate, or why it has none.
        ours_of: How steps become arguments of the baseline; None where they are its own.
        theirs_of: How they become arguments of the candidate.
    """

    baseline: LoadedModel
    candidate: LoadedModel
    steps: Sequence[Step]
    numbers: Sequence[int]
    ours: Program | None = None
    theirs: Program | UsageError | None = None
    ours_of: Arguments | None = None
    theirs_of: Arguments | None = None


def staged(baseline: LoadedModel, candidate: LoadedModel, steps: Sequence[Step], progress: Progress) -> list[StepStage]:
    """Return the stages of a check, with their programs.

    Raises:
        UsageError: The baseline cannot be traced.
        IncomparableError: The candidate takes other inputs than there are.
    """
    steps, theirs = matched(baseline, candidate, steps)
    ours = Arguments({name: name for step in steps for name in step if name not in theirs.own})
    progress(Work.EXPORTING.says("exporting both"))
    found = []
    for stage in _stages(baseline, candidate, steps, ours, theirs):
        found += _exported(replace(stage, ours_of=ours if theirs.own else None, theirs_of=theirs), ours, theirs)
    return found


def require_no_memory(model: LoadedModel, steps: Sequence[Step]) -> None:
    """Refuse several steps of a plain module that remembers, where only another module could be run beside it.

    Raises:
        IncomparableError: A forward changes what the module holds, and there are steps after the first.
    """
    if len(steps) > 1 and _remembers(model, steps[0]):
        raise IncomparableError(
            "the baseline remembers something from one step to the next: only another module is judged beside it",
            got=f"{len(steps)} steps; a forward changes what {type(model.module).__name__} holds",
            expected="one step, or what is remembered as arguments and results",
            hint="--candidate file.py:factory judges each step with what both remember before it",
        )


def specialized(stage: StepStage) -> list[Skipped]:
    """Return what to say of programs that hold for one step alone."""
    found = []
    for side, program, model in (
        ("baseline", stage.ours, stage.baseline),
        ("candidate", stage.theirs, stage.candidate),
    ):
        how = program.metadata.get(SPECIALIZED) if isinstance(program, Program) else None
        if how is not None:
            is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in model.module.modules())
            why = "it is TorchScript" if is_scripted else "it looks at values"
            reason = f"{why}, so that it was {how}: branches and loops are those of this step"
            found.append(Skipped("*", side, reason, level="candidate"))
    return found


def program_of(
    model: LoadedModel, steps: Sequence[Step] | None = None, *, with_values: bool = False
) -> Program | UsageError:
    """Return the program of a model, or why it has none; `with_values` is for one step alone."""
    try:
        return export_program(model, inputs=steps, specialized=with_values)
    except UsageError as error:
        return error


def _exported(stage: StepStage, ours: Arguments, theirs: Arguments) -> list[StepStage]:
    """Return a stage with its programs; one for each step where a side can be traced with its values alone."""
    given, other = [ours.of(step) for step in stage.steps], [theirs.of(step) for step in stage.steps]
    left, right = program_of(stage.baseline, given), program_of(stage.candidate, other)
    if isinstance(left, Program) and isinstance(right, Program):
        return [replace(stage, ours=left, theirs=right)]
    found = []
    for place, number in enumerate(stage.numbers):
        one, two = left, right
        if isinstance(one, UsageError):
            one = program_of(stage.baseline, [given[place]], with_values=True)
            if isinstance(one, UsageError):
                assert isinstance(left, UsageError)
                raise left
        if isinstance(two, UsageError):
            two = program_of(stage.candidate, [other[place]], with_values=True)
            if isinstance(two, UsageError) and isinstance(left, Program):
                return [replace(stage, ours=left, theirs=right)]
        found.append(replace(stage, steps=_part(stage.steps, [place]), numbers=[number], ours=one, theirs=two))
    return found


def _stages(
    baseline: LoadedModel, candidate: LoadedModel, steps: Sequence[Step], ours: Arguments, theirs: Arguments
) -> list[StepStage]:
    given = [ours.of(step) for step in steps]
    other = [theirs.of(step) for step in steps]
    keeps, other_keeps = _remembers(baseline, given[0]), _remembers(candidate, other[0])
    if keeps:
        before = states_before(baseline.module, given)
        others: Sequence[ModuleState | None] = [None] * len(steps)
        if other_keeps:
            others = states_before(candidate.module, other)
        return [
            StepStage(replace(baseline, state=a), replace(candidate, state=b), _part(steps, [number]), [number])
            for number, (a, b) in enumerate(zip(before, others, strict=True))
        ]
    if other_keeps:
        candidate = replace(candidate, state=ModuleState.of(candidate.module))
    groups: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        groups.setdefault(repr([(k, v) for k, v in sorted(step.items()) if isinstance(v, _PLAIN)]), []).append(number)
    if len(groups) == 1:
        return [StepStage(baseline, candidate, steps, range(len(steps)))]
    return [StepStage(baseline, candidate, _part(steps, numbers), numbers) for numbers in groups.values()]


def numbered(found: Findings, numbers: Sequence[int]) -> Findings:
    """Return the findings of a stage with its steps counted as they are in the inputs."""
    if list(numbers) == list(range(len(numbers))):
        return found
    values = {one.name: getattr(found, one.name) for one in dataclasses.fields(found)}
    changed = {
        name: _numbered(tuple(value) if isinstance(value, list) else value, numbers) for name, value in values.items()
    }
    return replace(found, **changed)


def _numbered(value: Any, numbers: Sequence[int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_numbered(item, numbers) for item in value)
    if not isinstance(value, Result):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    changed = {name: _numbered(item, numbers) for name, item in fields.items() if isinstance(item, (tuple, Result))}
    step = fields.get("step")
    if isinstance(step, int) and not isinstance(value, SliceMaxima) and step < len(numbers):
        changed["step"] = numbers[step]
    return dataclasses.replace(value, **changed)  # type: ignore[type-var]


def _part(steps: Sequence[Step], numbers: Sequence[int]) -> Sequence[Step]:
    kept = [dict(steps[number]) for number in numbers]
    return MadeUp(kept, recipes=steps.recipes, origin=steps.origin) if isinstance(steps, MadeUp) else kept


def _remembers(model: LoadedModel, step: Step) -> bool:
    """Whether a forward changes what a module holds; models of transformers keep no cache here."""
    module: nn.Module = model.module
    if model.stored is not None or is_pretrained(module):
        return False
    with contextlib.suppress(Exception):  # errors are raised where it is exported
        return changes_state(module, step)
    return False
