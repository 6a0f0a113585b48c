"""The tensors of both sides of a match: in one layout, without what the model does not define, whole or by rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glassengine.compare.matching import layouts
from glassengine.compare.matching.assembling import assembled
from glassengine.compare.matching.globs import NameIndex
from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.padding import CACHES, Padding
from glassengine.errors import UsageError, nearest
from glassengine.numerics.exemptions import PADDING, Ledger
from glassengine.numerics.mask_values import seen_by
from glassengine.recording.layout.layout import Entry
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

    def tensors(self, match: Match) -> tuple[Tensor, Tensor]:
        """Return both sides of a match in one layout."""
        x = self.left.tensor(match.baseline)
        parts = [self.right.tensor(entry) for entry in match.candidates]
        if match.rule is not None:
            where = f"{match.baseline.site!r} and {match.candidate_site!r}, step {match.baseline.step}"
            try:
                x = layouts.apply(match.rule.baseline_ops, x, lookup=self._lookup(self.left, match.baseline))
                lookups = [self._lookup(self.right, entry) for entry in match.candidates]
                parts = [assembled(match.rule, list(zip(parts, lookups, strict=True)))]
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
        if self.has_layout(match):
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

    def count(self, match: Match, shape: tuple[int, ...], rows: tuple[int, int] | None = None) -> Counted:
        """Count what `_counted` leaves out of `shape`, which is what it left of the baseline's tensor, or some rows."""
        ledger, entry = Ledger(), match.baseline
        size = math.prod(shape if rows is None else (rows[1] - rows[0], *shape[1:]))
        valid = None if self.has_layout(match) else self._paddings[0].valid(entry, shape)
        if valid is not None and rows is not None and valid.shape[0] > 1:
            valid = valid[rows[0] : rows[1]]
        ledger.add(entry.site, size, {} if valid is None else {PADDING: ~valid})
        if entry.site.endswith(CACHES) and not self.has_layout(match):
            ledger.add(entry.site, max(0, math.prod(entry.shape) - size), {}, whole=PADDING)
        return ledger.numbers()

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

    def rows_of(
        self, match: Match, first: int, end: int
    ) -> tuple[Tensor, Tensor, tuple[tuple[int, int], tuple[int, int]]]:
        """Return some rows of a match that `can_be_cut`, and of each side's bytes the CRC-32 and how many they are."""
        assert isinstance(self.left, HasRows) and isinstance(self.right, HasRows)
        x, of_x = self.left.rows(match.baseline, first, end)
        y, of_y = self.right.rows(match.candidates[0], first, end)
        checksums = (of_x, x.numel() * x.element_size()), (of_y, y.numel() * y.element_size())
        valid = self._paddings[0].valid(match.baseline, match.baseline.shape)
        if valid is not None:
            valid = valid[first:end] if valid.shape[0] > 1 else valid
            x, y = (torch.where(valid, side, torch.zeros((), dtype=side.dtype)) for side in (x, y))
        return x, y, checksums

    def is_same(self, match: Match) -> bool:
        """Whether checksums say that both sides hold the same bytes, and nothing else has to be known of them."""
        entry, other = match.baseline, match.candidates[0]
        if self.has_layout(match) or not have_same_bytes(entry, other):
            return False
        return not (entry.site.endswith(CACHES) and any(side.slots(entry) is not None for side in self._paddings))

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


def have_same_bytes(entry: Entry, other: Entry) -> bool:
    """Whether both are recorded with the same dtype, shape and checksum, of themselves or of the block they are in.

    Of tensors that differ one in four thousand million has the same checksum, and of those of four bytes or less none.
    """
    x, y = entry.location, other.location
    if x is None or y is None or x.checksum != y.checksum or (entry.dtype, entry.shape) != (other.dtype, other.shape):
        return False
    if x.block is None or y.block is None:
        return x.block is y.block
    return x.block[1] == y.block[1] and x.offset - x.block[0] == y.offset - y.block[0]
