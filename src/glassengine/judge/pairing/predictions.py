"""What the ops of a baseline should make on the steps of a probe: in float64, of the candidate's own tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.by_result import ports
from glassengine.judge.pairing.candidate_tensors import Values, ancestors_of
from glassengine.judge.pairing.probe import ProbeStep
from glassengine.numerics.float64 import retarget, target_of
from glassengine.program.representation.program import Program


class Unknown(Exception):
    """The value of a node is unknown: an input of it is, or the op does not take it."""


class Trial(dict[str, Values]):
    """Values that take the place of known ones, for a while, and what was computed with them.

    Attributes:
        replaced: Nodes that were given a value, as the bits of their places.
    """

    replaced: int = 0


class Predictions:
    """Values of a baseline's nodes.

    Args:
        program: The baseline, with weights.
        steps: What the candidate was given.

    Attributes:
        values: Node -> its value in each step: the counterpart's where it has one, else what was predicted.
        counterparts: Nodes whose values are the candidate's own.
    """

    def __init__(self, program: Program, steps: Sequence[ProbeStep]) -> None:
        self._program, self._steps = program, steps
        self._weights = program.weights()
        self._ports = ports(program)
        self._ancestors = ancestors_of(program)
        self._place = {node.name: 1 << place for place, node in enumerate(program.graph.nodes)}
        self.values: dict[str, Values] = {}
        self.counterparts: Collection[str] = ()

    def trial(self, values: Mapping[str, Values]) -> Trial:
        """Return values that take the place of what is known of some nodes, and of what is below them."""
        found = Trial(values)
        for name in values:
            found.replaced |= self._place[name]
        return found

    def predict(self, node: Node, env: dict[str, Values]) -> Values:
        """Return the value of a node in each step, in float64.

        Args:
            node: Of the baseline.
            env: Values that take the place of known ones; what is computed on the way is added.

        Raises:
            Unknown: It cannot be predicted.
        """
        if node.op in ("placeholder", "get_attr"):
            return [self._given(node, step) for step in self._steps]
        results = []
        for index in range(len(self._steps)):

            def value(source: Node, index: int = index) -> Any:
                return self.value(source, env)[index]

            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value)
            args, kwargs = pytree.tree_map(retarget, (args, kwargs))
            try:
                results.append(target_of(node)(*args, **kwargs))
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
                raise Unknown from error
        return results

    def value(self, node: Node, env: dict[str, Values]) -> Values:
        """Return a value that is known, or predict it."""
        if node.name in env:
            return env[node.name]
        if node.name in self.values and not self._is_stale(node, env):
            return self.values[node.name]
        env[node.name] = self.predict(node, env)
        return env[node.name]

    def _is_stale(self, node: Node, env: dict[str, Values]) -> bool:
        """Whether what is known of a node was predicted from a value that another one took the place of."""
        replaced = env.replaced if isinstance(env, Trial) else 0
        return bool(self._ancestors[node.name] & replaced) and node.name not in self.counterparts

    def _given(self, node: Node, step: ProbeStep) -> Any:
        if node.op == "get_attr":
            return getattr(self._program.exported.graph_module, str(node.target))
        if node.name in self._weights:
            return self._weights[node.name]
        return step.inputs.get(self._ports.get(node.name, ""))
