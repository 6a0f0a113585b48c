"""Lists the sources of exclusions, and gathers by reason what they exclude of the tensors of one step.

Unwritten memory may be overwritten later, so it is followed element by element: an element counts again as soon as it
holds something else. Of a draw no single other value tells what depends on it (two draws may fall on the same side of a
threshold), so all that reads a draw depends on it as a whole; a replay of the candidate's op on the values that the
candidate drew still judges it.

Undefined casts: a number that an integer dtype cannot hold (NaN, an infinity, too large a number) is cast to it. The
result depends on the processor, so no result is wrong. Model code makes such casts on purpose and drops them again: the
logarithm of a distance of 0 in relative positions. What depends on the result is found as for all sources (see
`perturbation`), in the program's own dtype, where the cast happens.

An element above the cast is excluded too if nothing is made of it but an undefined integer, or an integer that is
dropped again: another implementation may keep the 0 away from the logarithm. That is known only from the ops below the
element, which are computed ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from glassengine.judge.exclusions.masked import HiddenRows
from glassengine.judge.exclusions.perturbation import EXACT, NATIVE, WHOLE, Again, Followed, Source, Values, call_with
from glassengine.judge.exclusions.ties import Ties
from glassengine.numerics.exemptions import PADDING, TIES
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import ExemptionReason


class UndefinedCasts(Source):
    """What depends on a cast of a number that the integer dtype cannot hold, and what is only made to be cast so."""

    kind: ExemptionReason = "undefined casts"
    reason = "elements of which a cast to integers makes nothing defined, or nothing that is kept"

    def __init__(self) -> None:
        self._made_for_casts: set[Node] | None = None
        self._ahead: dict[Node, Any] = {}
        self._lost_at: dict[Node, torch.Tensor] = {}

    def marks(self, node: Node, value: torch.Tensor, values: Values) -> torch.Tensor | None:
        """Return where a cast to integers reads a number that the dtype cannot hold."""
        if not _makes_integers(node):
            return None
        return _beyond(values[node.all_input_nodes[0]][NATIVE], value.dtype)

    def drops(self, node: Node, value: torch.Tensor, values: Values) -> torch.Tensor | None:
        """Return the elements of which nothing is made but undefined integers, or integers that are dropped again."""
        if self._made_for_casts is None:
            self._made_for_casts = _made_for_casts(node.graph)
        if node not in self._made_for_casts:
            return None
        try:
            return self._lost(node, value, values)
        except _Unknown:
            return None

    def _lost(self, node: Node, value: torch.Tensor, values: Values) -> torch.Tensor:
        """Return the elements that end undefined or dropped in every op that reads them.

        Raises:
            _Unknown: An op that is still to come does not work element by element.
        """
        if node in self._lost_at:
            return self._lost_at[node]
        lost = torch.ones_like(value, dtype=torch.bool)
        for user in _readers(node):
            if _sizes(user) != _sizes(node):
                raise _Unknown
            if _may_drop(user, node):
                condition = self._computed(user.args[0], values)  # type: ignore[arg-type]
                lost = lost & (~condition if user.args[1] is node else condition)
                continue
            of_user = torch.zeros_like(lost)
            if user in (self._made_for_casts or ()):
                with contextlib.suppress(_Unknown):
                    of_user = self._lost(user, self._computed(user, values), values)
            beyond = _beyond(value, user.meta["val"].dtype) if _makes_integers(user) else None
            lost = lost & (of_user if beyond is None else of_user | beyond)
        self._lost_at[node] = lost
        return lost

    def _computed(self, node: Node, values: Values) -> Any:
        """Return the value of a node that may be still to come, in the program's own dtype."""
        try:
            return values[node][NATIVE]
        except KeyError:
            if node not in self._ahead:
                # In place, or numbers that a program makes to compute with.
                if not traits_of(node).in_place and not traits_of(node).moves:
                    raise _Unknown from None
                self._ahead[node] = call_with(node, lambda source: self._computed(source, values))
            return self._ahead[node]


class _Unknown(Exception):
    """An op that is still to come does not work element by element."""


class Unwritten(Source):
    """What depends on memory that nothing has written; in float64 such elements are NaN."""

    kind: ExemptionReason = "unwritten memory"
    lane = EXACT

    def marks(self, node: Node, value: Tensor, values: Values) -> Tensor | None:
        """Return all of what an allocation gives."""
        return torch.ones_like(value, dtype=torch.bool) if traits_of(node).is_unwritten else None


class Draws(Source):
    """What depends on random numbers, as a whole."""

    kind: ExemptionReason = "random"
    lane = EXACT
    is_choice = True

    def other(self, node: Node, below: Any, values: Values, other_values: Mapping[Node, Any]) -> Any:
        """Return an unknown value for a draw, and the value of what every draw makes alike."""
        if _is_settled(node):
            return values[node][self.lane]
        return WHOLE if traits_of(node).is_random else below


def _is_settled(node: Node) -> bool:
    """Whether a node compares draws from [0, 1) with a number that decides it: a dropout of 0, written by hand."""
    source, bound = (*node.args, None, None)[:2]
    is_drawn = isinstance(source, Node) and op_name(source) in ("rand", "rand_like")
    if not is_drawn or not isinstance(bound, (int, float)):
        return False
    return bound <= 0 if op_name(node) == "ge" else bound >= 1 and op_name(node) == "lt"


