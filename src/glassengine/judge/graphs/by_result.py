"""Which results of two programs belong together: those of one name, and by value or in order what other names are left.

Two implementations need not call alike what they return: `logits` is `softmax_1` in an ONNX file, and has no name where
a module returns a tensor. A result that went unpaired would go unjudged, and the last op of a model with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glassengine.program.representation.program import Program
from glassengine.program.user_code.module_state import STATE

_NEAR = 0.1
"""Distance of two results that may be the same one, relative to its size; whether it is wrong is judged later."""


def paired_results(baseline: Program, candidate: Program) -> dict[str, str]:
    """Return node of `baseline` -> node of `candidate` that makes the same result.

    Caches go together by name alone, and the rest in order only where both sides have as many left.
    """
    left, right = _read_by_others(baseline), _read_by_others(candidate)
    found = {node: right[name] for name, node in left.items() if name in right}
    ours = [node for name, node in left.items() if name not in right and name not in baseline.caches.values()]
    theirs = [node for name, node in right.items() if name not in left and name not in candidate.caches.values()]
    both = (ours, baseline), (theirs, candidate)
    if len(ours) == len(theirs):
        found |= in_order(*({name: program.node(name).meta["val"] for name in names} for names, program in both))
    return found


def in_order(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Return which results of unrelated names belong together: name of the one side -> of the other.

    As many on both sides, and floats in the places of floats: by place. Else each goes to the first free one that is
    like it: of its shape, of its number of elements, or at least floating as it is. A single result of either side that
    is like none goes to the first.

    Args:
        ours: Name -> result, or the fake of one.
        theirs: Likewise.
    """
    if len(ours) == len(theirs):
        pairs = list(zip(ours, theirs, strict=True))
        if all(_is_float(ours[a]) == _is_float(theirs[b]) for a, b in pairs):
            return dict(pairs)
    found: dict[str, str] = {}
    is_one = min(len(ours), len(theirs)) == 1
    likes = (_shape, torch.Tensor.numel, _is_float) if is_one or len(ours) == len(theirs) else (_shape, torch.numel)
    for like in likes:
        for name, value in ours.items():
            if name in found or not isinstance(value, torch.Tensor):
                continue
            free = [(other, made) for other, made in theirs.items() if other not in found.values()]
            alike = (o for o, made in free if _is_float(made) == _is_float(value) and like(made) == like(value))
            other = next(alike, None)
            if other is not None:
                found[name] = other
    return found if found or not is_one else {next(iter(ours)): next(iter(theirs))}


def by_value(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Return which results of unrelated names belong together: those near each other, the others as `in_order` says.

    A port may return the states of all layers where the baseline returns the last. Of equal ones it is the last, which
    all layers have made.

    Args:
        ours: Name -> result, or the fake of one.
        theirs: Name -> result.
    """
    apart: dict[tuple[str, str], float] = {}
    for name, value in ours.items():
        for other, made in reversed(list(theirs.items())):
            both = type(value) is torch.Tensor and _is_float(value) and _is_float(made)
            if both and _shape(value) == _shape(made):
                error = float((made.double() - value.double()).norm())
                apart |= {(name, other): error} if error <= _NEAR * float(value.double().norm()) else {}
    found: dict[str, str] = {}
    for name, other in sorted(apart, key=apart.__getitem__):
        if name not in found and other not in found.values():
            found[name] = other
    left = {name: value for name, value in ours.items() if name not in found}
    others = {name: made for name, made in theirs.items() if name not in found.values()}
    return found | (in_order(left, others) if left and others else {})


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _shape(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape)


def _read_by_others(program: Program) -> dict[str, str]:
    """Return the results of a program without what it remembers for its next step."""
    return {name: node for name, node in program.output_nodes.items() if not name.startswith(STATE)}


def ports(program: Program) -> dict[str, str]:
    """Return placeholder -> name of the input."""
    return {port.node: port.name for port in program.inputs}
