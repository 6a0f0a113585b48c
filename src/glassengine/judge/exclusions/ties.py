"""Ties: ops that choose by comparing floating values may choose otherwise where rounding cannot tell these apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from glassengine.ops.arguments import argument
from glassengine.ops.row import Choice
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name


def ranking(op: Node) -> Choice | None:
    """Return how an op ranks values, where it tells the places of those that it chooses; None of other ops."""
    choice = traits_of(op).choice
    return choice if choice is not None and choice.places and not choice.running else None


def is_comparison(op: Node) -> bool:
    """Whether an op compares two values."""
    return traits_of(op).kind == "comparison"


def is_unordered(op: Node) -> bool:
    """Whether the op chooses the largest values in any order that it likes."""
    in_order = argument(op, "sorted")
    return ranking(op) is not None and in_order is not None and not in_order


def _leaves_equals_in_any_order(op: Node) -> bool:
    """Whether equal values may change places: all but a stable sort do so, and say no more of it."""
    choice = ranking(op)
    return choice is not None and bool(choice.flag) and not argument(op, "stable")


def chosen_along(op: Node) -> Any:
    """Return the dimension along which an op chooses; None where it chooses one element of all."""
    return argument(op, "dim")


def tied_choices(
    op: Node,
    args: tuple[Any, ...],
    exact: torch.Tensor,
    candidate: torch.Tensor,
    u_in: float,
    settled: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor | None:
    """Return where another choice is legal, for ops that choose by comparing floating values; None for other ops.

    Args:
        op: It.
        args: What the candidate fed to its own, in float64.
        exact: What the op makes of that.
        candidate: What the candidate made of it.
        u_in: Unit roundoff of what it fed: the values that it used may be unrounded ones.
        settled: Node that the op reads -> values in which no rounding has a part, NaN for others. Where the candidate
            has these very values, they are what it used.
    """
    name = op_name(op)
    if ranking(op) is not None and isinstance(args[0], torch.Tensor):
        values = args[0]
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
        errors = _error(op.args[0], values, u_in, settled)
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
    if is_comparison(op):
        both = [v if isinstance(v, torch.Tensor) else torch.tensor(v) for v in args[:2]]
        if any(side.is_floating_point() for side in both):
            each = [_error(leaf, v, u_in, settled) for leaf, v in zip(op.args[:2], both, strict=True)]
            return _within_reach(*zip(both, each, strict=True)).expand(exact.shape)
    if name == "max_pool2d_with_indices":
        return _same_in_plane(op, args[0], exact, candidate, u_in, settled)
    if name == "quantize":
        return _near_steps(op, args, exact, candidate, u_in, settled)
    return None


def _same_in_plane(
    op: Node,
    values: torch.Tensor,
    exact: torch.Tensor,
    candidate: torch.Tensor,
    u_in: float,
    settled: Mapping[str, torch.Tensor],
) -> torch.Tensor | None:
    """Return where a pool may have chosen another value within rounding; places are those in all."""
    plane = math.prod(values.shape[2:])
    ours, theirs = exact.long(), candidate.long()
    if bool(((theirs < 0) | (theirs >= values.numel())).any()):
        return None
    errors = _error(op.args[0], values, u_in, settled).flatten()
    sides = [(values.flatten()[at], errors[at]) for at in (ours, theirs)]
    equal = sides[0][0] == sides[1][0]
    return (equal | _within_reach(*sides)) & (ours // plane == theirs // plane)


def _error(leaf: Any, value: torch.Tensor, u_in: float, settled: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return how far the values that a candidate used may be from those it shows: 0 for numbers of the program."""
    if not isinstance(leaf, Node) or not value.is_floating_point():
        return torch.zeros(value.shape, dtype=torch.float64)
    error = u_in * value.abs().double()
    known = settled.get(leaf.name)
    if known is None or known.shape != value.shape:
        # Of 0, too: a sum that cancels here need not where it is computed in another order.
        return error.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(known == value, 0.0, error.clamp(min=torch.finfo(torch.float64).tiny))


def _within_reach(*sides: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return where two values may have been the other way round: there is an error, and it is as large as the gap."""
    (a, of_a), (b, of_b) = sides
    return ((a - b).abs() <= 2 * (of_a + of_b)) & (of_a + of_b > 0)


def _near_steps(
    op: Node,
    args: tuple[Any, ...],
    exact: torch.Tensor,
    candidate: torch.Tensor,
    u_in: float,
    settled: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return where a quantized value is one that the op itself gives for an argument that is moved by its rounding."""
    first = next(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point())
    value = args[first]
    error = _error(op.args[first], value, u_in, settled)
    ends = []
    for side in (-8, 8):
        moved = value + side * error.to(value.dtype)
        found: Any = op.target(*args[:first], moved, *args[first + 1 :], **op.kwargs)  # type: ignore[operator]
        several = found if isinstance(found, tuple) else (found,)
        ends.append(next(one for one in several if one.shape == exact.shape and one.dtype == exact.dtype))
    return (candidate >= torch.minimum(*ends)) & (candidate <= torch.maximum(*ends))
