"""Loads the two tensors of a pair: joined as a map says, in one layout, without padding, whole or by rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from glassengine.blocks.arrays import ArrayValues, are_same_bytes, values_of, values_of_bytes, widened
from glassengine.compare.matching import layouts
from glassengine.compare.matching.maps import MapRule, NameIndex
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.sources import CACHES, Padding, SourceWrapper
from glassengine.errors import UsageError, nearest
from glassengine.numerics.exemptions import PADDING, Ledger
from glassengine.recording.layout.layout import Entry, have_same_bytes, num_bytes
from glassengine.results import ExemptionReason
from glassengine.sites import matches

if TYPE_CHECKING:
    from torch import Tensor

Counted = tuple[int, tuple[tuple[ExemptionReason, int], ...]]
"""Elements of a tensor, and how many of them do not count, by reason."""

_FEW = 1024
"""Elements that show that a tensor has a number."""

Checksums = tuple[tuple[int, int], tuple[int, int]]
"""Of the bytes of each side: the CRC-32, and how many they are."""


@dataclass(frozen=True)
class PairLoader:
    """The tensors of both sides.

    Attributes:
        left: The baseline.
        right: The candidate.
        transpose: Patterns of tensors of the baseline whose last two dimensions are exchanged.
    """

    left: SourceWrapper
    right: SourceWrapper
    transpose: Sequence[str]

    def has_layout(self, match: MatchedPair) -> bool:
        """Whether a map or a pattern changes the layout of a side."""
        return match.rule is not None or any(matches(pattern, match.baseline.site) for pattern in self.transpose)

    def is_same(self, match: MatchedPair) -> bool:
        """Whether checksums say that both sides hold the same bytes, and nothing else has to be known of them."""
        entry, other = match.baseline, match.candidates[0]
        if self.has_layout(match) or not have_same_bytes(entry, other):
            return False
        return not (entry.site.endswith(CACHES) and any(side.slots(entry) is not None for side in self.paddings))

    def has_equal_bytes(self, match: MatchedPair) -> bool:
        """Whether both sides are mapped and hold the same bytes, the first of which have a finite number."""
        entry, other = match.baseline, match.candidates[0]
        if len(match.candidates) > 1 or (entry.dtype, entry.shape) != (other.dtype, other.shape):
            return False
        if not self._is_plain(match):
            return False
        x, y = self.left.stored(entry), self.right.stored(other)
        if not x or not y or not are_same_bytes(x, y):
            return False
        few = min(_FEW, math.prod(entry.shape))
        return bool(np.isfinite(values_of_bytes(x[: num_bytes(entry.dtype, (few,))], entry.dtype, (few,)).array).any())

    def can_be_cut(self, match: MatchedPair) -> bool:
        """Whether a pair can be judged by some of its rows after the others."""
        entry, other = match.baseline, match.candidates[0]
        is_alike = entry.shape == other.shape and len(entry.shape) > 0
        return is_alike and self._is_plain(match) and self.left.can_be_cut(entry) and self.right.can_be_cut(other)

    def count(self, match: MatchedPair, shape: tuple[int, ...]) -> Counted:
        """Count what `whole` leaves out of `shape`, what it left of the baseline's tensor."""
        ledger, entry, size = Ledger(), match.baseline, math.prod(shape)
        valid = None if self.has_layout(match) else self.paddings[0].valid(entry, shape)
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

    def whole(self, match: MatchedPair) -> tuple[ArrayValues, ArrayValues]:
        """Return both tensors of a pair.

        Raises:
            UsageError: An operation of the map, or a transposition, does not fit the tensor.
        """
        if not self._is_plain(match):
            x, y = map(values_of, self._tensors(match))
        else:
            x, y = self.left.values(match.baseline), self.right.values(match.candidates[0])
        if self.has_layout(match) or x.array.shape != y.array.shape:
            return x, y
        valid = self.paddings[0].valid(match.baseline, x.array.shape)
        return (x, y) if valid is None else (_masked(valid, x), _masked(valid, y))

    def rows(self, match: MatchedPair, first: int, end: int) -> tuple[ArrayValues, ArrayValues, Checksums]:
        """Return some rows of a pair that `can_be_cut`, see `stored_values`, and the checksums of their bytes."""
        entry, other = match.baseline, match.candidates[0]
        x, of_x = self.left.rows(entry, first, end)
        y, of_y = self.right.rows(other, first, end)
        sizes = (one.nbytes // entry.shape[0] * (end - first) for one in (entry, other))
        checksums = (of_x, next(sizes)), (of_y, next(sizes))
        valid = self.paddings[0].valid(entry, entry.shape)
        if valid is not None:
            valid = valid[first:end] if valid.shape[0] > 1 else valid
            x, y = _masked(valid, widened(x)), _masked(valid, widened(y))
        return x, y, checksums

    def _is_plain(self, match: MatchedPair) -> bool:
        """Whether the values of both sides are compared as they are, but for rows of padding."""
        is_bool = [one.dtype == "bool" for one in (match.baseline, match.candidates[0])]
        return is_bool[0] == is_bool[1] and not match.baseline.site.endswith(CACHES) and not self.has_layout(match)

    def _tensors(self, match: MatchedPair) -> tuple[Tensor, Tensor]:
        """Return both sides in one layout: as a map says, transposed, slots of a cache or a mask like the other's."""
        import torch

        from glassengine.numerics.mask_values import seen_by

        entry, other = match.baseline, match.candidates[0]
        x = self.left.tensor(entry)
        parts = [self.right.tensor(one) for one in match.candidates]
        if match.rule is not None:
            where = f"{entry.site!r} and {match.candidate_site!r}, step {entry.step}"
            try:
                x = layouts.apply(match.rule.baseline_ops, x, lookup=self._lookup(self.left, entry))
                lookups = [self._lookup(self.right, one) for one in match.candidates]
                parts = [assembled(match.rule, list(zip(parts, lookups, strict=True)))]
            except UsageError as error:
                raise UsageError(
                    f"the map does not fit {where}: {error.what}", got=error.got, expected=error.expected
                ) from error
        y = parts[0]
        if entry.site in self.transpose and x.ndim < 2:
            raise UsageError(
                f"{entry.site!r} cannot be transposed", got=entry.describe(), expected="two dimensions or more"
            )
        # A pattern such as "*.weight" also names vectors, which have nothing to exchange.
        if x.ndim > 1 and any(matches(pattern, entry.site) for pattern in self.transpose):
            x = x.mT
        if self.has_layout(match):
            return x, y
        if entry.site.endswith(CACHES) and x.ndim == y.ndim > 2:
            ours, theirs = self.paddings
            known = [used for used in (ours.slots(entry), theirs.slots(other)) if used is not None]
            used = min([x.shape[-2], y.shape[-2], *known])
            x, y = x.narrow(-2, 0, used), y.narrow(-2, 0, used)
        if x.dtype is torch.bool:
            y = seen_by(y, x)
        elif y.dtype is torch.bool:
            x = seen_by(x, y)
        return x, y

    def _lookup(self, side: SourceWrapper, near: Entry) -> layouts.Lookup:
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


def _masked(valid: np.typing.NDArray[np.bool_], values: ArrayValues) -> ArrayValues:
    """Return 0 where elements do not count."""
    return values._replace(array=np.where(valid, values.array, np.zeros((), values.array.dtype)))


def assembled(rule: MapRule, parts: Sequence[tuple[Tensor, Callable[[str], Tensor]]]) -> Tensor:
    """Return the tensor that the candidates of a rule are together.

    Args:
        rule: Of a map.
        parts: Each candidate of each of `maps.steps_of`, with what looks up other tensors of its step.
    """
    made = [layouts.apply(rule.candidate_ops, part, lookup=lookup) for part, lookup in parts]
    number = len(rule.candidates)
    of_steps = [_joined(rule, made[at : at + number]) for at in range(0, len(made), number)]
    return of_steps[0] if rule.accumulate is None else _concatenated(of_steps, rule.accumulate)


def _joined(rule: MapRule, parts: Sequence[Tensor]) -> Tensor:
    if rule.is_sum:
        import torch

        if any(part.shape != parts[0].shape for part in parts):
            raise UsageError("the candidates cannot be added", got=", ".join(str(list(part.shape)) for part in parts))
        return torch.stack(list(parts)).sum(0)
    return parts[0] if rule.concat_dim is None else _concatenated(parts, rule.concat_dim)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    import torch

    try:
        return torch.cat(list(parts), dim)
    except (RuntimeError, IndexError) as error:
        got = ", ".join(str(list(part.shape)) for part in parts)
        raise UsageError(f"the candidates cannot be concatenated along dimension {dim}", got=got) from error
