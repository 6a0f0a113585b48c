"""Computes the expected result of a baseline piece on a candidate's own tensors, and judges the candidate's result.

A piece is the ops between tensors that the candidate has and one that is judged (`graphs.cut.Piece`): one op, a region,
a segment, a part of a snapshot's graph. It is run on what the candidate fed to its own ops, so that what these tensors
carried in is gone. However it is cut, it gives the float64 prediction P, one native result, and results with
Monte-Carlo rounding. One op has a rounding bound as well (`OneOp`), and an error counts only where floor and bound
agree. Several ops have none: the noise of all of them decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.cut import Piece
from glassengine.judge.graphs.flat import with_values
from glassengine.judge.replay.reference import NUM_NOISE_RUNS, sampled
from glassengine.numerics.exemptions import Masks
from glassengine.numerics.float64 import in_double, retarget, target_of
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.kinds import NOTHING, KnownValues
from glassengine.numerics.verdict import Reference

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
    explanation: str = "as read"

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
    runs = [_Noisy(piece, torch.Generator().manual_seed(seed)).results() for seed in range(NUM_NOISE_RUNS)]
    return [
        Expected(Reference(exact[index], value, [run[index] for run in runs], dtype=_float(value), valid=None))
        for index, value in enumerate(native)
    ]


class _Noisy(Interpreter):
    """The piece in float64 with the rounding of each op."""

    def __init__(self, piece: Piece, generator: torch.Generator) -> None:
        super().__init__(piece.module)
        self._piece = piece
        self._rounded = sampled(generator, lambda node, _: _float(pytree.tree_leaves(node.meta["val"])[0]))

    def results(self) -> tuple[Tensor, ...]:
        # A piece may write to what it is given: each run has copies of its own.
        found: tuple[Tensor, ...] = self.run(*map(retarget, self._piece.arguments()))
        return found

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = pytree.tree_map(retarget, self.fetch_args_kwargs_from_env(n))
        return self._rounded(n, in_double(n, target_of(n))(*args, **kwargs), args, kwargs)


def _float(value: Tensor) -> torch.dtype:
    return value.dtype if value.is_floating_point() else torch.float32
