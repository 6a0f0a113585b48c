"""Regions: ops of the baseline that a candidate has no tensors of, judged where both sides have one again.

Two programs may write the same with other ops (a root and a division, one product for three). What lies between the
tensors that both have is judged as one replay, from the candidate's own inputs of the region: see `segments`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from glassengine.judge.replay.op import Replay
from glassengine.judge.replay.replayed import Replayed, Valid
from glassengine.judge.replay.segment import SegmentReplay
from glassengine.judge.replay.unread import unread_nodes
from glassengine.numerics.known import NOTHING, Known
from glassengine.numerics.ops import FLOAT32_SUMS, Accumulation
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program


class RegionReplay(Replay):
    """Replays single ops, and whole regions where an op's inputs have no counterparts.

    Args:
        program: The baseline program, with weights.
        compiled: As for `Replay`.
        dtype: As for `Replay`.
        wide_operands: As for `Replay`.
        accumulation: As for `Replay`.
    """

    has_regions = True

    def __init__(
        self,
        program: Program,
        *,
        compiled: bool = False,
        dtype: torch.dtype | None = None,
        wide_operands: bool = False,
        accumulation: Accumulation = FLOAT32_SUMS,
    ) -> None:
        super().__init__(
            program, compiled=compiled, dtype=dtype, wide_operands=wide_operands, accumulation=accumulation
        )
        self._segments = SegmentReplay(program, coarsest=dtype, accumulation=accumulation)

    def accumulate(self, how: Accumulation) -> None:
        """Take products to be summed so from the next case on, inside of regions too."""
        super().accumulate(how)
        self._segments.accumulate(how)

    def begin(self) -> None:
        """Start a case, with an empty cache."""
        self._segments.begin()

    def begin_region_step(self, inputs: Mapping[str, torch.Tensor], valid: Valid) -> None:
        """Take over a step of the candidate for regions, after `begin_step`.

        Args:
            inputs: By name; caches of the baseline as they were before the first step, for any candidate.
            valid: As for `SegmentReplay.begin_step`.
        """
        self._segments.begin_step(inputs, self._values.get, valid)

    @torch.no_grad()
    def judge(
        self, node: Node, candidate: torch.Tensor, valid: torch.Tensor | None, known: Known = NOTHING
    ) -> Replayed | None:
        """Judge what `node`, or the region that it ends, introduced."""
        if self._ends_region(node):
            return self._segments.judge(node, candidate, valid)
        return super().judge(node, candidate, valid, known)

    def _ends_region(self, node: Node) -> bool:
        """Whether a tensor that the op reads was not observed; lists and sizes are what they are made of."""
        for source in node.all_input_nodes:
            if source.op != "call_function" or source.name in self._constant or source.name in self._values:
                continue
            if is_tensor_node(source) or self._ends_region(source):
                return True
        return False


def covered(program: Program, judged: Collection[str]) -> dict[str, set[str]]:
    """Return the nodes inside of regions: node -> judged nodes at which the region ends.

    A node is inside when everything that it flows into, on a way to a result, is judged or inside of a region itself.
    """
    ends: dict[str, set[str] | None] = {}
    unread = unread_nodes(program)
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or node.name in judged or not node.users:
            continue
        found: set[str] | None = set()
        for user in node.users:
            if user.name in judged:
                found = None if found is None else found | {user.name}
            elif "_assert" not in str(user.target) and user.name not in unread:
                own = ends.get(user.name)
                found = None if found is None or own is None else found | own
        ends[node.name] = found
    return {name: found for name, found in ends.items() if found}
