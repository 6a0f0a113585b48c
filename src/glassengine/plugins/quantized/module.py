"""A module that was quantized in memory, beside the unquantized one: its weights by their grids, its results twice.

What it returns may differ from the baseline's by what its weights cost, and no more: the baseline with the quantized
weights in it (the twin) runs too, and what the candidate returns is as near to the twin's as its arithmetic lets it.

    weights are quantized alone      within a half of what the weights cost, or rounding of the dtype
    inputs of products too           within four times of that: integers of 8 bits for both cost about the same
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.diagnose.ladder.as_given import modes_of
from glassengine.diagnose.ladder.levels import arguments_of
from glassengine.numerics.judgement import unit_roundoff
from glassengine.plugins.quantized.check import check_quantized
from glassengine.plugins.quantized.effects import difference, forwards_of, outcome_of
from glassengine.plugins.quantized.result import LEVEL
from glassengine.program import LoadedModel
from glassengine.program.quantized.modules import QuantizedModule
from glassengine.progress import Progress, silent
from glassengine.results import Divergence, Findings, Hint, Policy

_OF_WEIGHTS = 0.5
_OF_INPUTS = 4.0
_ROUNDINGS = 8.0


@torch.no_grad()
def check_quantized_module(
    baseline: LoadedModel,
    candidate: LoadedModel,
    held: QuantizedModule,
    given: Any,
    *,
    steps: int = 3,
    policy: Policy,
    progress: Progress = silent,
) -> Findings:
    """Judge a quantized module: each weight by the step of its grid, the results by what the weights explain.

    Args:
        baseline: Unquantized; its weights are exchanged for a while and put back.
        candidate: Quantized, as it runs.
        held: Of the candidate.
        given: Inputs, as `check` reads them; None makes some up.
        steps: As for `check_quantized`.
        policy: Of `check`; every weight is judged, whatever the least coverage is.
        progress: Called with an event when a stage begins.
    """
    if not baseline.generation.takes_tokens:
        given = arguments_of(baseline, given)
    candidate = dataclasses.replace(candidate, metadata={**candidate.metadata, "quantization": {"method": held.method}})
    with untied(baseline.module, held.steps):
        found = check_quantized(
            baseline,
            candidate,
            held.steps,
            given=given,
            weights=held.weights,
            steps=steps,
            policy=policy,
            progress=progress,
        )
        forwards = forwards_of(baseline, given, steps)
        expected, actual = outcome_of(baseline.module, forwards), outcome_of(candidate.module, forwards)
        with _exchanged(baseline.module, held.weights):
            twin = outcome_of(baseline.module, forwards)
    cost, apart = difference(expected, twin)["error"], difference(twin, actual)["error"]
    dtype = getattr(torch, baseline.dtype)
    power = float(twin.rows.double().square().sum())
    share = _OF_INPUTS if held.rounds_inputs else _OF_WEIGHTS
    if apart > max(share**2 * cost, (_ROUNDINGS * unit_roundoff(dtype)) ** 2 * power):
        _add_unexplained(found, apart, cost)
    modes = modes_of({"baseline": baseline, "candidate": candidate}, lambda who: forwards[0])
    found.notes = modes.notes
    found.differences = modes.differences
    return found


def _add_unexplained(found: Findings, apart: float, cost: float) -> None:
    """Call the results wrong: they differ by more than the weights explain."""
    times = (apart / cost) ** 0.5 if cost else float("inf")
    text = f"the results differ by {times:.3g} times what the quantized weights cost: it computes something else"
    found.results = [dataclasses.replace(one, verdict="wrong", reason=text) for one in (*found.costs, *found.results)]
    found.costs = ()
    name = found.results[0].name if found.results else "output"
    site = f".:out.{name}"
    hint = Hint("other", text, 0.9, evidence="not its weights")
    origin = Divergence.without_run(site, "wrong", (hint,), level=LEVEL)
    found.origins = [*found.origins, origin]
    found.first_divergence = found.first_divergence or origin
    (level,) = found.levels
    found.levels = [dataclasses.replace(level, verdict="wrong", first_divergence=level.first_divergence or origin)]


@contextlib.contextmanager
def untied(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Give what shares its weight with another module one of its own: the candidate quantized one of the two."""
    known = dict(module.named_parameters())
    tied = []
    for name in names:
        path, _, last = name.rpartition(".")
        with contextlib.suppress(AttributeError):
            part = module.get_submodule(path)
            parameter = part._parameters.get(last)
            if name not in known and parameter is not None:
                tied.append((part, last, parameter))
    try:
        for part, last, parameter in tied:
            part._parameters[last] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        yield
    finally:
        for part, last, parameter in tied:
            part._parameters[last] = parameter


@contextlib.contextmanager
def _exchanged(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    known = dict(module.named_parameters())
    both: Sequence[tuple[nn.Parameter, Tensor]] = [
        (known[name], value) for name, value in weights.items() if name in known and known[name].shape == value.shape
    ]
    before = [parameter.data for parameter, _ in both]
    try:
        for parameter, value in both:
            parameter.data = value.to(parameter.dtype)
        yield
    finally:
        for (parameter, _), data in zip(both, before, strict=True):
            parameter.data = data
