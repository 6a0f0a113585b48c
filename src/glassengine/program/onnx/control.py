"""Graphs within a graph: branches, loops and functions of the model, each interpreted when it is called.

`precision` says in which floating type a call computes: float64 for the reference, whatever the file says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils import _pytree as pytree

from glassengine.program.onnx.function import OnnxFunction

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Body:
    """A translated graph that is a part of a node.

    Attributes:
        graph: Its placeholders are inputs, then captured values, then weights.
        captured: Names of the values that it reads from the graphs around it.
        weights: In the order of their placeholders.
    """

    graph: Graph
    captured: tuple[str, ...]
    weights: tuple[Tensor, ...]

    def run(self, values: Sequence[Any], precision: torch.dtype) -> tuple[Any, ...]:
        """Return the results for inputs and captured values."""

        def widened(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.double() if value.is_floating_point() else value
            return torch.float64 if isinstance(value, torch.dtype) and value in _FLOATS else value

        is_wide = precision is torch.float64
        given = iter([*values, *(map(widened, self.weights) if is_wide else self.weights)])
        env: dict[Any, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            if node.op == "output":
                results: tuple[Any, ...] = args[0]
                return results
            env[node] = node.target(*args, **(pytree.tree_map(widened, kwargs) if is_wide else kwargs))
        raise AssertionError("a graph without an output")


def _bound(body: Body, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
    known = dict(zip(names, values, strict=True))
    return [known[name] for name in body.captured]


def if_else(then: Body, other: Body) -> tuple[OnnxFunction, tuple[str, ...]]:
    """Return the function of an `If`, and the names of what it captures, which follow the condition."""
    names = tuple(dict.fromkeys((*then.captured, *other.captured)))

    def chosen(condition: Tensor, *values: Any, precision: torch.dtype) -> Any:
        body = then if bool(condition) else other
        return _unwrapped(body.run(_bound(body, names, values), precision))

    return OnnxFunction(chosen, "If"), names


def loop(body: Body, num_carried: int) -> tuple[OnnxFunction, tuple[str, ...]]:
    """Return the function of a `Loop`, and the names of what it captures, which follow the values it carries."""

    def repeated(most: Tensor | None, condition: Tensor | None, *values: Any, precision: torch.dtype) -> Any:
        carried, outer = list(values[:num_carried]), list(values[num_carried:])
        goes_on = condition is None or bool(condition)
        limit = None if most is None else int(most)
        scanned: list[list[Tensor]] = []
        number = 0
        while goes_on and (limit is None or number < limit):
            start = [torch.tensor(number), torch.tensor(goes_on)]
            again, *found = body.run([*start, *carried, *outer], precision)
            carried, each = found[:num_carried], found[num_carried:]
            scanned = scanned or [[] for _ in each]
            for rows, row in zip(scanned, each, strict=True):
                rows.append(row)
            goes_on, number = bool(again), number + 1
        num_scanned = len(body.graph.output_node().args[0]) - 1 - num_carried  # type: ignore[arg-type]
        rows = [torch.stack(found) for found in scanned] or [torch.empty(0)] * num_scanned
        return _unwrapped((*carried, *rows))

    return OnnxFunction(repeated, "Loop"), body.captured


def called_function(body: Body, name: str) -> OnnxFunction:
    """Return a call of a function of the model."""

    def called(*values: Any, precision: torch.dtype) -> Any:
        return _unwrapped(body.run(values, precision))

    return OnnxFunction(called, name)


def _unwrapped(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results
