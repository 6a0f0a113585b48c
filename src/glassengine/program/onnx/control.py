"""Graphs within a graph: branches, loops and functions of the model, each interpreted when it is called, and traced.

`precision` says in which floating type a call computes: float64 for the reference, in spite of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from glassengine.errors import BackendError
from glassengine.program.onnx.function import Composite, Each

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_STEPS = 2000
MOST_ELEMENTS = 1 << 24
"""What is kept of a run: a loop may go on for ever, and all of it is in float64."""

LABEL = "onnx"
"""Key of a node's metadata: operator and name of the node of the file."""
NAME = "onnx name"
"""Key of the metadata of what a body reads, a weight or a value from around it: its name in the file."""


@dataclass(eq=False)
class Body:
    """A translated graph that is a part of a node.

    Attributes:
        graph: Its placeholders are inputs, then captured values, then weights.
        captured: Names of the values that it reads from the graphs around it.
        weights: In the order of their placeholders.
        has_run: Whether some input led into it.
    """

    graph: Graph
    captured: tuple[str, ...]
    weights: tuple[Tensor, ...]
    has_run: bool = False

    def run(self, values: Sequence[Any], precision: torch.dtype, each: Each | None = None) -> tuple[Any, ...]:
        """Return the results for inputs and captured values; `each` is applied to every op."""
        self.has_run = True
        return self.trial(values, precision, each)

    def trial(self, values: Sequence[Any], precision: torch.dtype, each: Each | None = None) -> tuple[Any, ...]:
        """Do the same where no input led to it."""

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
            kwargs = pytree.tree_map(widened, kwargs) if is_wide else kwargs
            if each is None:
                env[node] = node.target(*args, **kwargs)
            elif isinstance(node.target, Composite):
                env[node] = node.target.rounded(each)(*args, **kwargs)
            else:
                env[node] = each(node, node.target(*args, **kwargs), args, kwargs)
        raise AssertionError("a graph without an output")


