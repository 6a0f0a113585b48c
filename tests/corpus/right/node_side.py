"""A side that has a value for every node of a program, computed in some legitimate way: judged as an engine is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glassengine.judge.cases import Case, Given, by_name, empty_caches
from glassengine.judge.end_to_end import results_of
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Observed, Place, Side
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.program import Program


class NodeSide(Side):
    """Subclasses say how the nodes are computed.

    Args:
        program: With weights.
        nodes: Baseline node -> node of `program`; those that depend on weights alone are left out.
        replay: Of the baseline, for compiled sides.
    """

    def __init__(self, program: Program, nodes: Mapping[str, str], replay: Replay) -> None:
        super().__init__(place=Place.ENGINE)
        self.replay: Replay = replay
        constant = {node.name for node in weight_only_nodes(program)}
        self.nodes = {ours: theirs for ours, theirs in nodes.items() if theirs not in constant}
        self._program = program
        self._weights = program.weights()
        self._values: dict[str, Any] = {}
        self._caches: dict[str, Tensor] = {}

    @property
    def counterparts(self) -> Mapping[str, str]:
        """What is observed."""
        return self.nodes

    def begin(self, case: Case) -> None:
        """Start with an empty cache."""
        self._values, self._caches = {}, {}

    def step(self, inputs: Given) -> None:
        """Compute one step."""
        named = by_name(inputs)
        self._caches = self._caches or empty_caches(self._program, named)
        fed = {**named, **self._caches}
        with torch.no_grad():
            self._values = self._run(fed)
        outputs = self._program.output_nodes
        self._caches = {past: self._values[outputs[present]] for past, present in self._program.caches.items()}
        values = {ours: self._values[theirs] for ours, theirs in self.nodes.items() if theirs in self._values}
        self.replay.begin_step(fed, values)

    @abstractmethod
    def _run(self, fed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the values of the program's nodes.

        Args:
            fed: Inputs by name, caches included.
        """

    def _placed(self, fed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the placeholders of the graph stand for: inputs and weights."""
        return {port.node: fed[port.name] for port in self._program.inputs} | self._weights

    def observed(self, node: str) -> list[Observed]:
        """Return the value that stands for the baseline's `node`."""
        own = self.nodes.get(node)
        return [Observed(self._values[own], own, "name")] if own in self._values else []

    def results(self) -> Mapping[str, Tensor]:
        """Return the results of the program."""
        named = ((name, self._program.output_nodes[name]) for name in results_of(self._program))
        return {name: self._values[node] for name, node in named if node in self._values}
