"""Finds steps in which every side has, bit for bit, what the baseline's program makes in its own dtype.

No error is there to be measured in such a step: no float64, no noise and no replay are computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.capture.observers import run_program
from glassengine.judge.end_to_end import results_of
from glassengine.judge.exclusions.masked import completed
from glassengine.judge.verdict.score import Score
from glassengine.numerics.verdict import SameBits
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.control import never_run
from glassengine.program.onnx.function import thresholds_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program

Natives = Mapping[str, Tensor]
"""Tensors that the program makes in its own dtype, by node: those that were observed, and the results."""


def equal_bits_suffice(program: Program, scores: Sequence[Score]) -> bool:
    """Whether equal bits leave nothing open: no chance, no branch that no input took, no drift to be measured."""
    return all(score.drift is None for score in scores) and all(
        node.op != "call_function"
        or not (traits_of(node).is_arbitrary or never_run(node.target) or thresholds_of(node.target))
        for node in program.graph.nodes
    )


def same_bits(program: Program, scores: Sequence[Score], inputs: Mapping[str, Tensor], num_seen: int) -> Natives | None:
    """Return what the program makes, which is what every side made; None where a bit differs, or it cannot run.

    Args:
        program: The baseline's.
        scores: Of the sides, which have run the step.
        inputs: Of the step by name, with caches.
        num_seen: Slots of the cache in use.
    """
    natives: dict[str, Tensor] = {}
    try:
        made = run_program(program, inputs, partial(_compare, program, scores, num_seen, natives))
    except (_Differs, RuntimeError):  # the reference says why it cannot run
        return None
    for name in results_of(program):
        theirs = [score.side.results() for score in scores]
        if not all(name in results and _is_same(results[name], made[name]) for results in theirs):
            return None
        natives[program.output_nodes[name]] = made[name]
    return natives


def references(
    program: Program, natives: Natives, valid: Callable[[Node, Tensor], Tensor | None]
) -> Iterator[tuple[Node, SameBits]]:
    """Yield (node, reference) of every tensor that the graph computes, in graph order, as `ReferenceRun.walk` does."""
    for node in program.graph.nodes:
        if node.op == "call_function" and "_assert" not in str(node.target) and is_tensor_node(node):
            native = natives.get(node.name)
            yield node, SameBits(torch.empty(0), None) if native is None else SameBits(native, valid(node, native))


def _compare(
    program: Program, scores: Sequence[Score], num_seen: int, natives: dict[str, Tensor], node: Node, value: Any
) -> None:
    for score in scores:
        for seen in score.side.observed(node.name):
            axis = program.sites.by_node[node.name][0].axes.get("cache")
            tensor = completed(seen.tensor, value, axis, num_seen) if isinstance(value, Tensor) else None
            if tensor is None or not _is_same(tensor, value):
                raise _Differs
            natives[node.name] = tensor  # the side's own, which is kept anyway


class _Differs(Exception):
    """A side has other bits than the program."""


def _is_same(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.dtype is ours.dtype and theirs.shape == ours.shape and torch.equal(theirs, ours)
