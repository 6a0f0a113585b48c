"""The two sides of a comparison, as their indices know them: what is known to be the same, and what can be cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.padding import CACHES, Padding
from glassengine.numerics.exemptions import PADDING, Ledger
from glassengine.recording.layout.layout import have_same_bytes
from glassengine.recording.read.reader import HasRows
from glassengine.recording.read.source import TensorSource
from glassengine.results import ExemptionReason
from glassengine.sites import matches

Counted = tuple[int, tuple[tuple[ExemptionReason, int], ...]]
"""Elements of a tensor, and how many of them do not count, by reason."""


@dataclass(frozen=True)
class Sides:
    """The two sides of a comparison.

    Attributes:
        left: The baseline.
        right: The candidate.
        transpose: Patterns of tensors of the baseline whose last two dimensions are exchanged.
    """

    left: TensorSource
    right: TensorSource
    transpose: Sequence[str]

    def count(self, match: Match, shape: tuple[int, ...], rows: tuple[int, int] | None = None) -> Counted:
        """Count what `Both.tensors` leaves out of `shape`, what it left of the baseline's tensor, or of some rows."""
        ledger, entry = Ledger(), match.baseline
        size = math.prod(shape if rows is None else (rows[1] - rows[0], *shape[1:]))
        valid = None if self.has_layout(match) else self.paddings[0].valid(entry, shape)
        if valid is not None and rows is not None and valid.shape[0] > 1:
            valid = valid[rows[0] : rows[1]]
        left_out = 0 if valid is None else int((~valid).sum()) * (size // max(1, valid.size))
        ledger.merge(entry.site, size, [(PADDING, min(size, left_out))])
        if entry.site.endswith(CACHES) and not self.has_layout(match):
            unused = max(0, math.prod(entry.shape) - size)
            ledger.merge(entry.site, unused, [(PADDING, unused)])
        return ledger.numbers()

    @functools.cached_property
    def paddings(self) -> tuple[Padding, Padding]:
        """Where both sides have padding."""
        return Padding(self.left), Padding(self.right)

    def is_same(self, match: Match) -> bool:
        """Whether checksums say that both sides hold the same bytes, and nothing else has to be known of them."""
        entry, other = match.baseline, match.candidates[0]
        if self.has_layout(match) or not have_same_bytes(entry, other):
            return False
        return not (entry.site.endswith(CACHES) and any(side.slots(entry) is not None for side in self.paddings))

    def can_be_cut(self, match: Match) -> bool:
        """Whether a match can be judged by some of its rows after the others."""
        entry, other = match.baseline, match.candidates[0]
        return (
            isinstance(self.left, HasRows)
            and isinstance(self.right, HasRows)
            and not self.has_layout(match)
            and not entry.site.endswith(CACHES)
            and entry.shape == other.shape
            and len(entry.shape) > 0
            and (entry.dtype == "bool") == (other.dtype == "bool")
            and all(one.location is not None and one.location.block is None for one in (entry, other))
        )

    def has_layout(self, match: Match) -> bool:
        """Whether a map or a pattern changes the layout of a side."""
        return match.rule is not None or any(matches(pattern, match.baseline.site) for pattern in self.transpose)
