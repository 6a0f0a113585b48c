"""Compares the results of both sides, end to end: what a user of the model sees.

Nothing inside enters: a result is judged against the float64 reference by the noise that all ops above it add up to,
measured with the program in its own dtype, two runs with Monte-Carlo rounding, and the unchanged model: another
implementation in floating point. Elements below a tie are exempt only where the candidate may really have chosen
otherwise: where it was seen to, or where its choice was not observed.

The figures are plain ones of two tensors. `Severity`, tokens and KL, is reported and never decides by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from glassengine.judge.site_pairs import by_value
from glassengine.numerics.distances import measure
from glassengine.numerics.drift import LITTLE_LEFT, LOST, DriftSums, loss_of
from glassengine.numerics.exemptions import DRAWN, PADDING
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.kinds import unequal
from glassengine.numerics.tolerance import is_inexact, tolerance
from glassengine.numerics.verdict import Reference
from glassengine.program.representation.outputs import PREFIX
from glassengine.program.representation.program import Program
from glassengine.program.user_code.module_state import STATE
from glassengine.recording.formats.files import of_number
from glassengine.recording.layout.tensors import dtype_name
from glassengine.results import FLAGGED, VERDICTS, DriftRow, ResultComparison, TokenAgreement, Verdict

_CHOSEN_ALIKE = "both sides chose alike where rounding might have chosen: no tie explains the difference"
_NAN_ALONE = "NaN where the baseline has numbers, though it is undefined there"
RANDOM = "every run draws new random numbers"
_MISSING = "the candidate returns no such result"
_NO_NUMBER = "not judged: the baseline has NaN everywhere"
_FOUND = ("_compared", "_sums", "_varying", "_with_numbers", "_beside", "not_compared")
_FAR_FROM_NATIVE = 100.0  # times the floor of one run, which may be ten times too small
_UNDECIDED = "not judged: the baseline's own rounding changes it as much on these inputs"


@dataclass(frozen=True)
class Seeded:
    """What two models that draw random numbers return with one seed, beside the reference, which has no such run.

    Attributes:
        text: In words.
        is_known: Whether they return the same, or may return something else because they draw in another order.
        other_draws: What one draws and the other does not, in words, where they do not return the same.
    """

    text: str
    is_known: bool
    other_draws: tuple[str, ...] = ()


@dataclass
class EndToEnd:
    """Keeps, for each result of the baseline, the worst that one side made of it.

    Attributes:
        program: The baseline's.
        level: Of the side.
        not_compared: Result -> why it was not.
        called: Of a record, result -> what it calls that, and how this is known; None of what runs.
    """

    program: Program
    level: str
    not_compared: dict[str, str] = field(default_factory=dict)
    called: Mapping[str, tuple[str, str]] | None = None
    _sums: dict[str, DriftSums] = field(default_factory=dict)
    _compared: dict[str, ResultComparison] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _other_names: dict[str, str] = field(default_factory=dict)
    _beside: dict[str, None] = field(default_factory=dict)
    _varying: set[str] = field(default_factory=set)
    _with_numbers: set[str] = field(default_factory=set)

    @property
    def missing(self) -> list[str]:
        """Names of results that the side does not return at all."""
        return [name for name, why in self.not_compared.items() if why is _MISSING and name not in self._compared]

    @property
    def compared(self) -> tuple[ResultComparison, ...]:
        """One entry for each result that was compared, in the order of the baseline's."""
        names = [*results_of(self.program), *self._beside]
        found = [self._compared[name] for name in names if name in self._compared]
        if not self._with_numbers:
            # NaN equals NaN, and says nothing where it is all that there is.
            found = [
                one
                if one.verdict in FLAGGED
                else replace(one, verdict="suspicious", reason=_NO_NUMBER, is_decided=False)
                for one in found
            ]
        return tuple(found)

    @property
    def constant(self) -> list[str]:
        """Names of results whose elements were all the same number in every step: little can be seen in them."""
        return [name for name in self._compared if name not in self._varying]

    def found_so_far(self) -> dict[str, Any]:
        """Return what was found, without the program."""
        return {name: getattr(self, name) for name in _FOUND}

    def merge(self, later: Mapping[str, Any]) -> None:
        """Add what `found_so_far` returned of later cases of the same side."""
        for name, result in later["_compared"].items():
            self._keep(name, result)
        for name, sums in later["_sums"].items():
            self._sums.setdefault(name, DriftSums()).merge(sums)
        self._varying |= later["_varying"]
        self._with_numbers |= later["_with_numbers"]
        self._beside |= later["_beside"]
        self.not_compared |= later["not_compared"]

    def drift_rows(self) -> tuple[DriftRow, ...]:
        """Return a row of the table of drift for each result."""
        return tuple(self._sums[one.name].row(one.name, one.candidate_name, "result") for one in self.compared)

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
        """Compare the results that `node` of the baseline's program is.

        Args:
            node: The node.
            reference: Of its value in this step.
            theirs: Results of the side in this step.
            ours: Those of the unchanged baseline.
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
                self.not_compared[name] = RANDOM
            else:
                value = theirs[own]
                if self.called is not None:
                    reference, value = self._last_positions(node, reference, value)
                baseline = ours.get(name, reference.native)
                if baseline.shape != reference.native.shape:
                    baseline = reference.native
                judged = _judged(reference, value, may_tie)
                if judged[0].verdict not in FLAGGED and _is_nan_alone(reference, baseline, value):
                    judged = replace(judged[0], verdict="wrong", reason=_NAN_ALONE), judged[1]
                if baseline is value and judged[0].verdict in FLAGGED:
                    baseline = reference.exact.to(baseline.dtype)  # it does not leave itself, but its program
                within = _explanation(reference, value, judged[1])
                self._add(name, own, method, judged, reference.valid, baseline, value, where, within=within)

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
        """Compare results of a quantized candidate: by what is left of the signal."""
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
        """Compare the inputs that one of the sides writes to, as both leave them: the caller sees it."""
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
        """Compare results other than tensors: numbers and text; None is listed as not compared."""
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
        missing = {one: self.program.output_nodes[one] for one in names if one not in theirs}
        left = {n: ours[n] if n in ours else self.program.node(made).meta.get("val") for n, made in missing.items()}
        unpaired = {one: made for one, made in theirs.items() if one not in names}
        if unpaired and not self._other_names.keys() & left.keys():
            self._other_names |= by_value(left, unpaired)
        found = self._other_names.get(name)
        return (found, "position") if found in unpaired else (None, "")

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
        within: str = "rounding",
    ) -> None:
        judgement, exempt = judged
        own, method = (self.called or {}).get(name, (own, method))
        is_named = any(one.rpartition(".")[2] == "logits" for one in (name, own))
        scores = baseline.is_floating_point() and baseline.dim() > 1
        scores = scores and (is_named or baseline.shape[-1] == self.program.metadata.get("vocab_size"))
        figures = result_figures(baseline, value, valid, are_logits=scores)
        self._sums.setdefault(name, DriftSums()).add(baseline, value, valid)
        made = ResultComparison(
            name=name,
            candidate_name=own,
            level=self.level,
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
            within=within,
            **figures,
        )
        if made.is_unexplained:
            made = replace(made, verdict="suspicious", reason=_UNDECIDED, is_decided=False)
        is_float = baseline.is_floating_point() and baseline.numel() > 0
        if name not in self._with_numbers and not (is_float and bool(baseline.isnan().all())):
            self._with_numbers.add(name)
        if name not in self._varying and not (baseline.numel() > 1 and bool((baseline == baseline.flatten()[0]).all())):
            self._varying.add(name)
        self._keep(name, made)

    def _keep(self, name: str, made: ResultComparison) -> None:
        before = self._compared.get(name)
        self._compared[name] = made if before is None else worse(before, made)


def results_of(program: Program) -> list[str]:
    """Return the names of a program's results in order: neither caches nor what is remembered, nor added outputs."""
    caches = set(program.caches.values())
    return [name for name in program.output_nodes if name not in caches and not name.startswith((PREFIX, STATE))]


