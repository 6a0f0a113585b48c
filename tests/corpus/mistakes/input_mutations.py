"""Mistakes of ports with their inputs: an axis reversed, shifted or permuted, a mask or a position left out.

Inputs are good if each of these changes a result. What a port does to its input is what is done to the input here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LEAST = 1e-5
"""Share of the largest number of a result that a difference must have."""


def unseen(run: Callable[[dict[str, Any]], Any], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the mistakes that no step shows, each as "name: what is done".

    Args:
        run: Returns the results for the keyword arguments of a step.
        steps: Inputs.
    """
    missed: list[str] = []
    seen: set[str] = set()
    for step in steps:
        expected = run(dict(step))
        for mistake, changed in mutations(step):
            if mistake in seen:
                continue
            if _differ(expected, run(changed)):
                seen.add(mistake)
                missed = [one for one in missed if one != mistake]
            elif mistake not in missed:
                missed.append(mistake)
    return missed


def mutations(step: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (what is done, the step after it)."""
    for name, value in step.items():
        if not isinstance(value, torch.Tensor):
            continue
        for axis, size in enumerate(value.shape):
            if size > 1:
                yield f"{name}: axis {axis} reversed", {**step, name: value.flip(axis)}
                yield f"{name}: axis {axis} shifted", {**step, name: value.roll(1, axis)}
            if size > 2:
                order = [1, 0, *range(2, size)]
                yield f"{name}: axis {axis} permuted", {**step, name: value.index_select(axis, torch.tensor(order))}
        is_mask = not value.is_floating_point() and value.numel() > 1 and set(torch.unique(value).tolist()) <= {0, 1}
        if is_mask:
            yield f"{name}: left out", {**step, name: torch.ones_like(value)}
        elif not value.is_floating_point() and value.dim() and value.shape[-1] > 1 and bool((value.diff() >= 0).all()):
            plain = torch.arange(value.shape[-1]).to(value.dtype).expand(value.shape).clone()
            yield f"{name}: left out", {**step, name: plain}


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return any(_is_apart(a, b) for a, b in pairs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    wide, again = one.double().nan_to_num(0.0), other.double().nan_to_num(0.0)
    return bool((wide - again).abs().max() > _LEAST * wide.abs().max()) if wide.numel() else False
