"""Tensors of a candidate in the dimensions of the baseline, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.graphs.by_name import SitePair
from glassengine.numerics.arrangements import Arrangement
from glassengine.program.representation.program import Program


class Arranged:
    """Arranges what a candidate made as the baseline has it.

    Args:
        baseline: Its program, whose shapes say how long rows are in a step; None where all is as the baseline has it.
        pairs: Baseline node -> pair.
    """

    def __init__(self, baseline: Program | None = None, pairs: Mapping[str, SitePair] | None = None) -> None:
        self._sizes: dict[Any, int] = {}
        self._hows: dict[str, Arrangement] = {}
        self._nodes: dict[str, Node] = {}
        self._given: list[tuple[str, Node]] = []
        if baseline is None or pairs is None:
            return
        self._hows = {node: pair.arrangement for node, pair in pairs.items() if pair.arrangement is not None}
        self._nodes = {node.name: node for node in baseline.graph.nodes if node.name in self._hows}
        self._given = [(port.name, baseline.node(port.node)) for port in baseline.inputs] if self._hows else []

    def begin_step(self, inputs: Mapping[str, Any]) -> None:
        """Take over the sizes of a step from its inputs, by name."""
        self._sizes = {}
        for name, node in self._given:
            value, fake = inputs.get(name), node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not isinstance(fake, torch.Tensor) or value.dim() != fake.dim():
                continue
            for size, known in zip(fake.shape, value.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    self._sizes[size.node.expr] = known

    def __call__(self, node: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the candidate's tensor for a node of the baseline, arranged."""
        how = self._hows.get(node)
        return tensor if how is None else how.apply(tensor, self._shape(self._nodes[node]))

    def is_arranged(self, node: str) -> bool:
        """Whether the candidate has the tensor of a node in other dimensions."""
        return node in self._hows

    def _shape(self, node: Node) -> list[int] | None:
        """Return the shape of a node in this step; None where the inputs do not say."""
        shape = []
        for size in node.meta["val"].shape:
            known = self._of(size.node.expr) if isinstance(size, torch.SymInt) else size
            if known is None:
                return None
            shape.append(known)
        return shape

    def _of(self, size: Any) -> int | None:
        if size not in self._sizes:
            found = size.subs({known: value for known, value in self._sizes.items() if known.is_Symbol})
            if not found.is_Integer:
                return None
            self._sizes[size] = int(found)
        return self._sizes[size]