def are_random(sides: Iterable[EndToEnd]) -> bool:
    """Whether results were left out because each run draws other numbers."""
    return any(RANDOM in side.not_compared.values() for side in sides)


def results_left(sides: Sequence[EndToEnd], seeded: Seeded | None = None) -> str | None:
    """Return in words which results of the baseline no side of the candidate has; None where all were compared.

    Args:
        sides: Of the candidate.
        seeded: What both return with one seed; None where that is not known, or no result is random.
    """
    if not sides:
        return None
    if seeded is not None and not seeded.is_known:
        return seeded.text
    reasons = {why for side in sides for why in side.not_compared.values()}
    if not any(side.compared for side in sides) and reasons != {RANDOM}:
        return f"no result of the candidate was compared with the baseline's: {', '.join(results_of(sides[0].program))}"
    compared = {one.name for side in sides for one in side.compared}
    missing = [name for name in sides[-1].missing if name not in compared]
    return f"the candidate returns no {', '.join(missing)}" if missing else None


def with_model(reference: Reference, ours: torch.Tensor | None) -> Reference:
    """Return the reference with the unchanged model as one more run behind the floor, where that itself is right."""
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


def _explanation(reference: Reference, value: torch.Tensor, exempt: float) -> str:
    """Return what explains a legal difference: rounding, or a tie at which a run behind the floor chose otherwise."""
    if not reference.share_of_ties or exempt:
        return "rounding"
    ratio = reference.by_native().judge(value).noise_ratio
    return "what a tie inside may change" if ratio is not None and ratio > _FAR_FROM_NATIVE else "rounding"


