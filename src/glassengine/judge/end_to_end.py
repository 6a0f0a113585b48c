"""The results of both sides, end to end: what a user of the model sees.

Nothing inside enters: a result is judged against the float64 reference by the noise that all ops above it add up to,
measured with the program in its own dtype, two runs with Monte-Carlo rounding, and the untouched model: another
implementation in floating point. Elements below a tie are exempt only where the candidate may really have chosen
otherwise: where it was seen to, or where its choice was not observed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from glassengine.judge.graphs.by_result import by_value
from glassengine.judge.result_figures import result_figures, worse
from glassengine.numerics.exemptions import DRAWN
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.kinds import unequal
from glassengine.numerics.metrics.drift import LITTLE_LEFT, LOST, DriftSums, loss_of
from glassengine.numerics.metrics.tolerance import is_inexact, tolerance
from glassengine.numerics.verdict import Reference
from glassengine.program.representation.outputs import PREFIX
from glassengine.program.representation.program import Program
from glassengine.program.user_code.module_state import STATE
from glassengine.recording.formats.files import of_number
from glassengine.recording.layout.values import dtype_name
from glassengine.results import FLAGGED, DriftRow, ResultComparison, Verdict

_CHOSEN_ALIKE = "both sides chose alike where rounding might have chosen: no tie explains the difference"
_RANDOM = "every run draws new random numbers"
_MISSING = "the candidate returns no such result"
_UNDECIDED = "not judged: the baseline's own rounding changes it as much on these inputs"


@dataclass
class EndToEnd:
    """Keeps, for each result of the baseline, the worst that one side made of it.

    Attributes:
        program: The baseline's.
        rung: Of the side.
        not_compared: Result -> why it was not.
        called: Of a record, result -> what it calls that, and how this is known; None of what runs.
    """

    program: Program
    rung: str
    not_compared: dict[str, str] = field(default_factory=dict)
    called: Mapping[str, tuple[str, str]] | None = None
    _sums: dict[str, DriftSums] = field(default_factory=dict)
    _found: dict[str, ResultComparison] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _other_names: dict[str, str] = field(default_factory=dict)
    _beside: dict[str, None] = field(default_factory=dict)
    _varying: set[str] = field(default_factory=set)

    @property
    def missing(self) -> list[str]:
        """Names of results that the side does not return at all."""
        return [name for name, why in self.not_compared.items() if why is _MISSING and name not in self._found]

    @property
    def found(self) -> tuple[ResultComparison, ...]:
        """One entry for each result that was compared, in the order of the baseline's."""
        return tuple(self._found[name] for name in [*results_of(self.program), *self._beside] if name in self._found)

    @property
    def constant(self) -> list[str]:
        """Names of results whose elements were all the same number in every step: little can be seen in them."""
        return [name for name in self._found if name not in self._varying]

    def drift_rows(self) -> tuple[DriftRow, ...]:
        """Return a row of the table of drift for each result."""
        return tuple(self._sums[one.name].row(one.name, one.candidate_name, "result") for one in self.found)

    def compare(
        self,
        node: str,
        reference: Reference,
        theirs: Mapping[str, torch.Tensor],
        ours: Mapping[str, torch.Tensor],
        *,
        where: tuple[str, int],
        may_tie: bool,
    ) -> None:
        """Compare the results that `node` is.

        Args:
            node: Of the baseline's program.
            reference: Of its value in this step.
            theirs: Results of the side in this step.
            ours: Those of the untouched baseline.
            where: Case and step.
            may_tie: Whether the side chose otherwise at a tie in this case, or may have, if unobserved.
        """
        for name in results_of(self.program):
            if self.program.output_nodes[name] != node:
                continue
            self._seen.add(name)
            own, method = self._counterpart(name, theirs, ours)
            if own is None:
                self.not_compared[name] = _MISSING
            elif DRAWN in reference.known.exempt:
                self.not_compared[name] = _RANDOM
            else:
                value = theirs[own]
                if self.called is not None:
                    reference, value = self._last_positions(node, reference, value)
                baseline = ours.get(name, reference.native)
                if baseline.shape != reference.native.shape:
                    baseline = reference.native
                judged = _judged(reference, value, may_tie)
                if baseline is value and judged[0].verdict in FLAGGED:
                    baseline = reference.exact.to(baseline.dtype)  # it does not leave itself, but its program
                self._add(name, own, method, judged, reference.valid, baseline, value, where)

    def _last_positions(self, node: str, reference: Reference, value: torch.Tensor) -> tuple[Reference, torch.Tensor]:
        """Fill up a recorded result of which the last positions alone were asked for; these count."""
        at, size = self.program.sites.by_node[node][0].axes.get("sequence"), reference.exact.shape
        missing = 0 if at is None or value.dim() != len(size) else size[at] - value.shape[at]
        if at is None or missing <= 0:
            return reference, value
        rest = list(value.shape)
        rest[at] = missing
        is_there = torch.arange(size[at]).reshape([-1 if axis == at else 1 for axis in range(len(size))]) >= missing
        return reference.among(is_there), torch.cat([value.new_zeros(rest), value], at)

    def compare_signals(
        self, theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], where: tuple[str, int]
    ) -> None:
        """Compare results of a quantized candidate: by what is left of the signal.

        Args:
            theirs: Results of the candidate in this step.
            ours: Those of the untouched baseline.
            where: Case and step.
        """
        for name in results_of(self.program):
            own, method = self._counterpart(name, theirs, ours)
            if own is None or name not in ours:
                self.not_compared[name] = _MISSING
            else:
                judged = by_signal(ours[name], theirs[own]), 0.0
                self._add(name, own, method, judged, None, ours[name], theirs[own], where, judged_by="signal")

    def end_step(
        self, theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], where: tuple[str, int]
    ) -> None:
        """Compare the results that no op makes: inputs and weights that are passed on."""
        for name in results_of(self.program):
            own, method = self._counterpart(name, theirs, ours)
            if name in self._seen or name not in ours or own is None:
                continue
            judged = _passed_on(ours[name], theirs[own]), 0.0
            self._add(name, own, method, judged, None, ours[name], theirs[own], where)
        self._seen = set()

    def compare_inputs(
        self,
        given: Mapping[str, torch.Tensor],
        theirs: Mapping[str, torch.Tensor],
        ours: Mapping[str, torch.Tensor],
        where: tuple[str, int],
    ) -> None:
        """Compare what both sides leave in the inputs that one of them writes to: its caller sees it.

        Args:
            given: Inputs of the step, by name.
            theirs: Those that the side has written to, as it leaves them.
            ours: Likewise of the untouched baseline.
            where: Case and step.
        """
        for name in given:
            if name not in theirs and name not in ours:
                continue
            own, left = theirs.get(name, given[name]), ours.get(name, given[name])
            judged = _passed_on(left, own)
            if judged.verdict != "identical":
                who = "both write" if name in ours and name in theirs else "the baseline writes"
                judged = replace(judged, reason=f"{who if name in ours else 'the candidate writes'} to it")
            self._add(f"{name} after the forward", name, "name", (judged, 0.0), None, left, own, where)
            self._beside[f"{name} after the forward"] = None

    def compare_plain(self, theirs: Mapping[str, Any], ours: Mapping[str, Any], where: tuple[str, int]) -> None:
        """Compare results other than tensors: numbers and text; None is listed as not compared.

        Args:
            theirs: Of the side in this step, by name.
            ours: Those of the untouched baseline.
            where: Case and step.
        """
        for name, value in ours.items():
            is_known, other = isinstance(value, (bool, int, float, str)), theirs.get(name)
            if name not in theirs or not is_known:
                self.not_compared[name] = _MISSING if is_known else f"the baseline returns {type(value).__name__}"
                continue
            pair = of_number(value), of_number(other)
            if not all(isinstance(one, torch.Tensor) for one in pair):  # text: whether it is the same
                pair = torch.tensor(True), torch.tensor(type(value) is type(other) and value == other)
            judged = _passed_on(*pair)
            if judged.verdict not in ("identical", "rounding"):
                judged = replace(judged, reason=f"{other!r:.40}, baseline {value!r:.40}")
            self._add(name, name, "name", (judged, 0.0), None, *pair, where)
            self._beside[name] = None

    def _counterpart(
        self, name: str, theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]
    ) -> tuple[str | None, str]:
        """Return the side's name for a result; by value, place and kind where names differ, as in the first step."""
        if name in theirs:
            return name, "name"
        names = results_of(self.program)
        left = {one: ours[one] if one in ours else self._fake(one) for one in names if one not in theirs}
        others = {one: made for one, made in theirs.items() if one not in names}
        if others and not self._other_names.keys() & left.keys():
            self._other_names |= by_value(left, others)
        found = self._other_names.get(name)
        return (found, "position") if found in others else (None, "")

    def _is_logits(self, names: Sequence[str], value: torch.Tensor) -> bool:
        """Whether a result scores the tokens of a vocabulary: by the name that either side has for it, or by size."""
        size = self.program.metadata.get("vocab_size")
        is_named = any(name.rpartition(".")[2] == "logits" for name in names)
        return value.is_floating_point() and value.dim() > 1 and (is_named or value.shape[-1] == size)

    def _fake(self, name: str) -> object:
        """The result of the baseline as its program knows it."""
        return self.program.node(self.program.output_nodes[name]).meta.get("val")

    def _add(
        self,
        name: str,
        own: str,
        method: str,
        judged: tuple[Judgement, float],
        valid: torch.Tensor | None,
        baseline: torch.Tensor,
        value: torch.Tensor,
        where: tuple[str, int],
        *,
        judged_by: Literal["noise floor", "signal"] = "noise floor",
    ) -> None:
        judgement, exempt = judged
        own, method = (self.called or {}).get(name, (own, method))
        figures = result_figures(baseline, value, valid, are_logits=self._is_logits((name, own), baseline))
        self._sums.setdefault(name, DriftSums()).add(baseline, value, valid)
        made = ResultComparison(
            name=name,
            candidate_name=own,
            rung=self.rung,
            method=method,
            verdict=judgement.verdict,
            reason=judgement.reason,
            case=where[0],
            step=where[1],
            num_steps=1,
            shape=tuple(baseline.shape),
            dtype=dtype_name(baseline.dtype),
            candidate_dtype=dtype_name(value.dtype),
            noise_ratio=judgement.noise_ratio,
            exempt=exempt,
            judged_by=judged_by,
            **vars(figures),
        )
        if made.is_unexplained:
            made = replace(made, verdict="suspicious", reason=_UNDECIDED, is_decided=False)
        if name not in self._varying and not (baseline.numel() > 1 and bool((baseline == baseline.flatten()[0]).all())):
            self._varying.add(name)
        before = self._found.get(name)
        self._found[name] = made if before is None else worse(before, made)