def _bound(body: Body, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
    known = dict(zip(names, values, strict=True))
    return [known[name] for name in body.captured]


def if_else(then: Body, other: Body) -> tuple[Composite, tuple[str, ...]]:
    """Return the function of an `If`, and the names of what it captures, which follow the condition."""
    names = tuple(dict.fromkeys((*then.captured, *other.captured)))

    def chosen(condition: Tensor, *values: Any, precision: torch.dtype, each: Each | None = None) -> Any:
        body, unused = (then, other) if bool(condition) else (other, then)
        results = body.run(_bound(body, names, values), precision, each)
        if isinstance(each, Tracer):
            # It may be made for other inputs altogether: other shapes, an empty tensor.
            with each.not_taken(), suppress(BackendError, RuntimeError, IndexError, ValueError, TypeError):
                unused.trial(_bound(unused, names, values), precision, each)
        return _unwrapped(results)

    return Composite(chosen, "If", bodies={"then_branch": then, "else_branch": other}), names


def loop(body: Body, num_carried: int) -> tuple[Composite, tuple[str, ...]]:
    """Return the function of a `Loop`, and the names of what it captures, which follow the values it carries."""

    def repeated(
        most: Tensor | None, condition: Tensor | None, *values: Any, precision: torch.dtype, each: Each | None = None
    ) -> Any:
        carried, outer = list(values[:num_carried]), list(values[num_carried:])
        goes_on = condition is None or bool(condition)
        limit = None if most is None else int(most)
        scanned: list[list[Tensor]] = []
        number = 0
        while goes_on and (limit is None or number < limit):
            start = [torch.tensor(number), torch.tensor(goes_on)]
            again, *found = body.run([*start, *carried, *outer], precision, each)
            carried, elements = found[:num_carried], found[num_carried:]
            scanned = scanned or [[] for _ in elements]
            for rows, row in zip(scanned, elements, strict=True):
                rows.append(row)
            goes_on, number = bool(again), number + 1
        num_scanned = len(body.graph.output_node().args[0]) - 1 - num_carried  # type: ignore[arg-type]
        rows = [torch.stack(found) for found in scanned] or [torch.empty(0)] * num_scanned
        return _unwrapped((*carried, *rows))

    return Composite(repeated, "Loop", bodies={"body": body}), body.captured


def scan(
    body: Body,
    num_scanned: int,
    *,
    input_axes: Sequence[int],
    input_reversed: Sequence[int],
    output_axes: Sequence[int],
    output_reversed: Sequence[int],
) -> tuple[Composite, tuple[str, ...]]:
    """Return the function of a `Scan`, and the names of what it captures, which follow states and sequences.

    Args:
        body: Takes the states and one element of each sequence; returns the states and one element of each result.
        num_scanned: How many sequences it reads.
        input_axes: Along which axis of each.
        input_reversed: 1 for those that are read from their end.
        output_axes: Along which axis of each result elements are put; empty for the first.
        output_reversed: 1 for those that are filled from their end.
    """

    def scanned(*values: Any, precision: torch.dtype, each: Each | None = None) -> Any:
        num_inputs = len(values) - len(body.captured)
        states, sequences = list(values[: num_inputs - num_scanned]), values[num_inputs - num_scanned : num_inputs]
        outer = values[num_inputs:]
        axes = [*input_axes] or [0] * num_scanned
        rows = [sequence.unbind(axis) for sequence, axis in zip(sequences, axes, strict=True)]
        rows = [
            row[::-1] if backwards else row
            for row, backwards in zip(rows, [*input_reversed] or [0] * num_scanned, strict=True)
        ]
        found: list[tuple[Any, ...]] = []
        for elements in zip(*rows, strict=True):
            results = body.run([*states, *elements, *outer], precision, each)
            states = list(results[: len(states)])
            found.append(results[len(states) :])
        stacked = []
        for i, parts in enumerate(zip(*found, strict=True)):
            ordered = parts[::-1] if output_reversed and output_reversed[i] else parts
            stacked.append(torch.stack(ordered, output_axes[i] if output_axes else 0))
        return _unwrapped((*states, *stacked))

    return Composite(scanned, "Scan", bodies={"body": body}), body.captured


def called_function(body: Body, name: str) -> Composite:
    """Return a call of a function of the model."""

    def called(*values: Any, precision: torch.dtype, each: Each | None = None) -> Any:
        return _unwrapped(body.run(values, precision, each))

    return Composite(called, name, bodies={"function": body})


def ops_inside(target: Any) -> int:
    """Return how many ops the graphs inside of an If, Loop or Scan have, of branches only what some input led into."""
    found = 0
    for _, body in _graphs(target):
        for node in body.graph.nodes if body.has_run else ():
            found += max(1, ops_inside(node.target)) if node.op == "call_function" else 0
    return found


def never_run(target: Any) -> list[str]:
    """Return which graphs inside of an If, Loop or Scan no input led into: "else_branch", "body/then_branch"."""
    found = []
    for name, body in _graphs(target):
        if not body.has_run:
            found.append(name)
            continue
        for node in body.graph.nodes:
            found += [f"{name}/{inner}" for inner in never_run(node.target)]
    return list(dict.fromkeys(found))


def _graphs(target: Any) -> list[tuple[str, Body]]:
    is_control = isinstance(target, Composite) and target.__name__ in ("If", "Loop", "Scan")
    return list(target.bodies.items()) if is_control else []


def _unwrapped(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results


@dataclass(frozen=True)
class Step:
    """One op that ran.

    Attributes:
        node: Of the graph of the body.
        made: Its results.
        read: The tensors that it was given, in the order of its arguments; these are the very ones that others made.
        is_taken: False in a branch that was run for the sake of comparison only.
    """

    node: Node
    made: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    is_taken: bool

    @property
    def label(self) -> str:
        """What the file calls it."""
        return str(self.node.meta.get(LABEL, self.node.name))


class Tracer:
    """An `Each` that keeps what the ops make. Branches that are not taken run as well.

    Attributes:
        steps: The ops in the order in which they ran, as far as the limits go.
        is_whole: Whether all of them are there.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.is_whole = True
        self._num_elements = 0
        self._is_taken = True

    def __call__(self, node: Node, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the value of an op."""
        made = tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
        self._num_elements += sum(tensor.numel() for tensor in made)
        if len(self.steps) >= MOST_STEPS or self._num_elements > MOST_ELEMENTS:
            self.is_whole = False
            return value
        read = tuple(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.steps.append(Step(node, made, read, self._is_taken))
        return value

    @contextmanager
    def not_taken(self) -> Iterator[None]:
        """While a branch runs whose results are not read."""
        before, self._is_taken = self._is_taken, False
        try:
            yield
        finally:
            self._is_taken = before