def _is_nan_alone(reference: Reference, baseline: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value that agrees where it counts is NaN where the baseline has numbers, and not for padding alone."""
    if not value.is_floating_point() or value.shape != baseline.shape:
        return False
    where = value.isnan() & baseline.isfinite()
    padding = reference.known.exempt.get(PADDING)
    return bool((where if padding is None else where & ~padding).any())


def by_signal(baseline: torch.Tensor, value: torch.Tensor) -> Judgement:
    """Judge a result of a quantized candidate: a changed shape is wrong, and so is more noise than half of the signal.

    Whole numbers (chosen tokens) may be others where scores are close; those that differ are counted by the figures.
    """
    if (plain := _same_or_of_another_shape(baseline, value)) is not None:
        return plain
    if not (baseline.is_floating_point() and value.is_floating_point()):
        return Judgement("suspicious", None, None, f"{int((baseline != value).sum())} of {value.numel()} differ")
    if not bool(value.isfinite().all()) and bool(baseline.isfinite().all()):
        return Judgement("wrong", None, None, "values that are not finite")
    sums = DriftSums()
    sums.add(baseline, value)
    lost = loss_of(sums.noise, sums.signal)
    verdict: Verdict = "wrong" if lost > LOST else "suspicious" if lost > LITTLE_LEFT else "rounding"
    return Judgement(verdict, None, math.sqrt(sums.noise / max(1, value.numel())))


def _same_or_of_another_shape(baseline: torch.Tensor, value: torch.Tensor) -> Judgement | None:
    if baseline.shape != value.shape:
        return Judgement("wrong", None, None, f"shape {tuple(value.shape)}, baseline {tuple(baseline.shape)}")
    return None if bool(unequal(baseline, value).any()) else Judgement("identical", 0.0, 0.0)


def _passed_on(baseline: torch.Tensor, value: torch.Tensor) -> Judgement:
    """Judge a result that no op makes: the same, but for the rounding of a coarser dtype."""
    if (plain := _same_or_of_another_shape(baseline, value)) is not None:
        return plain
    names = dtype_name(baseline.dtype), dtype_name(value.dtype)
    verdict: Verdict = "wrong"
    if all(map(is_inexact, names)):
        allowed = tolerance(*names)
        near = torch.allclose(value.to(baseline.dtype), baseline, allowed.rtol, allowed.atol, equal_nan=True)
        verdict = "rounding" if near else "wrong"
    return Judgement(verdict, None, None, "no op makes it: it is passed on")


def result_figures(
    baseline: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None = None, *, are_logits: bool = False
) -> dict[str, Any]:
    """Return how far a result is from the baseline's in one step, by the names of `ResultComparison`.

    Elements outside of the mask `valid` do not count. With `are_logits` the last axis scores the tokens of a
    vocabulary.
    """
    figures: dict[str, Any] = {"max_abs_diff": None, "largest": None}
    if baseline.shape != value.shape or baseline.is_complex() or value.is_complex():
        return figures
    counted = torch.ones_like(baseline, dtype=torch.bool) if valid is None else valid.expand(baseline.shape)
    figures["left_out"] = 1 - float(counted.double().mean()) if counted.numel() else 0.0
    b, c = (torch.where(counted, side.double(), 0.0) for side in (baseline, value))
    found = measure(b, c, rtol=0.0, atol=0.0)
    if found.num_nonfinite_mismatch:
        return figures | {"max_abs_diff": math.inf, "snr_db": -math.inf}
    largest = float(torch.where(c.isfinite(), b, 0.0).abs().max()) if b.numel() else 0.0
    figures |= {"max_abs_diff": found.max_abs_diff, "largest": largest}
    if not (baseline.is_floating_point() and value.is_floating_point()):
        return figures
    figures |= {"snr_db": found.snr_db, "cosine_similarity": found.cosine_similarity}
    figures["ulp"] = found.max_abs_diff / _unit(largest, baseline, value) if largest else None
    return figures | (_tokens(baseline.double(), value.double(), counted) if are_logits else {})


def _tokens(baseline: torch.Tensor, value: torch.Tensor, counted: torch.Tensor) -> dict[str, Any]:
    """Return what two sets of logits [..., V] say of the next token, at all positions that count; KL in nats."""
    rows = counted.any(-1) & _choose(baseline) & _choose(value)
    b, c = baseline[rows], value[rows]
    if not len(b):
        return {}
    kl = _kl(b, c)
    same = int((b.argmax(-1) == c.argmax(-1)).sum())
    return {"num_tokens": len(b), "same_tokens": same, "mean_kl": float(kl.mean()), "max_kl": float(kl.max())}


def _choose(logits: torch.Tensor) -> torch.Tensor:
    """Return for each row whether it has a likeliest token: one that is all masked, or has a NaN, has none."""
    return logits.isfinite().any(-1) & ~logits.isnan().any(-1)


def _kl(baseline: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of each row of logits, in nats."""
    ours, theirs = baseline.log_softmax(-1), value.log_softmax(-1)
    # A token that one side masks out has no probability there: 0 * inf counts for nothing.
    return (ours.exp() * (ours - theirs)).masked_fill(ours.isneginf(), 0.0).sum(-1)


def _unit(largest: float, *sides: torch.Tensor) -> float:
    """Return a unit in the last place of `largest` in the coarser dtype of the two."""
    eps = max(torch.finfo(side.dtype).eps for side in sides)
    return float(eps * 2.0 ** math.floor(math.log2(largest)))


def merged(results: Iterable[ResultComparison]) -> tuple[ResultComparison, ...]:
    """Return one entry for each result of each level, of entries for other steps."""
    by_place: dict[tuple[str, str], ResultComparison] = {}
    for one in results:
        place = (one.level, one.name)
        by_place[place] = worse(by_place[place], one) if place in by_place else one
    return tuple(by_place.values())


def worse(one: ResultComparison, other: ResultComparison) -> ResultComparison:
    """Return the worse of two steps of a result, with the extremes of both."""

    def key(found: ResultComparison) -> tuple[float, ...]:
        noise_ratio = math.inf if found.noise_ratio is None and found.verdict in FLAGGED else found.noise_ratio or 0.0
        loss = math.inf if found.snr_db is None else -found.snr_db
        return (VERDICTS.index(found.verdict), loss, noise_ratio, found.max_abs_diff or 0.0)

    return replace(
        max((one, other), key=key),
        num_steps=one.num_steps + other.num_steps,
        num_tokens=one.num_tokens + other.num_tokens,
        same_tokens=one.same_tokens + other.same_tokens,
        mean_kl=_mean((one.mean_kl, one.num_tokens), (other.mean_kl, other.num_tokens)),
        max_kl=max((kl for kl in (one.max_kl, other.max_kl) if kl is not None), default=None),
        is_decided=one.is_decided and other.is_decided,
        snr_db=_least(one.snr_db, other.snr_db),
        noise_ratio=max((r for r in (one.noise_ratio, other.noise_ratio) if r is not None), default=None),
        cosine_similarity=_least(one.cosine_similarity, other.cosine_similarity),
        left_out=(one.left_out * one.num_steps + other.left_out * other.num_steps) / (one.num_steps + other.num_steps),
        exempt=(one.exempt * one.num_steps + other.exempt * other.num_steps) / (one.num_steps + other.num_steps),
    )


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)


