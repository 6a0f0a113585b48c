"""Values that are made of weights alone: compilers fold them, and their rounding is not visible.

An op that reads such a value is replayed on what the program makes of the weights; the candidate's own was made by
another kernel and differs from it by rounding, which a copy, say, hands on and does not make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.replay.reference import NUM_NOISE_RUNS
from glassengine.judge.replay.values import Values, in_float64
from glassengine.numerics.float64 import target_of
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.ops import Operation
from glassengine.program.representation.program import Program

_SPREAD = 2.0
"""Rounding of another kernel, as a multiple of that of the program's own: the order of a sum, an approximation."""


class Folded:
    """What a program makes of its weights alone, and what another kernel may make of them.

    Args:
        program: With weights.
        values: Of the candidate: what it has as an input, or what the program makes in its own dtype.
        generator: Of the noise.
    """

    def __init__(self, program: Program, values: Values, generator: torch.Generator) -> None:
        self._in_float64: dict[str, Any] = dict(program.weights())
        self._values = values
        self._generator = generator

    def read(self, op: Node, call: Callable[..., Any]) -> tuple[Operation, list[torch.Tensor]] | None:
        """Return an op on such inputs in float64, and its results on others as legal; None where it has none.

        Args:
            op: The op.
            call: What computes its result.
        """
        own = {source.name: self._values.of(source) for source in op.all_input_nodes}
        exact = self._rounded(op, own)
        if not exact:
            return None

        def on(inputs: Mapping[str, torch.Tensor]) -> Operation:
            return in_float64(op, call, lambda source: inputs.get(source.name, own[source.name]))

        return on(exact), [on(other).exact for other in _made_otherwise(exact, own, self._generator)]

    def _rounded(self, op: Node, native: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return those inputs of `op` that were rounded while they were made, in float64."""
        made = [source for source in op.all_input_nodes if source.op == "call_function"]
        found = {}
        for source in made:
            value = native[source.name]
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            if source.name in self._values.constant and is_float:
                exact = self._exact(source)
                if not torch.equal(exact, value.double()):
                    found[source.name] = exact
        return found

    def _exact(self, node: Node) -> Any:
        """Return a value in float64; a weight as it is."""
        if node.name not in self._in_float64:
            self._in_float64[node.name] = in_float64(node, target_of(node), self._exact).exact
        return self._in_float64[node.name]


def _made_otherwise(
    exact: Mapping[str, torch.Tensor], native: Mapping[str, Any], generator: torch.Generator
) -> list[dict[str, torch.Tensor]]:
    spreads = {}
    for name, value in exact.items():
        own = float((native[name].double() - value).square().mean().sqrt())
        least = unit_roundoff(native[name].dtype) * float(value.square().mean().sqrt())
        spreads[name] = _SPREAD * max(own, least)
    return [
        {name: value + spreads[name] * torch.randn(value.shape, generator=generator) for name, value in exact.items()}
        for _ in range(NUM_NOISE_RUNS)
    ]