_SOURCES: tuple[type[Source], ...] = (Unwritten, UndefinedCasts, HiddenRows, Ties, Draws)
"""In the order in which an element with several reasons is counted."""
TEXTS = {source.kind: source.reason for source in _SOURCES if source.reason}
"""Reasons in the list of skipped tensors; of other reasons only elements are counted."""
CHOICES = frozenset(source.kind for source in _SOURCES if source.is_choice)
"""Reasons that do not count for a candidate's op that is replayed on the candidate's own values."""


def sources_of(hidden: Callable[[Node], Tensor | None] | None) -> list[Source]:
    """Return the sources of one step.

    Args:
        hidden: Gives where the scores of a softmax hold numbers that hide a key (see `HiddenRows`); None if the inputs
            of the program say which rows are padding.
    """
    kinds = [kind for kind in _SOURCES if kind is not HiddenRows or hidden is not None]
    return [HiddenRows(hidden) if kind is HiddenRows else kind() for kind in kinds]


class Excluded(NamedTuple):
    """Of one tensor.

    Attributes:
        by_reason: Reason -> bool mask that broadcasts against it.
        valid: Elements that count, choices aside; None if all do.
        tied: Elements of which another value is legal below a tie; None if there are none.
    """

    by_reason: dict[ExemptionReason, Tensor]
    valid: Tensor | None
    tied: Tensor | None


class Exclusions:
    """What is excluded in one step, found in graph order.

    Args:
        sources: What leaves elements undefined.
        again: Computes a node once more in float64; for the sources that are followed there.
    """

    def __init__(self, sources: Sequence[Source], again: Again) -> None:
        self._followed = [Followed(source, again if source.lane == EXACT else None) for source in sources]

    def carry(self, node: Node, values: Mapping[ExemptionReason, Any]) -> None:
        """Take over, for an input that is a cache, what `carried` returned in the step before."""
        for one in self._followed:
            if one.source.kind in values:
                one.perturbed[node] = values[one.source.kind]

    def carried(self, node: Node) -> dict[ExemptionReason, Any]:
        """Return the other values of a node, by reason."""
        return {one.source.kind: one.perturbed[node] for one in self._followed if node in one.perturbed}

    def visit(self, node: Node, values: Values) -> None:
        """Follow all sources through a computed node.

        Args:
            node: The node.
            values: Of the nodes computed so far, this one among them: exact, in the program's dtype, and noisy.
        """
        for one in self._followed:
            one.visit(node, values)

    def of(self, node: Node, values: Values, real: Tensor | None, dtype: torch.dtype) -> Excluded:
        """Return what is excluded of a tensor.

        Args:
            node: Its node, visited last.
            values: As for `visit`.
            real: Bool mask of the elements other than padding; None if all are.
            dtype: In which it is rounded.
        """
        masks: dict[ExemptionReason, Tensor] = {} if real is None else {PADDING: ~real}
        for one in self._followed:
            if (mask := one.excluded(node, values, dtype)) is not None:
                masks[one.source.kind] = mask
        undefined = [mask for reason, mask in masks.items() if reason not in CHOICES]
        valid = ~reduce(torch.logical_or, undefined) if undefined else None
        return Excluded(masks, valid, masks.get(TIES))

    def force(self, node: Node) -> None:
        """Take note that the value of a node is now the one that a candidate chose."""
        for one in self._followed:
            if one.source.is_choice:
                one.settle(node)

    def settle(self, node: Node) -> None:
        """Take note that nothing reads `node` any more."""
        for one in self._followed:
            one.settle(node)


def _made_for_casts(graph: Graph) -> set[Node]:
    """Return floating nodes of which only integers are made, and integers cast from floats that may be dropped."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        readers = _readers(node)
        in_place = {user for user in readers if traits_of(user).in_place}
        leads_on = {user for user in in_place if user in found or (_makes_integers(user) and _is_float(node))}
        if readers and all(user in leads_on or _may_drop(user, node) for user in readers):
            found.add(node)
    cast: set[Node] = set()
    for node in graph.nodes:
        if (_makes_integers(node) and _is_float(node.args[0])) or not cast.isdisjoint(node.all_input_nodes):
            cast.add(node)
    return {node for node in found if _is_float(node) or node in cast}


def _may_drop(user: Node, node: Node) -> bool:
    """Whether `user` takes integers from `node` where it does not take them from elsewhere."""
    is_branch = traits_of(user).condition == 0 and len(user.args) == 3 and user.args.count(node) == 1
    return is_branch and user.args[0] is not node and not _is_float(node)


def _sizes(node: Node) -> list[str]:
    """Return the shape of a node; sizes that are symbols are not compared by value, which would bind them."""
    return [str(size) for size in node.meta["val"].shape]


def _is_float(node: Any) -> bool:
    kept = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(kept, torch.Tensor) and kept.is_floating_point()


def _readers(node: Node) -> list[Node]:
    return [user for user in node.users if "_assert" not in str(user.target)]


def _makes_integers(node: Node) -> bool:
    """Whether a node casts to an integer dtype."""
    kept = node.meta.get("val")
    if not isinstance(kept, torch.Tensor) or kept.is_floating_point() or kept.is_complex():
        return False
    return kept.dtype is not torch.bool and traits_of(node).casts


def _beyond(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return which numbers an integer dtype cannot hold."""
    if not source.is_floating_point():
        return None
    limits = torch.iinfo(dtype)
    return ~((source > limits.min - 1.0) & (source < limits.max + 1.0))
