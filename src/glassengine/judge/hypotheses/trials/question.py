"""Expected and actual values of a piece, and the test whether an edit explains the difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.trials.trial import FAILS, Trial, real_parts
from glassengine.judge.pieces import Piece
from glassengine.numerics.float64 import is_real
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.mask_values import HIDDEN, sentinel

_ROUNDINGS = 8.0
"""An explanation may leave so many times what rounding leaves of the right op."""
_BETTER = 4.0
"""It is nearer to what the candidate made than the right op by this factor at least."""
_NEARER = 2.0
"""What differs by rounding only is nearer than the right op by this factor."""
_CERTAIN = 4.0
"""A proof leaves no more than so many times what rounding leaves of the right op."""
_APART = 8.0
"""And the right op is farther from what the candidate made than the explanation by this factor at least."""
_FAR = 1e3
"""Values that stand for what is hidden are larger than all others by this factor at least."""
_SAMPLED = 4096
"""Elements that are looked at before all of them are."""
_LEAST = 3.0
"""From so many roundings on there is something to explain."""


@dataclass(frozen=True)
class TheirRegion:
    """The candidate's own ops on its own values, and what people call the tensors that they read."""

    trial: Trial
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """One op or region that went wrong.

    Attributes:
        trial: The baseline's piece on the candidate's own inputs.
        actual: What the candidate made, float64.
        valid: Mask of the elements that count; None for all.
        noise: Rounding of the right piece, relative to the size of its result.
        labels: Name of a node of the piece -> what people call it.
        weights: Names of all of the baseline's nodes that are weights.
        others: What else could have been read: name for people -> tensor, in its own dtype.
        theirs: The candidate's own ops that match the piece; empty if unknown.
        their_values: Literal and 0-dim constants that these ops use.
        their_weights: Weights of the candidate that these ops read, by name.
        held: Nodes of the candidate that are such weights -> their names.
        read: Inputs of the piece whose counterparts these ops read.
        kept: Names of the baseline's inputs and buffers that hold what the step before left.
        sources: Name for people of each of `others` -> its node.
        run_theirs: Computes the candidate's region; None where that is not known.
        full: Name of each of these -> its full name.
        model: Every weight of the baseline by its full name.
        named: The baseline's own nodes by name; a piece holds copies of some.
        is_another: Whether the candidate's tensor belongs to other ops of the baseline: no other tensor explains it.
        is_still_computed: Whether the candidate computes a node all the same that may have been left out.
        maker: Name for people of what makes the values of a node of the baseline.
        is_written_alike: Whether the candidate has the line of an op word for word, though not those of all ops above.
        are_exchanged: Whether the candidate reads each of two nodes of the baseline where the other one belongs.
        native: The piece in the candidate's dtype without casts to a finer one; None where it has no such casts.
    """

    trial: Trial
    actual: torch.Tensor
    valid: torch.Tensor | None
    noise: float
    labels: Mapping[str, str] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    theirs: Sequence[Node] = ()
    their_values: Sequence[Any] = ()
    their_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    full: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, torch.Tensor] = field(default_factory=dict)
    named: Mapping[str, Node] = field(default_factory=dict)
    is_another: bool = False
    native: torch.Tensor | None = None
    held: Mapping[str, str] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    is_still_computed: Callable[[Node], bool] = lambda lost: False
    maker: Callable[[Node], str] = lambda node: node.name
    is_written_alike: Callable[[Node], bool] = lambda op: False
    are_exchanged: Callable[[Node, Node], bool] = lambda one, other: False
    kept: frozenset[str] = frozenset()
    sources: Mapping[str, Node] = field(default_factory=dict)
    run_theirs: Callable[[], TheirRegion | None] = lambda: None

    @cached_property
    def there(self) -> TheirRegion | None:
        """The candidate's region, where it makes the candidate's tensor of what both sides have."""
        found = self.run_theirs()
        is_known = found is not None and self.left(found.trial.right) <= _CERTAIN * self._rounding(found.trial.right)
        return found if is_known else None

    @property
    def right(self) -> torch.Tensor:
        """What the baseline's piece makes in float64."""
        return self.trial.right

    def label(self, node: Node) -> str:
        """Return what people call a node of the piece."""
        return self.labels.get(node.name, node.name)

    def in_baseline(self, node: Node) -> Node:
        """Return a node of the piece as it is in the baseline's whole graph."""
        return self.named.get(node.name, node)

    def has_all(self, nodes: Sequence[Node]) -> bool:
        """Whether some nodes are ops of the piece, each of which the candidate has as often."""
        ours, theirs = ([op.target for op in ops] for ops in (self.trial.ops, self.theirs))
        return all(0 < ours.count(node.target) <= theirs.count(node.target) for node in nodes)

    def left(self, value: torch.Tensor | None) -> float:
        """Return how far a value is from what the candidate made, root mean square; infinite across masks."""
        if value is None or is_real(value) != is_real(self.actual):
            return math.inf
        return _distance(value.double(), self.actual.double(), self.valid, self._limit)

    def _rounding(self, value: torch.Tensor) -> float:
        """Return how much rounding leaves of a value, root mean square."""
        return self.noise * max(_size(value, self.valid, self._limit), self._size_of_right)

    @cached_property
    def _limit(self) -> float:
        return _limit_of(self.right, self.actual)

    @cached_property
    def _size_of_right(self) -> float:
        return _size(self.right, self.valid, self._limit)

    @cached_property
    def of_right(self) -> float:
        """How far the right value is from what the candidate made."""
        return self.left(self.right)

    def explains(self, value: torch.Tensor | None, left: float | None = None) -> bool:
        """Whether a value, `left` from what the candidate made, is that up to rounding, and the right one is not."""
        left, of_right = self.left(value) if left is None else left, self.of_right
        if value is None or not left < math.inf or left * _BETTER > of_right:
            return False
        rounding = self._rounding(value)
        if of_right <= _LEAST * rounding or left > _ROUNDINGS * rounding:
            return False  # nothing that rounding does not explain; more than it leaves
        # A mean over many elements does not show one that is not explained.
        most = max(_largest(self.right, self.actual, self.valid, self._limit), 4 * _ROUNDINGS * rounding)
        return _largest(value, self.actual, self.valid, self._limit) <= 0.25 * most

    def is_apart(self, value: torch.Tensor | None) -> bool:
        """Whether a few elements show already that a value explains nothing, and comes no nearer than the right one.

        An explanation leaves no element farther off than `explains` allows, whichever are looked at.
        """
        if not is_real(value) or value.shape != self.actual.shape:
            return False
        where, theirs, right_error, most = self._sample
        if where is None:
            return False
        error = torch.where(theirs.abs() < self._limit, value.flatten()[where] - theirs, 0.0).abs()
        if not float(error.max()) > most:
            return False
        return right_error > 0 and float(error.square().mean().sqrt()) >= right_error

    @cached_property
    def _sample(self) -> tuple[torch.Tensor | None, torch.Tensor, float, float]:
        """Some elements that count: their places, what the candidate made, how far the right value is, and may be."""
        nothing, are_real = (None, self.actual, 0.0, 0.0), is_real(self.actual) and is_real(self.right)
        if not are_real or self.right.shape != self.actual.shape or self.actual.numel() <= _SAMPLED:
            return nothing
        step = self.actual.numel() // _SAMPLED | 1
        where = torch.arange(0, self.actual.numel(), step)
        if self.valid is not None:
            where = where[self.valid.flatten()[where]]
        theirs = self.actual.double().flatten()[where]
        usable = theirs.abs() < self._limit
        right = torch.where(usable, self.right.double().flatten()[where] - theirs, 0.0)
        if not where.numel() or not bool(right.isfinite().all()):
            return nothing
        rounding = 2 * self._rounding(self.actual)
        most = 0.25 * max(_largest(self.right, self.actual, self.valid, self._limit), 4 * _ROUNDINGS * rounding)
        return where, theirs, float(right.square().mean().sqrt()), most

    def unexplained(self, value: torch.Tensor) -> float:
        """Return the share of the error that is left where a value is taken for the right one, 0 to 1."""
        left, of_right = self.left(value), self.of_right
        return min(1.0, left / of_right) if 0 < of_right < math.inf else 0.0

    def proves(self, value: torch.Tensor) -> bool:
        """Whether a value that explains is what the candidate made beyond doubt: nothing but rounding is left.

        Where nothing is finite, anything that makes no number explains it.
        """
        left = self.left(value)
        if not bool(_usable(self.actual.double(), self.valid, self._limit).any()):
            return False
        return left <= _CERTAIN * self._rounding(value) and left * _APART <= self.of_right

    def needs_both(self, both: torch.Tensor | None, alone: Sequence[torch.Tensor | None], num_tried: int) -> bool:
        """Whether two changes together explain what neither does alone, and not since so many pairs were tried.

        A change that has nothing to do with an error comes as near as a share of it, in every other element and in
        those between, with a chance of this share each. Nothing comes nearer than rounding, much in half precision.

        Args:
            both: What is made with both.
            alone: What is made with each of them; None where the ops do not take it.
            num_tried: Pairs that were tried.
        """
        if both is None:
            return False
        rounding = self._rounding(both)
        for value in (one for one in alone if one is not None and one.shape == self.actual.shape):
            chance = 1.0
            for start in (0, 1):
                near, far = (self._left_of_every_other(one, start) for one in (both, value))
                chance *= max(near, rounding) / far if far else math.inf
            if not chance * num_tried * _APART <= 1:
                return False
        return True

    def _left_of_every_other(self, value: torch.Tensor, start: int) -> float:
        mask = None if self.valid is None or self.valid.shape != self.actual.shape else self.valid.flatten()[start::2]
        one, other = (each.double().flatten()[start::2] for each in (value, self.actual))
        return _distance(one, other, mask, self._limit)

    def differs(self, value: torch.Tensor | None) -> bool:
        """Whether a value is another one than the right one: by more than rounding, or by what the candidate shows.

        In half precision a few roundings hide a difference of some percent. What the candidate made is then clearly
        nearer to the value of its own argument.
        """
        if value is None or value.shape != self.right.shape:
            return True
        rounding = self._rounding(value)
        if _distance(value.double(), self.right.double(), self.valid, self._limit) > _ROUNDINGS * rounding:
            return True
        return self.of_right > rounding and self.left(value) * _NEARER < self.of_right


