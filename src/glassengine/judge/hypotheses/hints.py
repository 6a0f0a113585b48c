"""Hints of one divergence: a mistake that was tried and fits, else what differs in programs and values."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.error_direction import is_summed_coarsely, literal_shown
from glassengine.judge.hypotheses.inside import trees_differ
from glassengine.judge.hypotheses.mistake_search import MistakeSearch
from glassengine.judge.hypotheses.mistakes.catalog import Family
from glassengine.judge.replay.values import called
from glassengine.judge.sides.protocol import Side
from glassengine.numerics.distances import tensor_hints
from glassengine.numerics.verdict import Reference
from glassengine.program.onnx.control import never_run
from glassengine.program.onnx.function import thresholds_of
from glassengine.program.representation.program import Program
from glassengine.results import Hint
from glassengine.sites import Site

_MOST_ASKED = 8
"""Divergences of one side that are explained, the earliest ones."""
_MOST_PRODUCTS = 16
"""Products of one side whose errors are looked at, the earliest ones."""


class Hints:
    """The hints of the divergences of one side.

    Args:
        program: The baseline's.
        side: Under judgement.
    """

    def __init__(self, program: Program, side: Side) -> None:
        self._program = program
        self._side = side
        self._num_asked = 0
        self._looked: set[str] = set()
        self._learned: dict[str, tuple[float, Family]] = {}
        self._shown: dict[str, Hint] = {}
        self._num_products = 0
        self.covered: Set[str] = frozenset()
        """Earlier flagged nodes that the mistake of the last divergence explains as well."""
        self.lost: str | None = None
        """That of them which the side does not read."""
        self.place: Site | None = None
        """Op of a region, not its end, whose mistake makes what the side made: that of the last divergence."""
        self.num_untried = 0
        """Families of mistakes that were not tried on the last divergence."""

    def of(self, node: Node, tensor: torch.Tensor, reference: Reference, flagged: Sequence[str]) -> list[Hint]:
        """Return what kind of mistake it is: one that makes what the side made, or else what only looks like it.

        Args:
            node: Of the baseline.
            tensor: What the side made.
            reference: Of the node.
            flagged: Nodes that were flagged before in this step.
        """
        search = self._search(flagged)
        self.place = None
        self.covered, self.lost, self.num_untried = frozenset(), None, 0
        found: list[Hint] = []
        if search is not None and self._num_asked < _MOST_ASKED:
            self._num_asked += 1
            inside = search.inside(node)
            if inside is not None:
                return [Hint("other", inside.text, 1.0, evidence="inside")]
            found = search.hints(node, tensor, reference.valid)
            self.place = next(iter(self._program.sites.by_node.get(search.place or "", ())), None)
            self.num_untried = search.num_skipped
            self.covered = search.covered if found and found[0].proven else frozenset()
            self.lost = search.lost
            if node.name in self._shown and not (found and found[0].proven):
                shown = self._shown[node.name]
                found = [shown, *(hint for hint in found if not _is_one_number(hint, shown))]
            found = found or search.differences(node, tensor, reference.valid)
        return found or tensor_hints(reference.exact, tensor, reference.valid)

    def not_reached(self, node: Node) -> str | None:
        """Return what is different in a branch of `node` that no input took, or in its trees; None where nothing is."""
        op = called(node)[0]
        has_trees = thresholds_of(op.target) is not None
        if node.name in self._looked or not (has_trees or never_run(op.target)):
            return None
        self._looked.add(node.name)
        search = self._search()
        if has_trees:
            there = None if search is None else search.counterpart(node)
            return None if there is None else trees_differ(op, called(there)[0])
        found = None if search is None else search.inside(node)
        return None if found is None or found.is_taken else found.text

    def is_summed_coarsely(self, node: Node, tensor: torch.Tensor) -> bool | None:
        """Return whether the error of a product is that of coarse sums; None if unknown."""
        search = self._search()
        if search is None or self._num_products == _MOST_PRODUCTS:
            return None
        self._num_products += 1
        return is_summed_coarsely(search, node, tensor)

    def differences(self, node: Node, tensor: torch.Tensor, reference: Reference) -> list[Hint]:
        """Return what of the side's own op is not the baseline's, and changes the result: arguments, weights."""
        search = self._search()
        if search is None:
            return []
        shown = literal_shown(search, node, tensor, reference.valid)
        if shown is not None:
            self._shown[node.name] = shown
        return [shown] if shown is not None else search.differences(node, tensor, reference.valid)

    def _search(self, flagged: Collection[str] = ()) -> MistakeSearch | None:
        """Return what is known of the side in its present step; None where its tensors are not replayed."""
        side = self._side
        if side.replay is None:
            return None
        own = side.program if side.counterparts else None
        return MistakeSearch(self._program, side.replay.values, own, side.counterparts, flagged, learned=self._learned)


def _is_one_number(one: Hint, other: Hint) -> bool:
    """Whether two hints are of the same literal."""
    keys = [None if hint.change is None else (hint.change.argument, hint.change.candidate) for hint in (one, other)]
    return keys[0] == keys[1]
