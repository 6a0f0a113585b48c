"""Masks that are added to scores: what hides a slot is any number that no score makes up for.

One implementation writes the smallest number of the dtype there, which the verdict compares as a class; another one
writes -1e9. What a softmax makes of both is the same. In the tensors of a candidate the second is read as the first:
in the mask, and in what it was added to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from glassengine.compare.operation import CASTS
from glassengine.diagnose.validity import HIDDEN, is_mask
from glassengine.program.naming import op_name


def hides_by_numbers(graph: Graph) -> bool:
    """Whether a program writes -1e9 or the like itself: then its candidates are compared with that number."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))):
            if isinstance(leaf, float) and -HIDDEN <= abs(leaf) < _largest(torch.float32):
                return True
    return False


def with_largest(graph: Graph, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `values` by node of `graph`, with the smallest number of their dtype where a mask hides a slot."""
    hidden: dict[str, torch.Tensor] = {}
    found = dict(values)
    for node in graph.nodes:
        value = values.get(node.name)
        if value is None or not value.is_floating_point():
            continue
        where = value <= HIDDEN if is_mask(value) and _is_number(value) else _added(node, value, hidden)
        if where is not None:
            hidden[node.name] = where
            found[node.name] = value.masked_fill(where, torch.finfo(value.dtype).min)
    return found


def _added(node: Node, value: torch.Tensor, hidden: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return where a mask was added to `value`, None where none was."""
    if op_name(node) not in {"add", "clone", *CASTS}:
        return None
    places = [hidden[source.name] for source in node.all_input_nodes if source.name in hidden]
    if len(places) != 1:
        return None
    where = places[0]
    sizes = zip(reversed(where.shape), reversed(value.shape), strict=False)
    fits = where.dim() <= value.dim() and all(own in (1, size) for own, size in sizes)
    return where.expand(value.shape) if fits else None


def _is_number(mask: torch.Tensor) -> bool:
    """Whether a mask hides by numbers that are compared by their size."""
    return bool(mask.amin() > -_largest(mask.dtype))


def _largest(dtype: torch.dtype) -> float:
    """From here on the verdict compares values as a class."""
    return torch.finfo(dtype).max / 4
