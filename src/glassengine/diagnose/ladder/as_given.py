"""Both models as the user gave them: training mode, and a second call with changed inputs.

What is judged runs in evaluation mode, each step once. A user's code may do otherwise: it runs modules that drop or
update statistics, and calls a model more than once. Both are tried here with the modules themselves, and what differs
is a difference of the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.draws import with_one_seed
from glassengine.errors import IncomparableError, UsageError
from glassengine.judge.end_to_end import results_of
from glassengine.judge.sides.arguments import CACHE, Arguments
from glassengine.judge.sides.protocol import Place
from glassengine.numerics.drift import SAME_DB, decibels, signal_of
from glassengine.numerics.mask_values import same_where
from glassengine.program import LoadedModel
from glassengine.program.onnx.session import OnnxModel, SessionSettings
from glassengine.program.representation.signature import named_results
from glassengine.program.user_code.forward import RandomDraws, describe_training, influential_modes
from glassengine.program.user_code.module_state import applied_state, own_copies
from glassengine.results import Findings, ResultComparison

_LOST_DB = 20.0
"""Signal of two calls in a row: below, a result is another."""

_REPEATED_DB = 60.0
"""Signal of two calls of one module with the same inputs: below, it remembers something."""

_MODES_CHANGED = "given in training mode, compared in evaluation mode: call .eval() in what you ship"


def require_two_models(baseline: LoadedModel, candidate: LoadedModel) -> None:
    """Refuse one object as both sides.

    Raises:
        IncomparableError: They are one.
    """
    if baseline.module is candidate.module:
        raise IncomparableError(
            "baseline and candidate are one object: nothing would be compared",
            got=f"{baseline.spec} and {candidate.spec} give the same {type(baseline.module).__name__}",
            expected="two models",
            hint="let each factory make a model of its own",
        )


def as_given(climb: Climb, baseline: LoadedModel, candidate: LoadedModel | None, *, calls_again: bool) -> None:
    """Let the unchanged sides of a climb run as they were given, and say what differs in that.

    Args:
        climb: With its sides.
        baseline: As it was loaded.
        candidate: Another model as it was loaded; None where the candidate is none.
        calls_again: Call both models a second time; steps that follow each other do so as it is.
    """
    models = {"baseline": baseline}
    sides: dict[str, Any] = {"baseline": climb.model}
    if candidate is not None:
        models["candidate"], sides["candidate"] = candidate, climb.scores[-1].side
        climb.notes += _filled(sides["candidate"].arguments)
    case = climb.cases[0]
    step: Mapping[str, Any] = case.steps[0] if case.steps else {"input_ids": case.input_ids}
    modes = modes_of(models, lambda who: _arguments(sides[who].arguments, step))
    climb.notes += modes.notes
    climb.differences += modes.differences
    for who in modes.mattering:
        sides[who].training = models[who].training
    if candidate is not None and baseline.stored is None and candidate.stored is None:
        for score in climb.scores:
            if score.side.place is Place.CANDIDATE and score.side.program is not None:
                programs = climb.program, score.side.program
                climb.seeded = with_one_seed(sides["baseline"], sides["candidate"], step, programs)
    calls_again = calls_again and not climb.program.generates
    if candidate is not None and calls_again and baseline.stored is None and not climb.differences:
        _call_twice(climb, *sides.values())


@dataclass
class Modes:
    """Training mode of the models of a check, as they were given.

    `mattering` has the modules, by side, whose training mode is a difference of the results.
    """

    mattering: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def differences(self) -> list[str]:
        """What differs, in words."""
        return [describe_training(who, names) for who, names in self.mattering.items()]


def modes_of(models: Mapping[str, LoadedModel], call_of: Callable[[str], Mapping[str, Any]]) -> Modes:
    """Return what differs in the training mode of the models.

    Args:
        models: "baseline", and "candidate" where it is another model.
        call_of: Gives the arguments of a forward of either.
    """
    found = Modes()
    baseline, candidate = models["baseline"], models.get("candidate")
    is_alone = candidate is None or candidate.stored is not None  # a file has no mode
    if all(len(one.training) == sum(1 for _ in one.module.named_modules()) for one in models.values()) or (
        candidate is not None and baseline.training == candidate.training
    ):
        if baseline.training:
            found.notes.append(f"{' and '.join(models)}: {_MODES_CHANGED}")
        return found
    for who, one in models.items():
        names: list[str] = []
        with contextlib.suppress(Exception):  # the forward raises again where it is judged, and is reported there
            names = influential_modes(one.module, one.training, call_of(who)) if one.training else []
        if names and is_alone:
            found.notes.append(f"{describe_training(who, names)}; compared in evaluation mode")
        elif names:
            found.mattering[who] = names
    return found


def _filled(arguments: Arguments | None) -> list[str]:
    """Return what the candidate is given that the baseline has no input for."""
    if arguments is None:
        return []
    given = {name: value for name, value in arguments.fixed.items() if name != CACHE}
    given |= dict.fromkeys(arguments.own, "positions 0, 1, ...")
    return [
        f"{name} of the candidate is given {value}: the baseline has no such input" for name, value in given.items()
    ]


def _arguments(arguments: Arguments | None, step: Mapping[str, Any]) -> dict[str, Any]:
    return dict(step) if arguments is None else arguments.of(step)


def _call_twice(climb: Climb, ours: Any, theirs: Any) -> None:
    """Call both modules with the last step, and again with changed inputs: nothing may be left of the first call."""
    step = climb.cases[-1].steps[-1]
    changed = _changed(step)
    if changed is None:
        return
    found = _calls(ours, step, changed)
    if found is None or all(signal_of(value, found.second.get(name)) > SAME_DB for name, value in found.first.items()):
        return  # the change does not show in what the baseline returns, or it cannot be called so
    other = _calls(theirs, step, changed)
    if other is None:
        climb.notes.append("a second call of the candidate, with other inputs, raises or draws random numbers")
        return
    names = [
        name
        for name, value in found.first.items()
        if name in found.second
        and name in other.second
        and name in other.first
        and other.first[name].shape == value.shape
    ]
    agree = {name: signal_of(found.first[name], other.first[name]) > SAME_DB for name in names}
    for name in names:
        if not same_where(other.kept[name], other.first[name], None) and same_where(
            found.kept[name], found.first[name], None
        ):
            climb.differences.append(f"a second call of the candidate overwrites the {name} that the first returned")
        elif other.remembers(name) and not found.remembers(name):
            climb.differences.append(
                f"a second call of the candidate gives a wrong {name}: something is left of the call before"
            )
        elif agree[name] and signal_of(found.second[name], other.second[name]) < _LOST_DB:
            stale = signal_of(other.first[name], other.second[name]) > SAME_DB
            how = "it is that of the first call" if stale else "the first call agrees"
            if stale or all(agree.values()):  # another wrong result has its own cause, which other inputs show here
                climb.differences.append(
                    f"a second call of the candidate, with other inputs, gives a wrong {name}: {how}"
                )


@dataclass(frozen=True)
class _Calls:
    """Results of two calls of a module in a row, with other inputs in the second one.

    Attributes:
        first: Of the first call.
        second: Of the second one.
        kept: The objects that the first call returned, after the second one.
        alone: Of a call with the inputs of the second one, without a call before it.
    """

    first: Mapping[str, torch.Tensor]
    second: Mapping[str, torch.Tensor]
    kept: Mapping[str, torch.Tensor]
    alone: Mapping[str, torch.Tensor]

    def remembers(self, name: str) -> bool:
        """Whether a result depends on the call before: the same code runs on the same inputs."""
        return name in self.alone and signal_of(self.alone[name], self.second[name]) < _REPEATED_DB


def _calls(side: Any, step: Mapping[str, Any], changed: Mapping[str, Any]) -> _Calls | None:
    """Return what calls give; None where one raises, or draws random numbers."""
    module: nn.Module = side.module
    draws = RandomDraws()  # type: ignore[no-untyped-call]

    def called(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return named_results(module(**own_copies(_arguments(side.arguments, given))))

    with torch.no_grad(), torch.random.fork_rng(devices=[]), draws:
        try:
            with applied_state(module, side.state):
                kept = called(step)
                first = {name: value.detach().clone() for name, value in kept.items()}
                second = called(changed)
            with applied_state(module, side.state):
                alone = called(changed)
        except Exception:  # of a user's code, which may not take such inputs
            return None
    return None if draws.number else _Calls(first, second, kept, alone)


def _changed(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return inputs with the same values elsewhere, so that they stay legal; None where nothing can be moved."""
    moved = 0

    def move(value: Any) -> Any:
        nonlocal moved
        if not isinstance(value, torch.Tensor) or value.dtype is torch.bool or value.is_complex() or not value.dim():
            return value
        if value.numel() < 2 or bool((value == value.flatten()[0]).all()) or not bool(value.isfinite().all()):
            return value
        if int(torch.unique(value).numel()) <= 2:
            return value  # a mask, which may hide all of a row elsewhere
        moved += 1
        return value.roll(1, -1) if value.shape[-1] > 1 else value.roll(1)

    changed = {name: move(value) for name, value in step.items()}
    return changed if moved else None


