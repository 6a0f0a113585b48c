"""The updates of a training run, judged by the baseline's optimizer from the run's own gradients and memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.diagnose.training.findings import LEVELS, TrainingFindings
from glassengine.diagnose.training.run import OptimizerFactory, StepTaken, options_of, repeat_update, split
from glassengine.diagnose.training.update_mistakes import Updates, kind_of_option
from glassengine.numerics.float64 import double
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.verdict import Reference
from glassengine.results import FLAGGED, Divergence, Hint, Pair, Skipped, WrittenDifferently, worst


def judge_updates(
    found: TrainingFindings, baseline: nn.Module, steps: Sequence[StepTaken], optimizer: OptimizerFactory
) -> None:
    """Judge every update of the candidate by the baseline's optimizer, from the candidate's own gradients."""
    generator = torch.Generator().manual_seed(0)

    def disturbed(tensor: Tensor) -> Tensor:
        unit = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return double(tensor) * (1 + unit_roundoff(tensor.dtype) * unit)

    changes: list[Callable[[Tensor], Tensor]] = [double, lambda tensor: tensor, disturbed]
    lanes = []
    for lane in range(len(changes)):
        twin = copy.deepcopy(baseline)
        twin = twin if lane == 1 else twin.double()
        made, scheduler = split(optimizer(twin))
        lanes.append((made, scheduler, {parameter: name for name, parameter in twin.named_parameters()}))
    flagged: set[str] = set()
    for number, step in enumerate(steps):
        results = []
        for (made, _, names), change in zip(lanes, changes, strict=True):
            results.append(repeat_update(made, names, step, change))
        updates = Updates(lanes[0][0], lanes[0][2], step)
        hints = dict(_options_differ(options_of(lanes[1][0], lanes[1][2]), step.options))
        for site, exact, native, noisy, theirs in _updated(results, step, found, number):
            judgement = Reference(double(exact), native, [double(noisy)], dtype=native.dtype, valid=None).judge(theirs)
            hint = hints.get(site.partition(":")[0])
            if judgement.verdict == "suspicious" and hint is not None:
                # Two kinds of evidence: too large for rounding, and other hyperparameters.
                judgement = replace(
                    judgement, verdict="wrong", reason="written differently, and too large for rounding"
                )
            if hint is not None:
                known = found.written.get(hint)
                verdict = judgement.verdict if known is None else worst([known.verdict, judgement.verdict])
                found.written[hint] = WrittenDifferently(known.site if known else site, site, hint, verdict, "update")
            case = f"step {number}"
            pair = Pair(number, site, site, "name", 1.0, judgement.verdict, "reverse replay", case=case, level="update")
            found.pairs.append(replace(pair, noise_ratio=judgement.noise_ratio, reason=judgement.reason))
            if judgement.verdict in FLAGGED and site not in flagged:
                flagged.add(site)
                tried = updates.explain(site, exact, native, theirs)
                guess = tried or (Hint(kind_of_option(hint.partition(":")[0]), hint, 1.0, "argument") if hint else None)
                guesses = () if guess is None else (guess,)
                found.origins.append(
                    Divergence(
                        level="update",
                        step=number,
                        site=site,
                        node=None,
                        candidate_site=site,
                        source=None,
                        verdict=judgement.verdict,
                        noise_ratio=judgement.noise_ratio,
                        bound_ratio=None,
                        introduced=judgement.rms_error,
                        inherited=0.0,
                        hints=guesses,
                    )
                )
        for _, scheduler, _ in lanes:
            if scheduler is not None:
                scheduler.step()
    found.origins.sort(key=lambda d: (d.step, LEVELS.index(d.level or "")))


def _updated(
    results: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Any]]]],
    step: StepTaken,
    found: TrainingFindings,
    number: int,
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Yield (site, exact, native, noisy, candidate) of the optimizer's memory first: parameters are made from it."""
    (parameters, _), (_, native), _ = results
    for name in step.parameters_after:
        for key in native.get(name, {}):
            values = [result[1].get(name, {}).get(key) for result in results]
            theirs = step.memory_after.get(name, {}).get(key)
            site = f"{name}:state.{key}"
            if all(isinstance(value, Tensor) for value in (*values, theirs)):
                yield site, *values, theirs  # type: ignore[misc]
            elif isinstance(values[1], Tensor) and number == 0:
                found.skipped.append(Skipped(site, "baseline", "the candidate's optimizer keeps no such value"))
    for name, theirs in step.parameters_after.items():
        yield f"{name}:param", parameters[name], results[1][0][name], results[2][0][name], theirs


def _options_differ(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    for name, options in ours.items():
        other = theirs.get(name)
        if other is None:
            yield name, "the candidate's optimizer does not have this parameter"
            continue
        differing = [key for key in options if key in other and options[key] != other[key]]
        if differing:
            yield (
                name,
                "; ".join(f"{key}: {options[key]} in the baseline, {other[key]} in the candidate" for key in differing),
            )
