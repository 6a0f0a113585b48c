"""Judges one match: brings both tensors into one layout, measures them, compares the figures with a tolerance."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glassengine.compare import shapes
from glassengine.compare.matching import layouts
from glassengine.compare.matching.globs import NameIndex
from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.padding import CACHES, Padding
from glassengine.compare.precision import Precision
from glassengine.errors import UsageError, nearest
from glassengine.numerics.exemptions import PADDING, Ledger
from glassengine.numerics.judgement import SUSPICIOUS, WRONG
from glassengine.numerics.mask_values import seen_by, without_hidden
from glassengine.numerics.metrics.measure import measure, summarize, summarize_errors
from glassengine.numerics.metrics.slices import noise_ratio, slices
from glassengine.numerics.metrics.tolerance import Tolerance, tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.recording.layout.values import dtype_name
from glassengine.recording.read.source import TensorSource
from glassengine.results import VERDICTS, Pair, Verdict
from glassengine.sites import matches

BY_FLOOR = "noise floor"
BY_TOLERANCE = "tolerance (uncalibrated)"
BY_GIVEN_TOLERANCE = "given tolerance"
BY_SHAPE = "shape"
BY_PRECISION = "what is left of the signal"

# Statistics need several passes (the median), so of many pairs only the worst get them.
_NUM_SUMMARIZED = 3


@dataclass(frozen=True)
class Judge:
    """The two sides and how their tensors are judged.

    Attributes:
        left: The baseline.
        right: The candidate.
        rtol: Relative tolerance instead of the dtype's own.
        atol: Absolute tolerance instead of the dtype's own.
        transpose: Patterns of tensors of the baseline whose last two dimensions are exchanged.
        device: Device of the arithmetic.
        floor: What rounding alone does to the tensors of the baseline, where that was measured.
        precision: Where the sides are of two precisions: gathers the drift.
        is_drift: Whether what is beyond tolerance is judged by what is left of the signal.
        ledger: Counts elements that did not count.
    """

    left: TensorSource
    right: TensorSource
    rtol: float | None
    atol: float | None
    transpose: Sequence[str]
    device: str
    floor: NoiseFloor | None = None
    precision: Precision | None = None
    is_drift: bool = False
    ledger: Ledger | None = None

    def pair(self, match: Match, *, added: Sequence[Match] = ()) -> Pair:
        """Return the verdict on one match.

        Args:
            match: What belongs together.
            added: What the candidate has of the same tensor under other names: shares of a gradient.

        Raises:
            UsageError: An operation of the map, or a transposition, does not fit the tensor.
        """
        entry = match.baseline
        site, step, other = entry.site, entry.step, match.candidate_site
        is_given = self.rtol is not None or self.atol is not None
        judged_by = BY_GIVEN_TOLERANCE if is_given else BY_TOLERANCE
        x, y = self._tensors(match)
        if self.ledger is not None:
            self._count(self.ledger, match, x)
        for one in added:
            _, share = self._tensors(one)
            y = y + share if share.shape == y.shape else y
        if x.shape != y.shape:
            what = shapes.difference(tuple(x.shape), tuple(y.shape), site)
            return Pair(step, site, other, match.method, 1.0, "wrong", BY_SHAPE, rank=entry.rank, reason=what)
        allowed = self._tolerance(match, x, y)
        figures = measure(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        if not figures.allclose and (shown := without_hidden(x, y)) is not None:
            # All mask values are equal.
            x, y = shown
            figures = measure(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        reason = None if x.dtype == y.dtype else f"dtypes differ: {_name(x)} and {_name(y)}"
        verdict: Verdict = "identical" if figures.num_different == 0 else "rounding" if figures.allclose else "wrong"
        pair = Pair(
            step, site, other, match.method, 1.0, verdict, judged_by, rank=entry.rank, figures=figures, reason=reason
        )
        drifts = None
        if self.precision is not None:
            drifts = self.precision.judge(site, other, x, y)
        if figures.num_different == 0:
            return pair
        floor = None if self.floor is None or is_given else self.floor.of(entry)
        if self.floor is not None and floor is not None:
            why_not = _floor_does_not_fit(match, x, y, floor.slices)
            if why_not is None:
                found = noise_ratio(slices(x, y), floor, self.floor.relative(entry), x.dtype)
                by_floor: Verdict = "wrong" if found > WRONG else "suspicious" if found > SUSPICIOUS else "rounding"
                return dataclasses.replace(pair, verdict=by_floor, noise_ratio=found, judged_by=BY_FLOOR)
            pair = dataclasses.replace(pair, reason="; ".join(filter(None, (reason, why_not))))
        if drifts is not None and self.is_drift and not figures.allclose and not figures.num_nonfinite_mismatch:
            return dataclasses.replace(pair, verdict=drifts, judged_by=BY_PRECISION)
        return pair

    def with_statistics(self, pairs: Sequence[Pair], judged: Sequence[Match], *, all_of_them: bool) -> list[Pair]:
        """Return `pairs` where all, or else the worst few, carry the statistics of both sides and of the errors."""
        order = sorted(range(len(pairs)), key=lambda i: severity(pairs[i]), reverse=True)
        result = list(pairs)
        for i in order if all_of_them else order[:_NUM_SUMMARIZED]:
            x, y = self._tensors(judged[i])
            absolute, relative = summarize_errors(x, y, device=self.device) if x.shape == y.shape else (None, None)
            result[i] = dataclasses.replace(
                pairs[i],
                baseline=summarize(x, device=self.device),
                candidate=summarize(y, device=self.device),
                abs_error=absolute,
                rel_error=relative,
            )
        return result

    def _tensors(self, match: Match) -> tuple[Tensor, Tensor]:
        x = self.left.tensor(match.baseline)
        parts = [self.right.tensor(entry) for entry in match.candidates]
        if match.rule is not None:
            where = f"{match.baseline.site!r} and {match.candidate_site!r}, step {match.baseline.step}"
            try:
                lookups = (self._lookup(self.left, match.baseline), self._lookup(self.right, match.candidates[0]))
                x = layouts.apply(match.rule.baseline_ops, x, lookup=lookups[0])
                parts = [layouts.apply(match.rule.candidate_ops, part, lookup=lookups[1]) for part in parts]
                parts = [_concatenate(parts, match.rule.concat_dim)]
            except UsageError as error:
                raise UsageError(
                    f"the map does not fit {where}: {error.what}", got=error.got, expected=error.expected
                ) from error
        if match.baseline.site in self.transpose and x.ndim < 2:
            raise UsageError(
                f"{match.baseline.site!r} cannot be transposed",
                got=match.baseline.describe(),
                expected="two dimensions or more",
            )
        # A pattern such as "*.weight" also names vectors, which have nothing to exchange.
        if x.ndim > 1 and any(matches(pattern, match.baseline.site) for pattern in self.transpose):
            x = x.mT
        return self._counted(match, x, parts[0])

    def _counted(self, match: Match, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Exclude what the model does not define: rows of padding, and empty slots of a cache."""
        if match.rule is not None or any(matches(pattern, match.baseline.site) for pattern in self.transpose):
            return x, y
        entry, other = match.baseline, match.candidates[0]
        ours, theirs = self._paddings
        if entry.site.endswith(CACHES) and x.ndim == y.ndim > 2:
            known = [used for used in (ours.slots(entry), theirs.slots(other)) if used is not None]
            used = min([x.shape[-2], y.shape[-2], *known])
            x, y = x.narrow(-2, 0, used), y.narrow(-2, 0, used)
        if x.dtype is torch.bool:
            y = seen_by(y, x)
        elif y.dtype is torch.bool:
            x = seen_by(x, y)
        valid = ours.valid(entry, tuple(x.shape)) if x.shape == y.shape else None
        if valid is None:
            return x, y
        return tuple(torch.where(valid, side, torch.zeros((), dtype=side.dtype)) for side in (x, y))  # type: ignore[return-value]

    def _count(self, ledger: Ledger, match: Match, x: Tensor) -> None:
        """Count what `_counted` leaves out; `x` is what it left of the baseline's tensor."""
        entry = match.baseline
        if match.rule is not None or any(matches(pattern, entry.site) for pattern in self.transpose):
            ledger.add(entry.site, x.numel(), {})
            return
        valid = self._paddings[0].valid(entry, tuple(x.shape))
        ledger.add(entry.site, x.numel(), {} if valid is None else {PADDING: ~valid})
        if entry.site.endswith(CACHES):
            ledger.add(entry.site, max(0, math.prod(entry.shape) - x.numel()), {}, whole=PADDING)

    @functools.cached_property
    def _paddings(self) -> tuple[Padding, Padding]:
        return Padding(self.left), Padding(self.right)

    def _lookup(self, side: TensorSource, near: Entry) -> layouts.Lookup:
        """Return a function from a name to the tensor of that name on `side`, of the step and rank of `near`."""

        def find(name: str) -> Tensor:
            there = self._by_place[side is self.right].get((near.step, near.rank), {})
            found = [name] if name in there else NameIndex(there).with_suffix(name)
            if len(found) != 1:
                raise UsageError(
                    f"{len(found) or 'no'} tensors of step {near.step} are called {name!r}",
                    expected=[f"one of {len(there)} names", *(found or nearest(name, there))],
                )
            return side.tensor(there[found[0]])

        return find

    @functools.cached_property
    def _by_place(self) -> list[dict[tuple[int, int], dict[str, Entry]]]:
        """Step and rank -> name -> entry, of each side."""
        sides: list[dict[tuple[int, int], dict[str, Entry]]] = [{}, {}]
        for side, table in zip((self.left, self.right), sides, strict=True):
            for entry in side.entries:
                table.setdefault((entry.step, entry.rank), {})[entry.site] = entry
        return sides

    def _tolerance(self, match: Match, x: Tensor, y: Tensor) -> Tolerance:
        """Return the loosest tolerance of the dtypes involved: a cast does not undo the rounding of what it is from."""
        dtypes = {match.baseline.dtype, _name(x), _name(y), *(entry.dtype for entry in match.candidates)}
        return _loosest(frozenset(dtypes), self.rtol, self.atol)


