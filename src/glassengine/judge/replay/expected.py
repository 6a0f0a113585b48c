"""Computes the expected result of a baseline piece on a candidate's own tensors, and judges the candidate's result.

A piece is the ops between tensors that the candidate has and one that is judged (`pieces.Piece`): one op, a region,
a segment, a part of a snapshot's graph. It is run on what the candidate fed to its own ops, so that what these tensors
carried in is gone. However it is cut, it gives the float64 prediction P, one native result, and results with
Monte-Carlo rounding. One op has a rounding bound as well (`OneOp`), and an error counts only where floor and bound
agree. Several ops have none: the noise of all of them decides alone.

Pieces of several ops are segments and regions. A segment lies between two module outputs, for a side that is observed
at these only. A region is a part of the baseline that a candidate has no tensors of, as two programs may write the same
with other ops (a root and a division, one product for three); it is judged where both sides have a tensor again.

For them the reference (float64, the program's own dtype, Monte-Carlo rounding) runs once more for the side alone,
teacher forced: wherever the side was observed, its value is judged, and then takes the place of the reference's. So an
error counts once, in the piece that made it, and the floor is that of one piece instead of all depth so far.

Where a choice inside a piece is a tie (two experts that differ by less than rounding), all below is excluded, as
everywhere (`exclusions.ties`); all else is judged. Random numbers inside of it leave it unjudged, and so does a tensor
that the side has in another shape, in this step or in the one that filled a cache: what it made of that is not
known. There the accumulated floor decides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from glassengine.judge.exclusions.masked import completed
from glassengine.judge.flat_graphs import with_values
from glassengine.judge.pieces import Piece
from glassengine.judge.replay.reference import NUM_NOISE_RUNS, ReferenceRun, sampled
from glassengine.numerics.exemptions import DRAWN, Masks
from glassengine.numerics.float64 import Accumulation
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.kinds import NOTHING, KnownValues
from glassengine.numerics.verdict import Reference
from glassengine.program.representation.program import Program

Valid = Callable[[Node, Tensor], Tensor | None]
"""Which elements of the value of a node count; None where all do."""


@dataclass(frozen=True)
class Claim:
    """That a tensor of a candidate is what the baseline makes of the candidate's own tensors, up to rounding.

    Attributes:
        node: Of the baseline.
        candidate: The candidate's tensor.
        valid: Bool mask of the elements that count; None where all do.
        known: What the graph says of the baseline's tensor.
        own: Gives what the candidate's program computes there, from tensors that both sides have.
    """

    node: Node
    candidate: Tensor
    valid: Tensor | None = None
    known: KnownValues = NOTHING
    own: Callable[[Node], Piece | None] | None = None


@dataclass(frozen=True)
class ReplayedTensor:
    """What a replay found: the judgement, P, and the name of the explanation that it rests on.

    Attributes:
        exact: P, or what computes it: of a tensor that is proven without, few ask for it.
        again: Judges another result of the same piece, in the same step.
        exempt: The elements that it left out, see `Expected`.
    """

    judgement: Judgement
    exact: Tensor | Callable[[], Tensor]
    again: Callable[[Tensor], Judgement]
    exempt: Masks | None = None
    explanation: str = "as_read"

    @property
    def predicted(self) -> Tensor:
        """P, in float64."""
        return self.exact if isinstance(self.exact, Tensor) else self.exact()


@dataclass(frozen=True)
class Expected:
    """What a piece should give.

    Attributes:
        reference: P, with the noise behind its floor; of one op with its native result alone, at first.
        exempt: Elements that are left out, by reason, where they are not those of the accumulated reference.
    """

    reference: Reference
    exempt: Masks | None = None

    def judge(self, result: Tensor) -> Judgement:
        """Judge what a candidate made of the same tensors."""
        return self.reference.judge(result)

    def replayed(self, result: Tensor) -> ReplayedTensor:
        """Return what the replay found of a result as it was read."""
        return ReplayedTensor(self.judge(result), self.reference.exact, self.judge, self.exempt)


def judged(expected: Sequence[Expected], results: Sequence[Tensor]) -> list[Judgement]:
    """Judge what a back-end made of a piece, output by output."""
    return [one.judge(result) for one, result in zip(expected, results, strict=True)]


@torch.no_grad()
def expected_of(piece: Piece) -> list[Expected]:
    """Run a piece that stands by itself in every way that is legal, and return what each of its outputs should be."""
    with_values(piece.module, piece.arguments())
    exact, native = piece.exact(), piece.run()
    draws = [torch.Generator().manual_seed(seed) for seed in range(NUM_NOISE_RUNS)]
    runs = [piece.exact(sampled(draw, lambda node, _: _float(tree_leaves(node.meta["val"])[0]))) for draw in draws]
    return [
        Expected(Reference(exact[index], value, [run[index] for run in runs], dtype=_float(value), valid=None))
        for index, value in enumerate(native)
    ]


def _float(value: Tensor) -> torch.dtype:
    return value.dtype if value.is_floating_point() else torch.float32


class SegmentReplay:
    """Cuts pieces for one side, step by step and node by node in the order of the graph.

    Args:
        program: The baseline program, with weights.
        coarsest: Dtype of the side, where it is coarser than the program's.
        rounded: Node -> dtype that the side's kernel rounds to inside of the piece that ends there.

    Attributes:
        has_run: Whether a step of the case has begun.
        values: What the side was given and, up to the present node, made in this step, by node of `program`.
    """

    def __init__(
        self, program: Program, *, coarsest: torch.dtype | None, rounded: Mapping[str, torch.dtype] | None = None
    ) -> None:
        self._program = program
        self._rounded = rounded or {}
        self._coarsest = coarsest
        self._ports = {port.name: port.node for port in program.inputs}
        self._presents = [
            (self._ports[past], program.node(program.output_nodes[present])) for past, present in program.caches.items()
        ]
        self.values: dict[str, torch.Tensor] = {}

    def begin(self, accumulation: Accumulation) -> None:
        """Start a case, with an empty cache, of a side whose products are summed so."""
        self._run = ReferenceRun(self._program, coarsest=self._coarsest, accumulation=accumulation)
        self._walk: Generator[tuple[Node, Reference], torch.Tensor | None, None] | None = None
        self._current: tuple[Node, Reference] | None = None
        self._unknown: dict[str, bool] = {}
        self.has_run = False

    def begin_step(
        self,
        inputs: Mapping[str, torch.Tensor],
        observed: Callable[[str], torch.Tensor | None],
        valid: Valid,
        is_asked_for: Callable[[Node], bool] = lambda _: True,
    ) -> None:
        """Take over a step of the side.

        Args:
            inputs: By name; caches as they were before the first step.
            observed: Gives the side's value of a node, or None.
            valid: As for `ReferenceRun.step`.
            is_asked_for: Whether `expected` may be called for a node.
        """
        self._finish()
        self._unknown = {past: self._is_unknown(node) for past, node in self._presents if self.has_run}
        self.has_run = True
        self._is_asked_for = is_asked_for
        self._walk = self._run.walk(inputs, valid, self._taken)
        given = {**self._run.caches, **inputs}
        self.values = {self._ports[name]: tensor for name, tensor in given.items() if name in self._ports}
        self._observed = observed
        self._current = None

    @torch.no_grad()
    def expected(self, node: Node, candidate: torch.Tensor) -> tuple[Expected, torch.Tensor] | None:
        """Return what the piece that ends in `node` should give, and the candidate's tensor in the shape of that.

        None if it depends on unknown values, or the tensor does not fit.
        """
        while self._current is None or self._current[0] is not node:
            if not self._advance():
                return None
        reference = self._current[1]
        value = _completed(candidate, reference)
        if value is None or self._is_unknown(node) or DRAWN in reference.known.exempt:
            return None
        kept = reference.kept_in(self._rounded.get(node.name, value.dtype)) if value.is_floating_point() else reference
        return Expected(kept, kept.known.exempt), value

    def _advance(self) -> bool:
        """Go on to the next tensor; the side's value of the present one takes the place of the reference's."""
        assert self._walk is not None
        forced = None
        if self._current is not None:
            node, reference = self._current
            value = self._observed(node.name)
            forced = None if value is None else _completed(value, reference)
            is_lost = value is not None and forced is None
            if forced is not None:
                self.values[node.name] = forced
            # What comes after is computed from what was observed.
            self._unknown[node.name] = forced is None and (is_lost or self._is_unknown(node))
        try:
            self._current = next(self._walk) if self._current is None else self._walk.send(forced)
        except StopIteration:
            self._walk, self._current = None, None
            return False
        return True

    def _taken(self, node: Node, shape: torch.Size) -> torch.Tensor | None:
        """Return the side's value of a product that is judged without a reference of its own."""
        value = None if self._is_asked_for(node) else self._observed(node.name)
        if value is None or value.shape != shape:
            return None
        self.values[node.name] = value
        self._unknown[node.name] = False
        return value

    def _finish(self) -> None:
        """Run the unrequested rest of a step: it contains the caches."""
        if self._current is None and not self._presents:
            return
        with torch.no_grad():
            while self._walk is not None and self._advance():
                pass

    def _is_unknown(self, node: Node) -> bool:
        found = self._unknown.get(node.name)
        if found is None:
            found = any(self._is_unknown(source) for source in node.all_input_nodes)
            self._unknown[node.name] = found
        return found


def _completed(value: torch.Tensor, reference: Reference) -> torch.Tensor | None:
    """Return `value` in the shape of the reference: a growing cache is shorter than the static one."""
    slots = value.dim() - 2 if value.dim() > 2 else None
    found = completed(value, reference.native, slots, 0)
    return found if found.shape == reference.native.shape else None
