"""A quantized candidate beside its unquantized baseline: what each layer costs, and what is a mistake.

    weights     each pair by name: within the step of its own grid, or a mistake (`numerics.weight_error`)
    outputs     the baseline runs; each module with a quantized weight runs again with it, on the same inputs
    logits      the baseline runs once per quantized weight, with that one in place, and once as the candidate

Both sides are loaded in float32, so that the rounding of a smaller dtype is not taken for quantization.

A module that was quantized in memory, beside the unquantized one: its weights by their grids, its results twice.

What it returns may differ from the baseline's by what its weights cost, and no more: the baseline with the quantized
weights in it (the twin) runs too, and what the candidate returns is as near to the twin's as its arithmetic lets it.

    weights are quantized alone      within a half of what the weights cost, or rounding of the dtype
    inputs of products too           within four times of that: integers of 8 bits for both cost about the same
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.diagnose.ladder.as_given import modes_of
from glassengine.diagnose.ladder.levels import arguments_of
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.errors import IncomparableError
from glassengine.judge.cases import Inputs, read_inputs
from glassengine.judge.sides.module import threads_for
from glassengine.numerics import rescaling
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.weight_error import WeightError, judge_weight
from glassengine.plugins.quantized.effects import (
    Weight,
    checkpoint_drift,
    difference,
    forwards_of,
    one_by_one,
    outcome_of,
    watching,
)
from glassengine.plugins.quantized.result import LEVEL, findings_of, finished, result_of
from glassengine.program import LoadedModel, load_model
from glassengine.program.loading.quantized import quantization_steps
from glassengine.program.loading.quantized_grid import QuantizedModule
from glassengine.program.user_code.module_state import weights_of
from glassengine.progress import Progress, Work, silent
from glassengine.results import (
    CaseInputs,
    Comparison,
    Divergence,
    DriftRow,
    Findings,
    Hint,
    Interrupted,
    Policy,
    Quantization,
    Skipped,
)
from glassengine.results.answer import Origin, input_used

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_quantized_checkpoint(request: CheckRequest, _: Any) -> Comparison:
    """Load both sides, in float32 unless another dtype is given, and judge them with `check_quantized`.

    Every weight is judged, whatever the least coverage is.

    Raises:
        UsageError: A side cannot be loaded.
        IncomparableError: As `check_quantized`.
    """
    progress, policy = request.progress, replace(request.policy, min_coverage=0.0)
    dtype = "float32" if request.dtype == "auto" else request.dtype
    progress(Work.LOADING.says("loading the baseline"))
    ours = load_model(request.baseline, dtype=dtype, adapter=request.adapter, **request.loading)
    progress(Work.DEQUANTIZING.says("dequantizing the candidate"))
    candidate = str(request.candidate)
    theirs = load_model(candidate, dtype=dtype, **request.loading)
    steps_of = quantization_steps(candidate, **request.loading)
    with threads_for(ours.module):
        given = read_inputs(request.inputs)
        return check_quantized(
            ours, theirs, steps_of, given=given, steps=request.steps, policy=policy, progress=progress
        ).conclude(policy)


@torch.no_grad()
def check_quantized(
    baseline: LoadedModel,
    candidate: LoadedModel,
    steps_of: Mapping[str, Tensor],
    *,
    given: Inputs = None,
    steps: int = 3,
    policy: Policy,
    progress: Progress = silent,
    weights: Mapping[str, Tensor] | None = None,
) -> Findings:
    """Judge a quantized model against the unquantized one, and say which layers cost how much.

    Args:
        baseline: In float32; its weights are exchanged for a while and put back.
        candidate: Dequantized, in float32; or as it runs, with `weights`.
        steps_of: Parameter -> step of each element, see `quantization_steps`.
        given: Inputs, as `check` reads them.
        steps: Tokens that the baseline adds to each prompt.
        policy: Of `check`; every weight is judged, whatever the least coverage is.
        progress: Called with an event when a stage begins.
        weights: What the candidate's quantized weights stand for, where it is not dequantized.

    Raises:
        IncomparableError: No quantized weight has a counterpart of its shape in the baseline.
    """
    ours, theirs = _weights_of(baseline.module), {**_weights_of(candidate.module), **(weights or {})}
    both = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    quantized = [name for name in both if name in steps_of]
    if not quantized:
        raise IncomparableError(
            f"no quantized weight of {candidate.spec} is one of {baseline.spec}",
            got=", ".join(list(steps_of)[:3]),
            expected=", ".join(list(ours)[:3]),
        )
    progress(Work.JUDGING.says(f"judging {len(quantized)} quantized weights"))
    different = [name for name in both if name not in steps_of and not _is_same(ours[name], theirs[name])]
    found_weights, different = _judge(ours, theirs, steps_of, quantized, different)
    progress(Work.RUNNING.says("running the baseline"))
    forwards = forwards_of(baseline, given, steps)
    parameters = dict(baseline.module.named_parameters())
    with watching(baseline.module, parameters, found_weights):
        expected = outcome_of(baseline.module, forwards)
    found = outcome_of(candidate.module, forwards)
    total = difference(expected, found)
    progress(Work.JUDGING.says("measuring the drift"))
    drift = checkpoint_drift(baseline.module, candidate.module, forwards)
    stopped = one_by_one(baseline.module, parameters, found_weights, forwards, expected, progress)
    result = Quantization(
        method=str((candidate.metadata.get("quantization") or {}).get("method")),
        num_tokens=len(expected.rows),
        logits_snr_db=total["snr_db"],
        kl=total["kl"],
        token_agreement=total["agreement"],
        weights=finished(found_weights),
        different=tuple(different),
    )
    only = [
        Skipped(name, side, f"the {other} has no such weight of its shape", level=LEVEL)
        for side, other, names in (("baseline", "candidate", ours), ("candidate", "baseline", theirs))
        for name in names
        if name not in both
    ]
    ends = result_of(expected, found, total, len(forwards))
    last = DriftRow(ends.name, ends.name, "result", len(forwards), total["snr_db"], total["cosine"])
    answer = findings_of(baseline, candidate, result, only, both, policy)
    answer.costs, answer.results = ([ends], []) if ends.reason is None else ([], [ends])  # another shape is no loss
    answer.drift = [*drift, last]
    answer.inputs = [_inputs(f"forward {at}", one, is_given=given is not None) for at, one in enumerate(forwards)]
    if stopped is not None:
        answer.interrupt(stopped)
        raise Interrupted(answer.conclude(policy))
    return answer


def _inputs(name: str, forward: Mapping[str, Any], *, is_given: bool) -> CaseInputs:
    origin: Origin = "given" if is_given else "built-in prompts" if "input_ids" in forward else "made up"
    tensors = {key: value for key, value in forward.items() if isinstance(value, Tensor)}
    return CaseInputs(name, 1, tuple(input_used(key, one, step=0, origin=origin) for key, one in tensors.items()))


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    stored = module.state_dict().keys()
    tensors = weights_of(module).items()
    return {name: tensor.detach() for name, tensor in tensors if name in stored and tensor.is_floating_point()}


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two weights are the same, in the dtype of either checkpoint."""
    return any(torch.equal(ours.to(dtype), theirs.to(dtype)) for dtype in _DTYPES)


