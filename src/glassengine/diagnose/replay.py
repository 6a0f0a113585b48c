"""Reverse replay: what should this op have made of the candidate's own inputs?

The baseline's op, with the baseline's weights and literal arguments, is run on the values that the candidate fed to its
own op: in float64 (the prediction), in the candidate's dtype, and with Monte-Carlo rounding (the floor). What is
left is the error that this op introduced; what its inputs carried in is gone. Where both sides compute the op the
same way on the same kernels, as in two interpreted programs, the candidate's value is bitwise that of the second run.

Used where a side is itself a program of the same dtype. Fused engines keep unrounded values in registers, so their
tensors are judged by the accumulated floor instead (`reference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.compare.verdict import Judgement, Reference, unit_roundoff
from glassengine.diagnose.reference import NUM_NOISE_RUNS, retarget, target_of
from glassengine.diagnose.rounding import noisy, rounds
from glassengine.program.naming import is_tensor_node
from glassengine.program.program import Program


class Replay:
    """Replays single ops of the baseline program on a candidate's values.

    Args:
        program: The baseline program, with weights.
        seed: Of the noise.
    """

    def __init__(self, program: Program, *, seed: int = 0) -> None:
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._weights = program.weights()
        self._inputs = {port.name: port.node for port in program.inputs}
        self._generator = torch.Generator().manual_seed(seed)
        self._relative_floors: dict[str, float] = {}
        self._values: dict[str, Any] = {}

    def begin_step(self, inputs: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Take over a step of the candidate.

        Args:
            inputs: Its inputs by name, caches as they were before the step.
            values: Its tensors by baseline node.
        """
        self._values = {self._inputs[name]: tensor for name, tensor in inputs.items() if name in self._inputs}
        self._values |= values

    def judge(self, node: Node, candidate: torch.Tensor, valid: torch.Tensor | None) -> Judgement | None:
        """Judge the error that `node` introduced; None where an input of it has no counterpart in the candidate."""
        try:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._value)
        except _NoCounterpart:
            return None
        target = target_of(node)
        try:
            native = target(*args, **kwargs)
            exact_args, exact_kwargs = pytree.tree_map(retarget, (args, kwargs))
            exact = target(*exact_args, **exact_kwargs)
        except (RuntimeError, IndexError, ValueError):
            # The candidate's inputs do not fit the baseline's op: their own shapes are judged where they are made.
            return None
        if not isinstance(exact, torch.Tensor) or exact.shape != candidate.shape:
            return None
        dtype = native.dtype
        runs = [exact] * NUM_NOISE_RUNS
        if dtype.is_floating_point and rounds(node):
            u = unit_roundoff(dtype)
            runs = [noisy(node, exact, exact_args, exact_kwargs, u, self._generator) for _ in runs]
        floor = self._relative_floors.get(node.name, 0.0)
        reference = Reference(exact, native, runs, dtype=dtype, valid=valid, relative_floor=floor)
        self._relative_floors[node.name] = reference.relative_floor
        return reference.judge(candidate)

    def _value(self, node: Node) -> Any:
        if node.name in self._values:
            return self._values[node.name]
        if node.name in self._weights:
            return self._weights[node.name]
        if node.op != "call_function" or is_tensor_node(node):
            raise _NoCounterpart(node.name)
        # Sizes, and the lists that a split returns.
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._value)
        value = self._values[node.name] = node.target(*args, **kwargs)  # type: ignore[operator]
        return value


class _NoCounterpart(Exception):
    """An input of the op was not observed on the candidate's side."""
