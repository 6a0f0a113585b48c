"""Legal choices: whether what a candidate's op chose is legal, given the values that the candidate itself chose among.

An op that compares floating values (a ranking, a comparison, a pool, a quantization) may choose otherwise than float64
does where the values differ by less than the error with which the candidate holds them: it may have used unrounded
values. Ties above an op, where the choice of the candidate is not known, are in `tie_propagation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.ops.arguments import argument
from glassengine.ops.row import Choice
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

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


def chosen_along(op: Node) -> Any:
    """Return the dimension along which an op chooses; None if it chooses one element of all."""
    return argument(op, "dim")


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
    dim = chosen_along(op)
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