def _judge(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    steps_of: Mapping[str, Tensor],
    quantized: Sequence[str],
    different: Sequence[str],
) -> tuple[list[Weight], list[str]]:
    """Return the quantized weights, judged, and the unquantized ones that nothing explains."""

    def judged(name: str, baseline: Tensor) -> WeightError:
        same = {other: ours[other] for other in quantized if other != name and ours[other].shape == ours[name].shape}
        return judge_weight(baseline, theirs[name], steps_of[name], same)

    weights = {name: Weight(name, judged(name, ours[name]), theirs[name], steps_of[name]) for name in quantized}
    fitted = {}
    for name, weight in weights.items():
        if weight.error.mistakes and ours[name].dim() == 2:
            factors = rescaling.fit(ours[name], theirs[name])
            if factors is not None and not judged(name, factors.scaled(ours[name])).mistakes:
                fitted[name] = factors
    vectors = [(ours[name], theirs[name]) for name in different if ours[name].dim() == 1]
    for name, factors in rescaling.undone(fitted, vectors).items():
        weight = weights[name]
        weight.is_rescaled, weight.error = True, judged(name, factors.scaled(ours[name]))
        weight.value, weight.step = factors.undone(theirs[name]).float(), factors.undone(steps_of[name]).float()
    known = [fitted[name] for name, weight in weights.items() if weight.is_rescaled]
    left = [
        name
        for name in different
        if ours[name].dim() != 1 or not rescaling.is_undone_vector(ours[name], theirs[name], known)
    ]
    return list(weights.values()), left


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
    candidate = replace(candidate, metadata={**candidate.metadata, "quantization": {"method": held.method}})
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
    found.results = [replace(one, verdict="wrong", reason=text) for one in (*found.costs, *found.results)]
    found.costs = ()
    name = found.results[0].name if found.results else "output"
    site = f".:out.{name}"
    hint = Hint("other", text, 0.9, evidence="not its weights")
    origin = Divergence.without_run(site, "wrong", (hint,), level=LEVEL)
    found.origins = [*found.origins, origin]
    found.first_divergence = found.first_divergence or origin
    (level,) = found.levels
    found.levels = [replace(level, verdict="wrong", first_divergence=level.first_divergence or origin)]


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
