"""Ties: elements that may legally differ because an op above chooses among values that rounding cannot tell apart.

A choice (of experts, of the larger of two values, of a bucket) is made once more in float64, otherwise wherever
rounding could flip it; what reads it is computed from the other choice (see `other_values`). Elements that come out
different depend on the tie and are excluded: of a mixture of experts one token, and later what attends to it. Nothing
depends on a tie any more where the other choice is dropped, or comes to the same (two experts in another order). Two
values are close if errors could bring them together that, as errors of values, would be called rounding.

What two flips may undo (how many tokens an expert gets, and where they are when sorted by expert) is not known from
one other choice: it depends on the tie as a whole, and so does all below it.

Here the choice of a candidate is not known, so every legal one counts. Whether the choice that a candidate did make is
a legal one is another question, which `ties` answers from the values that the candidate itself chose among.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.exclusions.other_values import EXACT, WHOLE, Source, Values, differs
from glassengine.judge.exclusions.ties import chosen_along, is_comparison, ranking
from glassengine.numerics.judgement import SUSPICIOUS, unit_roundoff
from glassengine.ops.arguments import argument
from glassengine.ops.row import Choice
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import ExemptionReason

_SAME = 2.0**-10
"""Of a unit roundoff: a negligible difference."""


class Ties(Source):
    """What depends on a choice among values that rounding cannot tell apart."""

    kind: ExemptionReason = "ties"
    lane = EXACT
    negligible = _SAME
    is_lost_as_a_whole = True
    is_choice = True

    def other(self, node: Node, below: Any, values: Values, others: Mapping[Node, Any]) -> Any:
        """Return what a node makes of the other choices above it, with other choices of its own."""
        exact, *runs = values[node]
        if below is WHOLE or traits_of(node).is_arbitrary or (below is exact and _is_continuous(exact)):
            return below
        other = _chosen_otherwise(node, values, below, others)
        return pytree.tree_map(_unstable, other, exact, *runs) if _is_alike(other, exact, *runs) else WHOLE

    def loses(self, node: Node, others: Mapping[Node, Any]) -> bool:
        """Return whether a node reads integers that a tie turns over, and several of them decide together."""
        if _is_of_places(node):
            return False
        leaves = [leaf for source in node.all_input_nodes for leaf in pytree.tree_leaves(others.get(source))]
        return any(isinstance(leaf, Tensor) and not _is_continuous(leaf) for leaf in leaves)


def settled_sources(node: Node, values: Values) -> dict[str, Tensor]:
    """Return, of the floating values that a choice compares, those in which rounding has no part; NaN for others."""
    if ranking(node) is None and not is_comparison(node) and op_name(node) != "quantize":
        return {}
    found = {}
    for source in node.all_input_nodes:
        runs = values[source]
        if _is_float(runs[0]):
            found[source.name] = torch.where(_spread(runs) == 0, runs[0].double(), torch.nan)
    return found


def _chosen_otherwise(node: Node, env: Values, other: Any, others: Mapping[Node, Any]) -> Any:
    """Return `other`, the result of `node`, with other choices wherever rounding could turn them over."""
    sources = [arg for arg in node.args if isinstance(arg, Node)]
    if not sources or not isinstance(env[sources[0]][0], Tensor):
        return other
    values = env[sources[0]]
    choice = ranking(node)
    if choice is not None and _is_float(values[0]) and values[0].dim():
        # Of several ties above, one may be turned over and another not: the choice is any.
        u = unit_roundoff(sources[0].meta["val"].dtype)
        hangs = differs(others[sources[0]], values[0], _SAME * u) if sources[0] in others else None
        return _ranked_otherwise(node, choice, values, other, hangs)
    if is_comparison(node):
        sides = [env[arg] if isinstance(arg, Node) else [arg] * len(values) for arg in node.args[:2]]
        if not all(_is_float(side[0]) for side in sides if isinstance(side[0], Tensor)):
            return other
        gaps = [a - b for a, b in zip(*sides, strict=True)]
        noise = _spread(gaps)
        # Where no run is elsewhere, rounding has no part in it (0 where nothing is seen); where one is, two
        # runs may underestimate the noise.
        margin = SUSPICIOUS * torch.where(noise > 0, _noise(gaps, -1) if gaps[0].dim() else noise, 0.0)
        return other ^ ((gaps[0].abs() <= margin) & (margin > 0) & (other == env[node][0]))
    is_integer = isinstance(other, Tensor) and not _is_float(other) and other.dtype is not torch.bool
    if traits_of(node).casts and is_integer and _is_float(values[0]):
        return _cast_otherwise(sources[0], values, other, env[node][0])
    return other


def _cast_otherwise(source: Node, values: Sequence[Tensor], other: Tensor, exact: Tensor) -> Tensor:
    spread = _spread(values)
    if not bool(spread.any()):
        return other
    rounding = unit_roundoff(source.meta["val"].dtype) * values[0].abs().nan_to_num(0.0, 0.0, 0.0)
    margin = SUSPICIOUS * torch.where(spread > 0, torch.maximum(spread, rounding), 0.0)
    low, high = ((values[0] + way * margin).trunc() for way in (-1, 1))
    turned = torch.where(low == values[0].trunc(), high, low).nan_to_num(0.0, 0.0, 0.0).to(other.dtype)
    return torch.where((low < high) & (other == exact), turned, other)


def _ranked_otherwise(node: Node, choice: Choice, values: Sequence[Tensor], other: Any, hangs: Tensor | None) -> Any:
    """Turn each run of close values by one rank, so that every rank of it has another element.

    Values are close to all that they are compared with if one depends on a tie (`hangs`).
    """
    exact = values[0]
    at = chosen_along(node)
    indices = other[1] if isinstance(other, (tuple, list)) else other
    if not isinstance(at, int) or not isinstance(indices, Tensor) or _is_float(indices) or exact.shape[at] < 2:
        return other  # of all elements at once, say: runs that differ are seen all the same
    order = exact.sort(dim=at, descending=_is_descending(node, choice), stable=True)
    size, noise = exact.shape[at], _noise(values, at)
    # Two runs may happen to agree with the exact one in a row, so that its noise is too small.
    noise = torch.maximum(noise, order.values.abs() * _relative(values)).nan_to_num(0.0, 0.0, 0.0)
    margin = SUSPICIOUS * (noise.narrow(at, 0, size - 1) + noise.narrow(at, 1, size - 1))
    # Between two values without rounding a tie is impossible.
    moves = (_spread(values) > 0).gather(at, order.indices)
    margin = torch.where(moves.narrow(at, 0, size - 1) | moves.narrow(at, 1, size - 1), margin, 0.0)
    close = (order.values.diff(dim=at).abs() <= margin) & (margin > 0)
    if hangs is not None:
        close = close | hangs.any(at, keepdim=True)
    ranks = torch.arange(size).reshape([size if i == at % exact.dim() else 1 for i in range(exact.dim())])
    edge = torch.zeros_like(close.narrow(at, 0, 1))
    first = torch.where(torch.cat([edge, close], at), 0, ranks).cummax(at).values
    turned = order.indices.gather(at, torch.where(torch.cat([close, edge], at), ranks + 1, first))
    is_kept = indices.dim() == exact.dim()
    number = indices.shape[at] if is_kept else 1
    is_turned = torch.cat([edge, close], at) | torch.cat([close, edge], at)
    turned, is_turned = turned.narrow(at, 0, number), is_turned.narrow(at, 0, number)
    if not is_kept:
        turned, is_turned = turned.squeeze(at), is_turned.squeeze(at)
    chosen = torch.where(is_turned, turned, indices)
    if not isinstance(other, (tuple, list)):
        return chosen
    found = exact.gather(at, chosen if is_kept else chosen.unsqueeze(at))
    taken = torch.where(is_turned, found if is_kept else found.squeeze(at), other[0])
    return type(other)((taken, chosen))


def _is_descending(node: Node, choice: Choice) -> bool:
    return bool(argument(node, choice.flag)) if choice.flag else choice.descending


def _is_of_places(node: Node) -> bool:
    """Whether each element of a result depends on integers and bools at its own index, or is the one that they name."""
    traits = traits_of(node)
    return bool(traits.in_place) or (traits.moves and traits.choice is None and not traits.reorders)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_continuous(value: Any) -> bool:
    return _is_float(value) or (isinstance(value, Tensor) and value.is_complex())


def _noise(values: Sequence[Tensor], dim: int) -> Tensor:
    """What rounding does to values that are compared along `dim`: the root of the mean square over it."""
    return _spread(values).square().mean(dim, keepdim=True).sqrt()


def _relative(values: Sequence[Tensor]) -> float:
    """What rounding does to values, all in all, relative to their size."""
    size = values[0].square().mean().sqrt()
    return float((_spread(values).square().mean().sqrt() / size).nan_to_num(0.0, 0.0, 0.0))


def _spread(values: Sequence[Tensor]) -> Tensor:
    """The largest distance of a run from the exact values; 0 if not a number."""
    spread: Tensor = torch.zeros_like(values[0])
    for run in values[1:]:
        if run is not values[0] and run.shape == spread.shape:
            spread = torch.maximum(spread, (run - values[0]).abs().nan_to_num(0.0, 0.0, 0.0))
    return spread


def _unstable(other: Any, exact: Any, *runs: Any) -> Any:
    """Integers and bools that differ in some run are unstable, from any op."""
    if isinstance(other, Tensor) and not _is_continuous(other):
        for run in runs:
            other = torch.where((run != exact) & (other == exact), run, other)
    return other


def _is_alike(*results: Any) -> bool:
    leaves = [pytree.tree_leaves(result) for result in results]
    if len({len(one) for one in leaves}) != 1:
        return False
    shapes = {tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in one) for one in leaves}
    return len(shapes) == 1
