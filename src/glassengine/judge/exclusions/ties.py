"""Ties: choices among values that rounding cannot tell apart, and elements that depend on them.

*Legal choices of a candidate* (`tied_choices`). An op that compares floating values (a ranking, a comparison, a pool, a
quantization) may choose otherwise than float64 does where the values differ by less than the error with which the
candidate holds them: it may have used unrounded values.

*Any legal choice* (`Ties`). Where the choice of the candidate is not known, a choice (of experts, of the larger of two
values, of a bucket) is made once more in float64, otherwise wherever rounding could flip it; what reads it is computed
from the other choice (see `perturbation`). Elements that come out different depend on the tie and are excluded: of a
mixture of experts one token, and later what attends to it. Nothing depends on a tie any more where the other choice is
dropped, or comes to the same (two experts in another order). Two values are close if errors could bring them together
that, as errors of values, would be called rounding. What two flips may undo (how many tokens an expert gets) is not
known from one other choice: it depends on the tie as a whole, and so does all below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.exclusions.perturbation import EXACT, WHOLE, Source, Values, differs
from glassengine.numerics.float64 import is_real
from glassengine.numerics.judgement import SUSPICIOUS, unit_roundoff
from glassengine.ops.row import Choice, argument
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import ExemptionReason

_Error = Callable[[Any, Tensor], Tensor]
"""Takes an argument of the op as the graph has it, and its value; returns how far each element may be off."""


def ranking(op: Node) -> Choice | None:
    """Return how an op ranks values, if it returns the places of those that it chooses; None for other ops."""
    choice = traits_of(op).choice
    return choice if choice is not None and choice.places and not choice.running else None


def is_comparison(op: Node) -> bool:
    """Return whether an op compares two values."""
    return traits_of(op).kind == "comparison"


def is_unordered(op: Node) -> bool:
    """Return whether an op may return the values that it chooses in any order (`topk` with sorted=False)."""
    in_order = argument(op, "sorted")
    return ranking(op) is not None and in_order is not None and not in_order


def _leaves_equals_in_any_order(op: Node) -> bool:
    """Return whether equal values may change places: in `sort` and `topk`, unless they are asked to be stable."""
    choice = ranking(op)
    return choice is not None and bool(choice.flag) and not argument(op, "stable")


def tied_choices(
    op: Node,
    args: tuple[Any, ...],
    exact: Tensor,
    candidate: Tensor,
    u_in: float,
    settled: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor | None:
    """Return a bool mask, in the shape of the result, of where another choice is legal.

    Args:
        op: The op of the baseline.
        args: The candidate's own arguments of it, floating ones in float64.
        exact: What the op makes of these: integers or bools.
        candidate: What the candidate made of them, of the same shape.
        u_in: Unit roundoff of the dtype in which the candidate holds the arguments.
        settled: Node that the op reads -> its float64 values in which rounding has no part, NaN for others. Where the
            candidate has these very values, they are what it used.

    Returns:
        None if the op does not choose by comparing floating values, or if a choice is none that it can make.
    """
    error = partial(_error, u_in=u_in, settled=settled)
    name = op_name(op)
    if ranking(op) is not None and isinstance(args[0], Tensor):
        return _of_ranking(op, args[0], exact, candidate, error)
    if is_comparison(op):
        both = [v if isinstance(v, Tensor) else torch.tensor(v) for v in args[:2]]
        if any(side.is_floating_point() for side in both):
            each = [error(leaf, v) for leaf, v in zip(op.args[:2], both, strict=True)]
            return _within_reach(*zip(both, each, strict=True)).expand(exact.shape)
    # Each of these chooses in a way of its own, by arguments that no other op has.
    if name == "max_pool2d_with_indices":
        return _same_in_plane(op, args[0], exact, candidate, error)
    if name == "quantize":
        return _near_steps(op, args, exact, candidate, error)
    return None


def _of_ranking(op: Node, values: Tensor, exact: Tensor, candidate: Tensor, error: _Error) -> Tensor | None:
    dim = argument(op, "dim")
    dim = -1 if dim is None else dim
    if not isinstance(dim, int) or values.dim() == 0:
        return None
    if not values.is_floating_point() and not _leaves_equals_in_any_order(op):
        return None
    keep = exact.dim() == values.dim()
    ours, theirs = (v.long() if keep else v.long().unsqueeze(dim) for v in (exact, candidate))
    if bool(((theirs < 0) | (theirs >= values.shape[dim])).any()):
        return None
    errors = error(op.args[0], values)
    sides = [(values.gather(dim, at), errors.gather(dim, at)) for at in (ours, theirs)]
    if is_unordered(op):
        orders = [side.sort(dim, descending=True).indices for side, _ in sides]
        sides = [(v.gather(dim, at), e.gather(dim, at)) for (v, e), at in zip(sides, orders, strict=True)]
    tied = _within_reach(*sides)
    if _leaves_equals_in_any_order(op):
        tied |= sides[0][0] == sides[1][0]
    if is_unordered(op) or not values.is_floating_point():
        distinct = (theirs.sort(dim).values.diff(dim=dim) != 0).all(dim, keepdim=True)
        tied = (tied.all(dim, keepdim=True) & distinct).expand(tied.shape)
    return tied if keep else tied.squeeze(dim)


def _same_in_plane(op: Node, values: Tensor, exact: Tensor, candidate: Tensor, error: _Error) -> Tensor | None:
    """Return where a pool may have chosen another value of the same plane; places are those in all values."""
    plane = math.prod(values.shape[2:])
    ours, theirs = exact.long(), candidate.long()
    if bool(((theirs < 0) | (theirs >= values.numel())).any()):
        return None
    errors = error(op.args[0], values).flatten()
    sides = [(values.flatten()[at], errors[at]) for at in (ours, theirs)]
    equal = sides[0][0] == sides[1][0]
    return (equal | _within_reach(*sides)) & (ours // plane == theirs // plane)


def _error(leaf: Any, value: Tensor, *, u_in: float, settled: Mapping[str, Tensor]) -> Tensor:
    """Return how far the values that a candidate used may be from those it shows: 0 for numbers of the program."""
    if not isinstance(leaf, Node) or not value.is_floating_point():
        return torch.zeros(value.shape, dtype=torch.float64)
    # Of 0, too: a sum that cancels here need not where it is computed in another order.
    error = (u_in * value.abs().double()).clamp(min=torch.finfo(torch.float64).tiny)
    known = settled.get(leaf.name)
    return error if known is None or known.shape != value.shape else torch.where(known == value, 0.0, error)


def _within_reach(*sides: tuple[Tensor, Tensor]) -> Tensor:
    """Return where two values, each with its error, may have been in the other order: if any error is that large."""
    (a, of_a), (b, of_b) = sides
    return ((a - b).abs() <= 2 * (of_a + of_b)) & (of_a + of_b > 0)


def _near_steps(op: Node, args: tuple[Any, ...], exact: Tensor, candidate: Tensor, error: _Error) -> Tensor:
    """Return where a quantized value is one that the op itself gives for an argument that is moved by its rounding."""
    first = next(i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point())
    value = args[first]
    own = error(op.args[first], value)
    ends = []
    for side in (-8, 8):
        moved = value + side * own.to(value.dtype)
        found: Any = op.target(*args[:first], moved, *args[first + 1 :], **op.kwargs)  # type: ignore[operator]
        several = found if isinstance(found, tuple) else (found,)
        ends.append(next(one for one in several if one.shape == exact.shape and one.dtype == exact.dtype))
    return (candidate >= torch.minimum(*ends)) & (candidate <= torch.maximum(*ends))


_SAME = 2.0**-10
"""Of a unit roundoff: a negligible difference."""


class Ties(Source):
    """What depends on a choice among values that rounding cannot tell apart."""

    kind: ExemptionReason = "ties"
    lane = EXACT
    negligible = _SAME
    is_lost_as_a_whole = True
    is_choice = True

    def other(self, node: Node, below: Any, values: Values, other_values: Mapping[Node, Any]) -> Any:
        """Return what a node makes of the other choices above it, with other choices of its own."""
        exact, *runs = values[node]
        if below is WHOLE or traits_of(node).is_arbitrary or (below is exact and _is_continuous(exact)):
            return below
        other = _chosen_otherwise(node, values, below, other_values)
        return pytree.tree_map(_unstable, other, exact, *runs) if _is_alike(other, exact, *runs) else WHOLE

    def loses(self, node: Node, other_values: Mapping[Node, Any]) -> bool:
        """Return whether a node reads integers that a tie turns over, and several of them decide together."""
        traits = traits_of(node)
        # Each element depends on integers and bools at its own index, or is the one that they name.
        if traits.in_place or (traits.moves and traits.choice is None and not traits.reorders):
            return False
        leaves = [leaf for source in node.all_input_nodes for leaf in pytree.tree_leaves(other_values.get(source))]
        return any(isinstance(leaf, Tensor) and not _is_continuous(leaf) for leaf in leaves)


def settled_sources(node: Node, values: Values) -> dict[str, Tensor]:
    """Return, of the floating values that a choice compares, those in which rounding has no part; NaN for others."""
    if ranking(node) is None and not is_comparison(node) and op_name(node) != "quantize":
        return {}
    settled = {}
    for source in node.all_input_nodes:
        runs = values[source]
        if is_real(runs[0]):
            settled[source.name] = torch.where(_spread(runs) == 0, runs[0].double(), torch.nan)
    return settled


def _chosen_otherwise(node: Node, env: Values, other: Any, other_values: Mapping[Node, Any]) -> Any:
    """Return `other`, the result of `node`, with other choices wherever rounding could turn them over."""
    sources = [arg for arg in node.args if isinstance(arg, Node)]
    if not sources or not isinstance(env[sources[0]][0], Tensor):
        return other
    values = env[sources[0]]
    choice = ranking(node)
    if choice is not None and is_real(values[0]) and values[0].dim():
        # Of several ties above, one may be turned over and another not: the choice is any.
        u = unit_roundoff(sources[0].meta["val"].dtype)
        hangs = differs(other_values[sources[0]], values[0], _SAME * u) if sources[0] in other_values else None
        return _ranked_otherwise(node, choice, values, other, hangs)
    if is_comparison(node):
        sides = [env[arg] if isinstance(arg, Node) else [arg] * len(values) for arg in node.args[:2]]
        if not all(is_real(side[0]) for side in sides if isinstance(side[0], Tensor)):
            return other
        gaps = [a - b for a, b in zip(*sides, strict=True)]
        noise = _spread(gaps)
        # Where no run is elsewhere, rounding has no part in it (0 where nothing is seen); where one is, two
        # runs may underestimate the noise.
        margin = SUSPICIOUS * torch.where(noise > 0, _noise(gaps, -1) if gaps[0].dim() else noise, 0.0)
        return other ^ ((gaps[0].abs() <= margin) & (margin > 0) & (other == env[node][0]))
    is_integer = isinstance(other, Tensor) and not is_real(other) and other.dtype is not torch.bool
    if traits_of(node).casts and is_integer and is_real(values[0]):
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
    at = argument(node, "dim")
    indices = other[1] if isinstance(other, (tuple, list)) else other
    if not isinstance(at, int) or not isinstance(indices, Tensor) or is_real(indices) or exact.shape[at] < 2:
        return other  # of all elements at once, say: runs that differ are seen all the same
    is_descending = bool(argument(node, choice.flag)) if choice.flag else choice.descending
    order = exact.sort(dim=at, descending=is_descending, stable=True)
    size, noise = exact.shape[at], _noise(values, at)
    # Two runs may happen to agree with the exact one in a row, so that its noise is too small.
    noise = torch.maximum(noise, order.values.abs() * _relative(values)).nan_to_num(0.0, 0.0, 0.0)
    margin = SUSPICIOUS * (noise.narrow(at, 0, size - 1) + noise.narrow(at, 1, size - 1))
    # Between two values without rounding a tie is impossible.
    moves = (_spread(values) > 0).gather(at, order.indices)
    margin = torch.where(moves.narrow(at, 0, size - 1) | moves.narrow(at, 1, size - 1), margin, 0.0)
    gaps = order.values.diff(dim=at).abs()
    close = (gaps <= margin) & (margin > 0)
    if _leaves_equals_in_any_order(node):
        close |= gaps == 0
    if hangs is not None:
        close = close | hangs.any(at, keepdim=True)
    ranks = torch.arange(size).reshape([size if i == at % exact.dim() else 1 for i in range(exact.dim())])
    edge = torch.zeros_like(close.narrow(at, 0, 1))
    first = torch.where(torch.cat([edge, close], at), 0, ranks).cummax(at).values
    turned = order.indices.gather(at, torch.where(torch.cat([close, edge], at), ranks + 1, first))
    is_kept = indices.dim() == exact.dim()
    number = indices.shape[at] if is_kept else 1
    is_turned = torch.cat([edge, close], at) | torch.cat([close, edge], at)
    turned, is_turned, stable = (v.narrow(at, 0, number) for v in (turned, is_turned, order.indices))
    if not is_kept:
        turned, is_turned, stable = (v.squeeze(at) for v in (turned, is_turned, stable))
    # Equal values may have changed places already.
    turned = torch.where(turned == indices, stable, turned)
    chosen = torch.where(is_turned, turned, indices)
    if not isinstance(other, (tuple, list)):
        return chosen
    found = exact.gather(at, chosen if is_kept else chosen.unsqueeze(at))
    taken = torch.where(is_turned, found if is_kept else found.squeeze(at), other[0])
    return type(other)((taken, chosen))


def _is_continuous(value: Any) -> bool:
    return is_real(value) or (isinstance(value, Tensor) and value.is_complex())


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