def results_of(program: Program) -> list[str]:
    """Return the names of a program's results in order: neither caches nor what is remembered, nor added outputs."""
    caches = set(program.caches.values())
    return [name for name in program.output_nodes if name not in caches and not name.startswith((PREFIX, STATE))]


def results_left(sides: Sequence[EndToEnd]) -> str | None:
    """Return in words which results of the baseline no side of the candidate has; None where all were compared."""
    if not sides:
        return None
    reasons = {why for side in sides for why in side.not_compared.values()}
    if not any(side.found for side in sides) and reasons != {_RANDOM}:
        return f"no result of the candidate was compared with the baseline's: {', '.join(results_of(sides[0].program))}"
    compared = {one.name for side in sides for one in side.found}
    missing = [name for name in sides[-1].missing if name not in compared]
    return f"the candidate returns no {', '.join(missing)}" if missing else None


def with_model(reference: Reference, ours: torch.Tensor | None) -> Reference:
    """Return the reference with the untouched model as one more run behind the floor, where that itself is right."""
    if ours is None or not ours.is_floating_point() or not reference.exact.is_floating_point():
        return reference
    is_right = ours.shape == reference.exact.shape and reference.judge(ours).verdict not in FLAGGED
    return reference.with_run(ours) if is_right else reference


def _judged(reference: Reference, value: torch.Tensor, may_tie: bool) -> tuple[Judgement, float]:
    """Return the judgement of a result, and the share of it that had to be exempt."""
    judgement = reference.judge(value)
    exempt = reference.share_of_ties
    if not exempt or (judgement.verdict in FLAGGED and not judgement.is_empty):
        return judgement, exempt
    whole = reference.without_ties().judge(value)
    if whole.verdict not in FLAGGED:
        return whole, 0.0  # nothing has to be excused
    if may_tie:
        return judgement, exempt
    return replace(whole, reason=whole.reason or _CHOSEN_ALIKE), 0.0


