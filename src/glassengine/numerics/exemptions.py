"""Counts what a comparison leaves out: elements and tensors, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from glassengine.results import Exemption, ExemptionReason

if TYPE_CHECKING:
    import torch

PADDING: ExemptionReason = "padding"
UNWRITTEN: ExemptionReason = "unwritten memory"
ROWS: ExemptionReason = "masked rows"
CASTS: ExemptionReason = "undefined casts"
TIES: ExemptionReason = "ties"
BELOW: ExemptionReason = "below ties or padding"
DRAWN: ExemptionReason = "random"
UNREAD: ExemptionReason = "unread"
GAUGE: ExemptionReason = "written in another gauge"

Masks: TypeAlias = "Mapping[ExemptionReason, torch.Tensor]"
"""Reason -> bool mask, which broadcasts against the tensor, of the elements that do not count."""


@dataclass
class Ledger:
    """What one side was not judged by, over all cases and steps.

    Attributes:
        num_elements: Of all tensors that the side and the baseline have in common.
    """

    num_elements: int = 0
    _by_site: dict[ExemptionReason, Counter[str]] = field(default_factory=dict)

    def add(self, site: str, size: int, masks: Masks, *, whole: ExemptionReason | None = None) -> None:
        """Count one tensor.

        Args:
            site: Of the baseline.
            size: Number of its elements.
            masks: What does not count. An element with several reasons counts for the first.
            whole: Why nothing of it counts, apart from `masks`.
        """
        self.num_elements += size
        left = size
        known: torch.Tensor | None = None
        for reason, mask in masks.items():
            new = mask if known is None else mask & ~known
            known = mask if known is None else mask | known
            number = min(left, int(new.sum()) * (size // max(1, new.numel())))
            self._count(reason, site, number)
            left -= number
        if whole is not None:
            self._count(whole, site, left)

    def leave_out(self, reason: ExemptionReason, site: str, number: int) -> None:
        """Count elements of a tensor that was added before."""
        self._count(reason, site, number)

    def numbers(self) -> tuple[int, tuple[tuple[ExemptionReason, int], ...]]:
        """Return the elements, and how many do not count, by reason."""
        return self.num_elements, tuple((reason, by_site.total()) for reason, by_site in self._by_site.items())

    def merge(self, site: str, size: int, left_out: Iterable[tuple[ExemptionReason, int]]) -> None:
        """Add the `numbers` of a ledger of one tensor."""
        self.num_elements += size
        for reason, number in left_out:
            self._count(reason, site, number)

    def add_all(self, other: Ledger) -> None:
        """Add the counts of another ledger."""
        self.num_elements += other.num_elements
        for reason, by_site in other._by_site.items():
            for site, number in by_site.items():
                self._count(reason, site, number)

    def _count(self, reason: ExemptionReason, site: str, number: int) -> None:
        if number:
            self._by_site.setdefault(reason, Counter())[site] += number

    def exemptions(self) -> tuple[Exemption, ...]:
        """Return what was counted, the largest number first."""
        found = []
        for reason, by_site in self._by_site.items():
            number = by_site.total()
            largest = by_site.most_common(1)[0][0]
            found.append(Exemption(reason, number, number / self.num_elements, len(by_site), largest))
        return tuple(sorted(found, key=lambda one: -one.num_elements))


def together(*several: tuple[Sequence[Exemption], int]) -> tuple[Exemption, ...]:
    """Return the exemptions of several programs that make one model.

    Args:
        several: Of each its exemptions, and the number of all elements that were compared there.
    """
    total = sum(size for _, size in several)
    by_reason: dict[ExemptionReason, list[Exemption]] = {}
    for exemptions, _ in several:
        for one in exemptions:
            by_reason.setdefault(one.reason, []).append(one)
    joined = []
    for reason, parts in by_reason.items():
        number = sum(part.num_elements for part in parts)
        largest = max(parts, key=lambda part: part.num_elements).largest_site
        share = number / total if total else 0.0
        joined.append(Exemption(reason, number, share, sum(part.num_tensors for part in parts), largest))
    return tuple(sorted(joined, key=lambda one: -one.num_elements))