def noise_of(piece: Piece, right: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the rounding of a piece in its own dtypes, relative to the size of its result."""
    if not actual.is_floating_point():
        return 0.0
    least = unit_roundoff(actual.dtype)
    limit = _limit_of(right, actual)
    size = _size(right, None, limit)
    try:
        (made,) = map(real_parts, piece.run())
    except FAILS:
        return 4 * least
    error = _distance(made.double(), right.double(), None, limit) if made.shape == right.shape else 0.0
    return max(least, error / size) if size and error < math.inf else least


def broadcasts_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether tensors of two shapes may stand for each other where sizes of 1 are repeated: a row for a column."""
    return len(one) == len(other) and all(a == b or 1 in (a, b) for a, b in zip(one, other, strict=True))


def _limit_of(right: torch.Tensor, actual: torch.Tensor) -> float:
    """Return from which size on values stand for what is hidden: beside -1e9 no score counts, nor does an error of one.

    Both have such values in the same places, far beyond all others.
    """
    beyond, low = sentinel(torch.float64), -math.inf
    if is_real(right) and is_real(actual) and right.shape == actual.shape and right.numel():
        low = float(right.min()) / 2
    if not -beyond < 2 * low <= HIDDEN:
        return beyond
    hidden = right <= low
    others = right[~hidden].abs()
    is_fill = int(hidden.sum()) > 1 and torch.equal(hidden, actual <= low)
    return -low if is_fill and others.numel() and float(others.max()) * _FAR <= -low else beyond


def _usable(value: torch.Tensor, valid: torch.Tensor | None, limit: float) -> torch.Tensor:
    keep = value.abs() < limit
    return keep if valid is None or valid.shape != value.shape else keep & valid


def _distance(a: torch.Tensor, b: torch.Tensor, valid: torch.Tensor | None, limit: float) -> float:
    """Return the root mean square of the difference; infinite where shapes, masked or undefined elements differ."""
    if a.shape != b.shape or not torch.equal(ours := _usable(a, valid, limit), _usable(b, valid, limit)):
        return math.inf
    if not bool(ours.all()):
        rest = ~ours if valid is None or valid.shape != a.shape else ~ours & valid
        x, y = a[rest], b[rest]
        if not torch.equal(x.isnan(), y.isnan()) or bool((x.sign() * y.sign() < 0).any()):
            return math.inf
    return _mean(torch.where(ours, a - b, 0.0))


def _mean(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt()) if error.numel() else 0.0


def _largest(a: torch.Tensor, b: torch.Tensor, valid: torch.Tensor | None, limit: float) -> float:
    if a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    error = torch.where(_usable(a, valid, limit) & _usable(b, valid, limit), a - b, 0.0).abs()
    return float(error.max()) if error.numel() else 0.0


def _size(value: torch.Tensor, valid: torch.Tensor | None, limit: float) -> float:
    wide = value.double()
    return _mean(torch.where(_usable(wide, valid, limit), wide, 0.0))


def in_its_dtype(piece: Piece, actual: torch.Tensor) -> torch.Tensor | None:
    """Return what a piece makes in the dtype of the model, where it casts to a finer one; None where it does not."""
    own, is_cast = actual.dtype, any(torch.float32 in (*op.args, *op.kwargs.values()) for op in piece.ops)
    if not is_cast or not own.is_floating_point or unit_roundoff(own) <= unit_roundoff(torch.float32):
        return None

    def coarse(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(own) if is_real(value) else value
        return own if value in (torch.float32, torch.float64) else value

    graph = piece.module.graph
    values: dict[Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), piece.arguments(), strict=True))
    try:
        for op in piece.ops:
            args, kwargs = torch.fx.node.map_arg((op.args, dict(op.kwargs)), values.__getitem__)
            called: Any = op.target
            args, kwargs = pytree.tree_map(coarse, (args, kwargs))
            values[op] = pytree.tree_map(coarse, called(*args, **kwargs))
    except FAILS:
        return None
    made = values[graph.output_node().all_input_nodes[0]]
    return made.double() if isinstance(made, torch.Tensor) else None
