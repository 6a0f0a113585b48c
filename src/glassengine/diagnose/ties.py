"""Ties: ops that choose by comparing floating values may choose otherwise where rounding cannot tell these apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from glassengine.program.naming import op_name

RANKINGS = frozenset({"topk", "argmax", "argmin", "max", "min", "sort", "argsort"})
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def is_unordered(op: Node) -> bool:
    """Whether the op chooses the largest values in any order that it likes."""
    if op_name(op) != "topk":
        return False
    ordered: Any = op.kwargs.get("sorted", op.args[4] if len(op.args) > 4 else True)
    return not ordered


def _leaves_equals_in_any_order(op: Node) -> bool:
    """Whether equal values may change places: all but a stable sort do so, and say no more of it."""
    return op_name(op) in ("sort", "argsort", "topk") and not op.kwargs.get("stable")


def chosen_along(op: Node) -> Any:
    """Return the dimension along which an op chooses; None where it chooses one element of all."""
    at = 2 if op_name(op) == "topk" else 1
    given = op.args[at] if len(op.args) > at else op.kwargs.get("dim")
    return -1 if given is None and op_name(op) not in ("argmax", "argmin") else given


def tied_choices(
    op: Node, args: tuple[Any, ...], exact: torch.Tensor, candidate: torch.Tensor, u_in: float
) -> torch.Tensor | None:
    """Return where another choice is legal, for ops that choose by comparing floating values; None for other ops."""
    name = op_name(op)
    if name in RANKINGS and isinstance(args[0], torch.Tensor):
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
        a, b = values.gather(dim, ours), values.gather(dim, theirs)
        if is_unordered(op):
            a, b = (side.sort(dim, descending=True).values for side in (a, b))
        tied = a == b
        if values.is_floating_point():
            tied |= (a - b).abs() <= 2 * u_in * (a.abs() + b.abs())
        if is_unordered(op) or not values.is_floating_point():
            distinct = (theirs.sort(dim).values.diff(dim=dim) != 0).all(dim, keepdim=True)
            tied = (tied.all(dim, keepdim=True) & distinct).expand(tied.shape)
        return tied if keep else tied.squeeze(dim)
    if name in COMPARISONS:
        a, b = (v if isinstance(v, torch.Tensor) else torch.tensor(v) for v in args[:2])
        if a.is_floating_point() or b.is_floating_point():
            tied = (a - b).abs() <= 2 * u_in * (a.abs() + b.abs())
            return tied.expand(exact.shape)
    if name == "quantize":
        return _near_steps(op, args, exact, candidate, u_in)
    return None


def _near_steps(
    op: Node, args: tuple[Any, ...], exact: torch.Tensor, candidate: torch.Tensor, u_in: float
) -> torch.Tensor:
    """Return where a quantised value is one that the op itself gives for an argument that is moved by its rounding."""
    first = next(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point())
    ends = []
    for side in (1 - 8 * u_in, 1 + 8 * u_in):
        found: Any = op.target(*args[:first], args[first] * side, *args[first + 1 :], **op.kwargs)  # type: ignore[operator]
        several = found if isinstance(found, tuple) else (found,)
        ends.append(next(one for one in several if one.shape == exact.shape and one.dtype == exact.dtype))
    return (candidate >= torch.minimum(*ends)) & (candidate <= torch.maximum(*ends))
