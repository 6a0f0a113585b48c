"""A replay: what did the ops of the baseline between a candidate's tensors make of the candidate's own values?

A candidate runs a step, and hands over what it was given and made. Then each of its tensors is judged by what the piece
of the baseline that ends there should give (`Expected`), and what exceeds that by the `EXPLANATIONS`. Replays differ
only in where their pieces begin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.cases import Given, by_name, empty_caches
from glassengine.judge.exclusions.masked import valid_in_step
from glassengine.judge.exclusions.perturbation import unread_nodes
from glassengine.judge.pieces import Piece
from glassengine.judge.replay.expected import Claim, ReplayedTensor, SegmentReplay
from glassengine.judge.replay.explanations import proven, replayed
from glassengine.judge.replay.op import Ops
from glassengine.judge.replay.values import Values
from glassengine.numerics.activations import Read
from glassengine.numerics.float64 import FLOAT32_SUMS, Accumulation
from glassengine.numerics.kinds import NOTHING, KnownValues, in_kind
from glassengine.numerics.noise import WideOperands
from glassengine.program.representation.program import Program


class Cut(Enum):
    """Where pieces begin.

    OP: at the inputs of each op; an op that reads a tensor that was not observed is not replayed.
    REGION: at the inputs of each op, and where one of these was not observed, at the observed tensors above it.
    SEGMENT: at the observed tensors above, for sides that have few of them.
    """

    OP = "op"
    REGION = "region"
    SEGMENT = "segment"


class Replay:
    """Replays pieces of the baseline program on a candidate's values.

    Args:
        program: The baseline program, with weights.
        cut: Where pieces begin.
        compiled: Whether the candidate has kernels of its own, or another dtype than the baseline.
        dtype: Floating dtype of the candidate's weights; None for the baseline's own.
        wide_operands: Which of the candidate's products may read unrounded registers, as its other ops may.
        accumulation: How the candidate's products are summed.
        seed: Of the noise.
        worth_a_bound: See `Ops`.
        operands: Node of a product -> what the candidate's kernel reads of activations, where it rounds them.
        derive_views: Whether a view of what was observed counts as observed: of a record that has no views.
        rounded: Node -> dtype that the candidate's kernel rounds to, what it reads as well, though its result has more.
        of_regions: How products inside of regions are summed, where that is coarser: what they read was not observed.

    Attributes:
        ops: Pieces of one op.
    """

    def __init__(
        self,
        program: Program,
        *,
        cut: Cut = Cut.OP,
        compiled: bool = False,
        dtype: torch.dtype | None = None,
        wide_operands: WideOperands = "thin products",
        accumulation: Accumulation = FLOAT32_SUMS,
        seed: int = 0,
        worth_a_bound: float = 1.6,
        operands: Mapping[str, Callable[[torch.Tensor], Read]] | None = None,
        derive_views: bool = False,
        rounded: Mapping[str, torch.dtype] | None = None,
        of_regions: Accumulation | None = None,
    ) -> None:
        self.program = program
        tensors = ((node.name, node.meta.get("val")) for node in program.graph.nodes)
        self._dtypes = {name: value.dtype for name, value in tensors if isinstance(value, torch.Tensor)}
        self._rounded = rounded or {}
        self._of_regions = of_regions
        self._cut = cut
        self._values = Values(
            program,
            compiled=compiled,
            dtype=dtype,
            wide_operands=wide_operands,
            accumulation=accumulation,
            operands=operands,
            derive_views=derive_views,
            rounded=rounded,
        )
        self.ops = Ops(program, self._values, seed=seed, worth_a_bound=worth_a_bound)
        self._segments = None if cut is Cut.OP else SegmentReplay(program, coarsest=dtype, rounded=rounded)
        self.begin()

    @property
    def method(self) -> str:
        """What judges, in words."""
        return "segment" if self._cut is Cut.SEGMENT else "reverse replay"

    @property
    def accumulation(self) -> Accumulation:
        """How the candidate's products are summed."""
        return self._values.accumulation

    def accumulate(self, how: Accumulation) -> None:
        """Take products to be summed so from the next case on; kernels stay those of the side's runtime."""
        self._values.accumulate(how)

    @property
    def values(self) -> Mapping[str, Any]:
        """What the candidate was given and made in this step, by baseline node; of segments up to the present one."""
        if self._segments is not None and self._cut is Cut.SEGMENT:
            return self._segments.values
        return self._values.observed

    def begin(self) -> None:
        """Start a case, with an empty cache; nothing of earlier cases has a part in it."""
        self.ops.begin()
        if self._segments is not None:
            self._segments.begin(self._of_regions or self.accumulation)

    def begin_step(
        self, given: Given, made: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Take over a step of the candidate.

        Args:
            given: Its inputs.
            made: Its tensors, by baseline node.
            caches: Its own, as they were before the step, by the name of the input; None where they are not known.
        """
        named = by_name(given)
        made = {
            name: in_kind(value, self._dtypes.get(name, value.dtype)) if isinstance(value, torch.Tensor) else value
            for name, value in made.items()
        }
        if self._cut is not Cut.SEGMENT:
            self._values.begin_step({**named, **(caches or {})}, made)
        if self._segments is not None:
            valid = partial(valid_in_step, self.program, given)
            # Caches are the baseline's, for any candidate: empty before the first step, and kept by the run from there.
            empty = {} if self._segments.has_run else empty_caches(self.program, named)
            asked = (lambda _: True) if self._cut is Cut.SEGMENT else self._values.lacks_inputs
            self._segments.begin_step({**named, **empty}, made.get, valid, asked)

    @torch.no_grad()
    def judge(
        self,
        node: Node,
        candidate: torch.Tensor,
        valid: torch.Tensor | None,
        known: KnownValues = NOTHING,
        piece_of: Callable[[Node], Piece | None] | None = None,
        native: torch.Tensor | None = None,
    ) -> ReplayedTensor | None:
        """Judge what the piece that ends in `node` introduced; None where its inputs are not known. See `Claim`.

        `native` is what the baseline's own run has there, where the candidate's tensor was found identical.
        """
        if self._segments is not None and (self._cut is Cut.SEGMENT or self._values.lacks_inputs(node)):
            found = self._segments.expected(node, candidate)
            return None if found is None else found[0].replayed(found[1])
        claim = Claim(node, candidate.to(self._rounded.get(node.name, candidate.dtype)), valid, known, piece_of)
        if (
            native is not None
            and self._values.take_same(node, claim.candidate, native)
            and self._values.reads_same(node)
        ):
            return proven(claim, self.ops)
        call = self.ops.called(claim)
        return None if call is None else replayed(call)

    @torch.no_grad()
    def allowed(self, node: Node, candidate: torch.Tensor) -> torch.Tensor | None:
        """Return the bound that the candidate's result of `node` is judged by; None where noise alone judges it."""
        call = self.ops.called(Claim(node, candidate))
        one = None if call is None else call.in_float64()
        return None if one is None else one.allowed()

    def inside(self, judged: Collection[str]) -> dict[str, set[str]]:
        """Return the nodes within pieces that were judged at their ends: node -> ends, of these `judged` nodes."""
        return {} if self._cut is Cut.OP else covered(self.program, judged)


def covered(program: Program, judged: Collection[str]) -> dict[str, set[str]]:
    """Return the nodes inside of regions: node -> judged nodes at which the region ends.

    A node is inside when everything that it flows into, on a way to a result, is judged or inside of a region itself. A
    cache is a result, too, but the attention of the same step has read it: where that is judged, so is the cache.
    """
    ends: dict[str, set[str] | None] = {}
    caches = {program.output_nodes[name] for name in program.caches.values()}
    unread = unread_nodes(program)
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or node.name in judged or not node.users:
            continue
        found: set[str] | None = set()
        for user in node.users:
            if user.name in judged:
                found = None if found is None else found | {user.name}
            elif user.op == "output" and node.name in caches and len(node.users) > 1:
                continue
            elif "_assert" not in str(user.target) and user.name not in unread:
                own = ends.get(user.name)
                found = None if found is None or own is None else found | own
        ends[node.name] = found
    return {name: found for name, found in ends.items() if found}