def _mean(*weighted: tuple[float | None, int]) -> float | None:
    known = [(value, number) for value, number in weighted if value is not None and number]
    return sum(value * number for value, number in known) / sum(number for _, number in known) if known else None


_TIE = 8.0
"""A changed token is a tie up to this many times the noise: a margin holds four independent errors of two sides, so its
standard deviation is twice that of one logit, and four of those leave one legitimate flip in 10 000 to be called
wrong."""


@dataclass
class Severity:
    """Agreement of the last position's logits of two sides over all steps, in nats for KL."""

    num_tokens: int = 0
    num_agreeing: int = 0
    num_ties: int = 0
    num_with_kl: int = 0
    total_kl: float = 0.0
    max_kl: float = 0.0
    first_change: str | None = None
    num_bitwise: int = 0

    def add(self, baseline: torch.Tensor, candidate: torch.Tensor, noise: float, where: str) -> None:
        """Count one step: logits [B, V] of the last position; `noise` is the RMS of what rounding does to one."""
        a, b = baseline.double(), candidate.double()
        chosen = _choose(a), _choose(b)
        kl = _kl(a[chosen[0] & chosen[1]], b[chosen[0] & chosen[1]])
        self.num_with_kl += len(kl)
        self.total_kl += float(kl.sum())
        self.max_kl = max([self.max_kl, *kl.tolist()])
        ours, theirs = a.argmax(-1), b.argmax(-1)
        for row in (chosen[0] | chosen[1]).nonzero().flatten().tolist():
            self.num_tokens += 1
            self.num_bitwise += bool(torch.equal(baseline[row], candidate[row]))
            if ours[row] == theirs[row] and chosen[0][row] == chosen[1][row]:
                self.num_agreeing += 1
                continue
            margin = float(a[row, ours[row]] - a[row, theirs[row]])
            if margin <= _TIE * noise:
                self.num_ties += 1
            elif self.first_change is None:
                self.first_change = (
                    f"{where}, row {row}: token {int(theirs[row])} for {int(ours[row])} (margin {margin:.3g})"
                )

    def merge(self, later: Severity) -> None:
        """Add later steps."""
        for name in ("num_tokens", "num_agreeing", "num_ties", "num_with_kl", "total_kl", "num_bitwise"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.max_kl = max(self.max_kl, later.max_kl)
        self.first_change = self.first_change or later.first_change

    def to_dict(self) -> TokenAgreement:
        """Return JSON-ready figures; `token_agreement` counts ties as agreement."""
        agreeing = self.num_agreeing + self.num_ties
        return {
            "num_tokens": self.num_tokens,
            "token_agreement": agreeing / self.num_tokens if self.num_tokens else None,
            "num_ties": self.num_ties,
            "mean_kl": self.total_kl / self.num_with_kl if self.num_with_kl else None,
            "max_kl": self.max_kl if self.num_with_kl else None,
            "first_changed_token": self.first_change,
        }