@functools.lru_cache(maxsize=256)
def _loosest(dtypes: frozenset[str], rtol: float | None, atol: float | None) -> Tolerance:
    each = [tolerance(dtype, dtype, rtol=rtol, atol=atol) for dtype in dtypes]
    return Tolerance(max(one.rtol for one in each), max(one.atol for one in each))


def _floor_does_not_fit(match: Match, x: Tensor, y: Tensor, noise: Sequence[Tensor]) -> str | None:
    """Return why the floor of the baseline does not apply to this pair, if it does not."""
    if match.rule is not None and match.rule.baseline_ops:
        return "the floor is of another layout"
    if any(len(means) != size for means, size in zip(noise, x.shape, strict=True)):
        return "the floor is of another shape"
    if all(side.dtype.is_floating_point for side in (x, y)) and torch.finfo(y.dtype).eps > torch.finfo(x.dtype).eps:
        return f"the floor is that of {_name(x)}, too fine for {_name(y)}"
    return None


def severity(pair: Pair) -> tuple[float, ...]:
    """Return a key that sorts pairs: by verdict, then different shapes before non-finite before size of the error."""
    rank = float(VERDICTS.index(pair.verdict))
    if pair.figures is None:
        return (rank, 1.0)
    size = -math.inf if math.isnan(pair.figures.snr_db) else -pair.figures.snr_db
    return (rank, 0.0, float(pair.figures.num_nonfinite_mismatch > 0), size)


def _concatenate(parts: list[Tensor], dim: int | None) -> Tensor:
    if dim is None:
        return parts[0]
    try:
        return torch.cat(parts, dim)
    except (RuntimeError, IndexError) as error:
        got = ", ".join(str(list(part.shape)) for part in parts)
        raise UsageError(f"the candidates cannot be concatenated along dimension {dim}", got=got) from error


def _name(tensor: Tensor) -> str:
    return dtype_name(tensor.dtype)
