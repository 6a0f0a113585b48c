"""Replays one side of a check over the steps of a case, without the reference: finds what holds whatever that says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.exclusions.padding import valid_mask
from glassengine.judge.replay.expected import Replayed
from glassengine.judge.replay.foretold import Finding, Findings, Mask, checksum, checksum_of, checksum_of_mask, machine
from glassengine.judge.replay.replay import Replay
from glassengine.judge.replay.values import called
from glassengine.judge.sides.protocol import Side
from glassengine.judge.verdict.run import inputs_of
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.operators.control import never_run
from glassengine.program.onnx.operators.fallback import thresholds_of
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED


def prescribed(case: Case) -> bool:
    """Whether a case says itself what each step is given."""
    return case.input_ids is None or (case.tokens is not None and case.tokens.shape[1] >= case.num_steps - 1)


class Foresight:
    """One side over the steps of one case.

    Args:
        program: The baseline's.
        case: What runs.
        side: With its replay.
        chooser: Chooses the tokens that the case does not prescribe; None where there are none.
    """

    def __init__(self, program: Program, case: Case, side: Side, chooser: Side | None) -> None:
        assert side.replay is not None
        self._program, self._case, self._side, self._chooser = program, case, side, chooser
        self._replay: Replay = side.replay
        self._nodes = [node for node in program.graph.nodes if node.op == "call_function" and not _is_looked_into(node)]
        self._next = case.num_steps
        self._inputs: Any = None

    @torch.no_grad()
    def findings(self, step: int, nodes: Collection[str] = ()) -> Findings:
        """Return what is found of a step, starting over where it is past.

        Args:
            step: Of the case.
            nodes: Which of them; all where there are none.
        """
        if step < self._next:
            self._side.begin(self._case)
            if self._chooser is not None:
                self._chooser.begin(self._case)
            self._next = 0
        while self._next <= step:
            self._inputs = inputs_of(self._case, self._next, self._inputs, self._chooser or self._side)
            self._side.step(self._inputs)
            if self._chooser is not None:
                self._chooser.step(self._inputs)
            self._next += 1
        found = [
            one
            for node in self._nodes
            if not nodes or node.name in nodes
            for one in (self._finding(node, value.tensor) for value in self._side.observed(node.name))
            if one is not None
        ]
        return Findings(checksum_of(self._inputs), machine(), tuple(found))

    def _finding(self, node: Node, tensor: torch.Tensor) -> Finding | None:
        """Return what is found of a tensor; None where that depends on more than the values of the side."""
        replay = self._replay
        if replay.has_memory:
            return _sent(node, tensor, None, replay.judge(node, tensor, None))
        valid, site = None, self._program.sites.by_node[node.name][0]
        if isinstance(self._inputs, StepInputs):
            if tensor.dim() != len(site.shape):
                return None
            valid = valid_mask(site, tensor, self._inputs)
        noise = replay.ops.generator
        before = noise.get_state()
        found = replay.judge(node, tensor, valid)
        floors, is_drawn = replay.ops.relative_floors, not torch.equal(noise.get_state(), before)
        if is_drawn or floors:
            floors.clear()
            return None
        return _sent(node, tensor, checksum_of_mask(valid, tensor), found)


def _sent(node: Node, tensor: torch.Tensor, valid: int | None, found: Replayed | None) -> Finding | None:
    if found is None:
        return Finding(node.name, checksum(tensor), valid, None)
    if found.judgement.verdict in FLAGGED or found.judgement.is_tie:
        return None
    exempt = None if found.exempt is None else {name: Mask.of(mask) for name, mask in found.exempt.items()}
    return Finding(node.name, checksum(tensor), valid, found.judgement, exempt, found.explanation)  # type: ignore[arg-type]


def _is_looked_into(node: Node) -> bool:
    """Whether an op has branches or trees that are compared even where its result is right, or makes what it likes."""
    target = called(node)[0].target
    return traits_of(node).is_arbitrary or thresholds_of(target) is not None or bool(never_run(target))
