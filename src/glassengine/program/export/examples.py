"""Inputs that a model is exported with: by name, in place, and which of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.sites import port_leaves


def fixed_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Non-tensor arguments: their values become part of the graph."""
    tensors = {port.removeprefix(":in.").split("[")[0].split(".")[0] for port, _ in port_leaves(":in", dict(inputs))}
    return {k: v for k, v in inputs.items() if k not in tensors and isinstance(v, (bool, int, float, str, type(None)))}


def place(model: nn.Module) -> bool:
    """Move a model without values off the meta device; return whether it has values.

    Kernels on meta tensors choose other layouts; untouched CPU memory costs nothing and gives the same graph.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return True
    model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]
    return False


def named_inputs(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of nested keyword arguments by input name: "x", "pair[0]", "options.scale"."""
    return {port.removeprefix(":in").lstrip("."): leaf for port, leaf in port_leaves(":in", dict(inputs))}


def example_of(steps: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Any]:
    """Return the step to trace with, and the dimensions that differ between steps."""
    flat = [pytree.tree_flatten(dict(step)) for step in steps]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise UsageError("the steps of --inputs have different keys or nesting", expected="the same in every step")
    leaves = [list(step) for step, _ in flat]
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(dict(steps[0]))[0]]
    differing = [_differing(name, column) for name, column in zip(names, zip(*leaves, strict=True), strict=True)]
    # A size of 1 would be taken for a constant, so a dynamic dimension is traced with another one.
    usable = [
        step
        for step in leaves
        if all(leaf.shape[i] > 1 for leaf, dims in zip(step, differing, strict=True) for i in dims or ())
    ]
    if not usable:
        raise UsageError(
            "no step of --inputs can be traced with",
            got="in each of them a dimension that differs between steps has size 0 or 1",
            expected="one step in which all of them are at least 2",
        )
    dynamic = [None if dims is None else dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in differing]
    return pytree.tree_unflatten(usable[0], spec), pytree.tree_unflatten(dynamic, spec)


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its elements in order, as export is given it."""
    return tensor.contiguous() if tensor.layout is torch.strided else tensor


def _differing(name: str, leaves: Sequence[Any]) -> list[int] | None:
    """Return the dimensions of one input that differ between steps; None for what is not a tensor."""
    first = leaves[0]
    if not isinstance(first, torch.Tensor):
        if any(isinstance(leaf, torch.Tensor) or leaf != first for leaf in leaves):
            raise UsageError(
                f"input {name} differs between steps and is not a tensor",
                got=", ".join(sorted({repr(leaf)[:40] for leaf in leaves})),
                expected="one value, which the program keeps as a constant",
            )
        return None
    kinds = {f"{leaf.dtype}, {leaf.dim()} dimensions" if isinstance(leaf, torch.Tensor) else "other" for leaf in leaves}
    if len(kinds) > 1:
        raise UsageError(f"input {name} is of different kinds in the steps of --inputs", got="; ".join(sorted(kinds)))
    return [i for i, sizes in enumerate(zip(*(leaf.shape for leaf in leaves), strict=True)) if len(set(sizes)) > 1]
