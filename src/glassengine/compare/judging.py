"""Judges one match: brings both tensors into one layout, measures them, compares the figures with a tolerance."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from glassengine.blocks import difference
from glassengine.compare import shapes
from glassengine.compare.both import Both
from glassengine.compare.evidence import Evidence, Sums
from glassengine.compare.matching.matching import Match
from glassengine.compare.ranks.findings import Findings
from glassengine.compare.roundings import ROUNDED, is_along
from glassengine.compare.ruling import BY_SHAPE, Judged, Kind, Ruling
from glassengine.compare.sides import Counted
from glassengine.compare.small import COARSE, IF_COARSE
from glassengine.numerics.mask_values import both_may_hide, without_hidden
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.numerics.metrics.measure import measure, summarize, summarize_errors
from glassengine.numerics.metrics.slices import slices, sums_of_squares
from glassengine.numerics.metrics.tolerance import precision_of
from glassengine.recording.layout.values import dtype_name
from glassengine.results import Summary


@dataclass(frozen=True)
class Judge(Ruling, Both):
    """The two sides, measured and judged."""

    @classmethod
    def of(cls, ruling: Ruling) -> Judge:
        """Return who measures what `ruling` judges."""
        return cls(*(getattr(ruling, field.name) for field in dataclasses.fields(ruling)))

    def pair(self, match: Match, *, added: Sequence[Match] = ()) -> Judged:
        """Return the verdict on one match.

        Args:
            match: What belongs together.
            added: What the candidate has of the same tensor under other names: shares of a gradient.

        Raises:
            UsageError: An operation of the map, or a transposition, does not fit the tensor.
        """
        x, y = self.tensors(match)
        counted = self.count(match, tuple(x.shape))
        for one in added:
            _, share = self.tensors(one)
            y = y + share if share.shape == y.shape else y
        if x.shape != y.shape:
            what = shapes.difference(tuple(x.shape), tuple(y.shape), match.baseline.site)
            pair = dataclasses.replace(self.pair_of(match), verdict="wrong", judged_by=BY_SHAPE, reason=what)
            return Judged(pair, None, counted)
        allowed = self.tolerance(match, _name(x), _name(y))
        figures = measure(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        if not figures.allclose and (shown := without_hidden(x, y)) is not None:
            # All mask values are equal.
            x, y = shown
            figures = measure(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        drift = _drift_of(x, y) if self.has_drift else None
        pair = self.verdict(match, figures, _kind(x), _kind(y), drift, functools.partial(slices, x, y))
        if pair.reason == IF_COARSE and not {precision_of(x), precision_of(y)} & {_name(x), _name(y)}:
            pair = dataclasses.replace(pair, verdict="suspicious", reason=COARSE)
        if not figures.num_different and x.is_floating_point() and not _has_finite(x):
            pair = dataclasses.replace(pair, reason="no value is finite, on either side")
        if pair.reason == ROUNDED and self._is_another_update(match, y, x):
            pair = dataclasses.replace(pair, verdict="wrong", reason=None)
        return Judged(pair, drift, counted)

    def _is_another_update(self, match: Match, y: Tensor, x: Tensor) -> bool:
        """Whether a parameter differs by a multiple of its gradient: by another learning rate, or scale of the loss."""
        noise = self.noise_of(match)
        if noise is None or noise.gradient is None or isinstance(self.left, Findings):
            return False
        gradient = self.left.tensor(noise.gradient).double()
        difference = y.double() - x.double()
        return gradient.shape == x.shape and any(is_along(difference, one) for one in (gradient, gradient.sign()))

    def rows(self, match: Match, first: int, end: int) -> tuple[Evidence, Counted]:
        """Return the figures of some rows of a match that `can_be_cut`."""
        x, y, checksums = self.rows_of(match, first, end)
        counted = self.count(match, match.baseline.shape, rows=(first, end))
        allowed = self.tolerance(match, _name(x), _name(y))
        found = difference(x, y, rtol=allowed.rtol, atol=allowed.atol, device=self.device)
        has_sums = self.floor_of(match) is not None or self.noise_of(match) is not None
        return Evidence(
            first * math.prod(match.baseline.shape[1:]),
            found,
            bool(found.num_beyond) and both_may_hide(x, y),
            _drift_of(x, y) if self.has_drift else None,
            Sums.of(sums_of_squares(x, y)) if has_sums else None,
            checksums,
        ), counted

    def statistics(self, match: Match) -> tuple[Summary, Summary, Summary | None, Summary | None]:
        """Return the statistics of both sides, and of absolute and relative errors where the shapes are the same."""
        x, y = self.tensors(match)
        errors = summarize_errors(x, y, device=self.device) if x.shape == y.shape else (None, None)
        return summarize(x, device=self.device), summarize(y, device=self.device), *errors


def _drift_of(x: Tensor, y: Tensor) -> DriftSums:
    """Return the sums of one pair."""
    sums = DriftSums()
    sums.add(x, y)
    return sums


def _has_finite(tensor: Tensor) -> bool:
    """Whether a tensor has a finite value, or none at all; most have one in the first place."""
    flat = tensor.reshape(-1)
    flat = flat.float() if flat.element_size() == 1 else flat  # float8 has no kernel for it
    return not flat.numel() or bool(flat[:1].isfinite().any()) or bool(flat.isfinite().any())


def _kind(tensor: Tensor) -> Kind:
    return Kind(_name(tensor), tuple(tensor.shape))


def _name(tensor: Tensor) -> str:
    return dtype_name(tensor.dtype)
