"""Hints of one divergence: a mistake that was tried and fits, else what differs in programs and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from glassengine.compare.hints import tensor_hints, weight_hints
from glassengine.compare.verdict import Reference
from glassengine.diagnose.hypotheses.of_sides import asked_of
from glassengine.diagnose.written import program_of, written_differently
from glassengine.program.program import Program
from glassengine.results import Hint

_MOST_ASKED = 8
"""Divergences of one side that are explained, the earliest ones."""


class Guesses:
    """What is guessed of the divergences of one side.

    Args:
        program: The baseline's.
        side: Under judgement.
    """

    def __init__(self, program: Program, side: Any) -> None:
        self._program = program
        self._side = side
        self._num_asked = 0

    def of(self, node: Node, tensor: torch.Tensor, reference: Reference, flagged: Sequence[str]) -> list[Hint]:
        """Return what kind of mistake it is: one that makes what the side made, or else what only looks like it.

        Args:
            node: Of the baseline.
            tensor: What the side made.
            reference: Of the node.
            flagged: Nodes that were flagged before in this step.
        """
        asked = asked_of(self._program, self._side, flagged)
        if asked is not None and self._num_asked < _MOST_ASKED:
            self._num_asked += 1
            found = asked.hints(node, tensor, reference.valid)
            if found:
                return found
        return [*self.differences(node), *tensor_hints(reference.exact, tensor, reference.valid)]

    def differences(self, node: Node) -> list[Hint]:
        """Return hints from the two programs: other arguments, other weights."""
        other = program_of(self._side)
        if other is None or other is self._program:
            return []
        site, how = self._differences.get(node.name, ("", None))
        named = other.sites.get(site)
        hints = [Hint("argument", f"{named.op}: {how}", 1.0)] if how and named is not None else []
        names = self._program.weight_names()
        used = [names[source.name] for source in node.all_input_nodes if source.name in names]
        return hints + weight_hints(used, _weights(self._program), _weights(other))

    @cached_property
    def _differences(self) -> dict[str, tuple[str, str]]:
        return written_differently(self._program, self._side)


def _weights(program: Program) -> dict[str, torch.Tensor]:
    names = program.weight_names()
    return {names[node]: tensor for node, tensor in program.weights().items()}
