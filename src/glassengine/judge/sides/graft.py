"""Puts what the baseline's op makes of the candidate's own values in place of a candidate's wrong tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from glassengine.capture.observers import run_program
from glassengine.errors import UnknownNameError, UsageError
from glassengine.judge.graphs.by_name import SitePair
from glassengine.judge.sides.protocol import Arranged
from glassengine.program.representation.naming import of_any_layout
from glassengine.program.representation.program import Program


class Grafts:
    """Grafted tensors of a candidate's program.

    Args:
        baseline: The baseline's program.
        pairs: Baseline node -> its counterpart in the candidate.
        arranged: Arranges the candidate's tensors as the baseline has them.
        sites: Sites of the baseline or of the candidate.

    Raises:
        UnknownNameError: A site is of no op that both have.
        UsageError: The candidate has the tensor in other dimensions.
    """

    def __init__(
        self, baseline: Program, pairs: Mapping[str, SitePair], arranged: Arranged, sites: Collection[str]
    ) -> None:
        self._baseline, self._pairs, self._arranged = baseline, pairs, arranged
        ours = {site.name: node for node in pairs for site in baseline.sites.by_node.get(node, ())}
        theirs = {pair.candidate.name: node for node, pair in pairs.items()}
        self._grafted: dict[str, str] = {}
        for site in sites:
            node = ours.get(site, theirs.get(site))
            if node is None:
                raise UnknownNameError("op of both sides", site, [*ours, *theirs], hint="--graft SITE=baseline")
            if arranged.is_arranged(node):
                raise UsageError(
                    "a tensor in other dimensions cannot be grafted", got=site, hint="graft an op below it"
                )
            self._grafted[pairs[node].candidate.node] = node
        self._own = {node.name: node for node in baseline.graph.nodes}

    def run(
        self, program: Program, inputs: Mapping[str, torch.Tensor], keep: Callable[[Node, Any], None]
    ) -> dict[str, torch.Tensor]:
        """Interpret a step of the candidate, with the grafts; arguments are those of `run_program`."""
        wanted = {pair.candidate.node: node for node, pair in self._pairs.items()}
        weights = self._baseline.weights()
        known: dict[str, Any] = {port.node: inputs[port.name] for port in self._baseline.inputs if port.name in inputs}

        def graft(node: Node, value: Any) -> Any:
            ours = self._grafted.get(node.name)
            if ours is not None:
                made = self._computed(self._own[ours], {**weights, **known})
                if isinstance(made, torch.Tensor) and isinstance(value, torch.Tensor) and made.shape == value.shape:
                    value = made.to(value.dtype)
            if node.name in wanted and isinstance(value, torch.Tensor):
                known[wanted[node.name]] = self._arranged(wanted[node.name], value)
            return value

        self._arranged.begin_step(inputs)
        return run_program(program, inputs, keep, graft)

    def _computed(self, node: Node, known: Mapping[str, Any]) -> Any:
        """Return what an op of the baseline makes of values that are known, through ops between; None where unknown."""
        values: dict[str, Any] = dict(known)
        # An op that is grafted again in a later step is computed, whatever the candidate had.
        values.pop(node.name, None)
        waiting = [node]
        while waiting:
            one = waiting[-1]
            missing = [item for item in one.all_input_nodes if item.name not in values]
            if missing:
                if any(item.op != "call_function" for item in missing):
                    return None
                waiting += missing
                continue
            args, kwargs = map_arg((one.args, one.kwargs), lambda item: values[item.name])
            with torch.no_grad():
                values[one.name] = of_any_layout(one.target)(*args, **kwargs)
            waiting.pop()
        return values[node.name]