def by_signal(baseline: torch.Tensor, value: torch.Tensor) -> Judgement:
    """Judge a result of a quantized candidate: a changed shape is wrong, and so is more noise than half of the signal.

    Whole numbers (chosen tokens) may be others where scores are close; those that differ are counted by the figures.
    """
    if baseline.shape != value.shape:
        return Judgement("wrong", None, None, f"shape {tuple(value.shape)}, baseline {tuple(baseline.shape)}")
    if not bool(unequal(baseline, value).any()):
        return Judgement("identical", 0.0, 0.0)
    if not (baseline.is_floating_point() and value.is_floating_point()):
        return Judgement("suspicious", None, None, f"{int((baseline != value).sum())} of {value.numel()} differ")
    if not bool(value.isfinite().all()) and bool(baseline.isfinite().all()):
        return Judgement("wrong", None, None, "values that are not finite")
    sums = DriftSums()
    sums.add(baseline, value)
    lost = loss_of(sums.noise, sums.signal)
    verdict: Verdict = "wrong" if lost > LOST else "suspicious" if lost > LITTLE_LEFT else "rounding"
    return Judgement(verdict, None, math.sqrt(sums.noise / max(1, value.numel())))


def _passed_on(baseline: torch.Tensor, value: torch.Tensor) -> Judgement:
    """Judge a result that no op makes: the same, but for the rounding of a coarser dtype."""
    if baseline.shape != value.shape:
        shapes = f"shape {tuple(value.shape)}, baseline {tuple(baseline.shape)}"
        return Judgement("wrong", None, None, shapes)
    if not bool(unequal(baseline, value).any()):
        return Judgement("identical", 0.0, 0.0)
    names = dtype_name(baseline.dtype), dtype_name(value.dtype)
    verdict: Verdict = "wrong"
    if all(map(is_inexact, names)):
        allowed = tolerance(*names)
        near = torch.allclose(value.to(baseline.dtype), baseline, allowed.rtol, allowed.atol, equal_nan=True)
        verdict = "rounding" if near else "wrong"
    return Judgement(verdict, None, None, "no op makes it: it is passed on")
