"""What the ops inside of a function make, one by one: of a branch, a loop or a recurrence that is interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

MOST_STEPS = 2000
MOST_ELEMENTS = 1 << 24
"""What is kept of a run: a loop may go on for ever, and all of it is in float64."""

LABEL = "onnx"
"""Key of a node's metadata: operator and name of the node of the file."""
NAME = "onnx name"
"""Key of the metadata of what a body reads, a weight or a value from around it: its name in the file."""


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
