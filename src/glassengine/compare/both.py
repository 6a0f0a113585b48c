"""The tensors of both sides of a match: in one layout, without what the model does not define, whole or by rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from glassengine.compare.matching import layouts
from glassengine.compare.matching.assembling import assembled
from glassengine.compare.matching.globs import NameIndex
from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.padding import CACHES
from glassengine.compare.sides import Sides
from glassengine.errors import UsageError, nearest
from glassengine.numerics.mask_values import seen_by
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.reader import HasRows
from glassengine.recording.read.source import TensorSource
from glassengine.sites import matches


@dataclass(frozen=True)
class Both(Sides):
    """The two sides, and their tensors."""

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
        ours, theirs = self.paddings
        if entry.site.endswith(CACHES) and x.ndim == y.ndim > 2:
            known = [used for used in (ours.slots(entry), theirs.slots(other)) if used is not None]
            used = min([x.shape[-2], y.shape[-2], *known])
            x, y = x.narrow(-2, 0, used), y.narrow(-2, 0, used)
        if x.dtype is torch.bool:
            y = seen_by(y, x)
        elif y.dtype is torch.bool:
            x = seen_by(x, y)
        valid = ours.valid(entry, tuple(x.shape)) if x.shape == y.shape else None
        return (x, y) if valid is None else _where(torch.from_numpy(valid), x, y)

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
        valid = self.paddings[0].valid(match.baseline, match.baseline.shape)
        if valid is not None:
            x, y = _where(torch.from_numpy(valid[first:end] if valid.shape[0] > 1 else valid), x, y)
        return x, y, checksums


def _where(valid: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sides with 0 where their elements do not count."""
    left, right = (torch.where(valid, side, torch.zeros((), dtype=side.dtype)) for side in (x, y))
    return left, right