_LEAST = 1.0
"""In dB: less is the rounding of another order."""
_PART = 6.0
"""Optimizations cause a difference if their own change is at most so many dB smaller."""
_MOST_LOST = 6.0
"""A quantized file that loses more dB by optimizations is wrong: its grids explain less than a quarter of the noise."""


def as_run(baseline: LoadedModel, candidate: LoadedModel | None, settings: SessionSettings) -> None:
    """Let the results of ONNX files be those of a user's session: of the candidate with `settings`.

    Raises:
        UsageError: There are settings, and no file that they are for.
    """
    for model, its_own in ((baseline, SessionSettings()), (candidate, settings)):
        if model is not None and isinstance(model.module, OnnxModel):
            model.module.settings = its_own
    if settings.given and (candidate is None or not isinstance(candidate.module, OnnxModel)):
        raise UsageError("--session-options are for an ONNX file as candidate", expected="--candidate model.onnx")


def with_order(found: Findings, candidate: LoadedModel | None) -> Findings:
    """Name results that a file returns in another order than a tuple of the baseline: its user takes them by place."""
    if candidate is None or candidate.stored is None:
        return found
    places = {name: place for place, name in enumerate(results_of(candidate.stored))}
    names = {
        int(one.name): one.candidate_name
        for one in found.results
        if one.name.isdigit() and one.candidate_name in places and not one.candidate_name.isdigit()
    }
    moved = {place: name for place, name in names.items() if places[name] != place}
    if moved and {places[name] for name in names.values()} == names.keys():
        order = ", ".join(
            f"result {place} is {name}, its number {places[name]}" for place, name in sorted(moved.items())
        )
        found.differences = [*found.differences, f"the candidate returns its results in another order: {order}"]
    return found


def with_level(found: Findings, model: LoadedModel, written: Sequence[ResultComparison] = ()) -> Findings:
    """Name the level of optimization where it is the cause of a difference.

    Args:
        found: With the results of a user's session.
        model: What was run.
        written: The same results of the graph as it is written, where they were compared.
    """
    module, texts, wrong = model.module, [], []
    if not isinstance(module, OnnxModel) or module.settings is None:
        return found
    known = {one.name: one.snr_db for one in written}
    for one in (*found.costs, *found.results):
        before, (noise, signal) = known.get(one.name), module.apart.get(one.candidate_name, (0.0, 0.0))
        if one.snr_db is None or not noise or not signal:
            continue
        between = decibels(noise / signal)
        if before is not None and before - one.snr_db >= _LEAST:
            texts.append(f"cost {before - one.snr_db:.1f} dB of {one.name}: {before:.1f} dB without them")
            if before - one.snr_db > _MOST_LOST:
                wrong.append(texts[-1])
        elif before is None and not one.agrees and between < one.snr_db + _PART:
            texts.append(f"change {one.name}: {between:.1f} dB from the graph as it is written")
    if not texts:
        return found
    said = f"ONNX Runtime's optimizations at level {module.settings.level!r} "
    notes = [said + text for text in dict.fromkeys(texts)]
    found.differences = [*found.differences, *(said + text for text in dict.fromkeys(wrong))]
    found.notes = [*notes, *found.notes]
    found.explanation = None if wrong else notes[0]  # a difference is the reason already
    return found
