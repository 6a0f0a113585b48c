"""Undeclared summation of all products in less than float32: reported once, and the rest is judged under it.

Where every product of a side is beyond rounding, and within that of one way to sum them (`--accum`), no op is to blame:
it is how the candidate computes. Weights that are all slightly off (quantized, of an adapter that was not merged) have
errors of the same size: the errors themselves must show that it is the sums (`product_errors`). The steps are judged
again under it, so that a mistake among them still shows. The verdict is suspicious at least, since it is not
declared.
"""

from __future__ import annotations

from dataclasses import dataclass

from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.judging import judge
from glassengine.judge.verdict.score import Score
from glassengine.numerics.float64 import ACCUMULATIONS, FLOAT32_SUMS, Accumulation
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Program
from glassengine.progress import Progress, Work

_LEAST = 3
"""Fewer products are not enough to call them alike."""
_ALIKE = 0.6
"""Of the products; where few terms are summed, or results are rounded coarsely, one does not show it."""


@dataclass(frozen=True)
class _Products:
    """The products of one side: how many were judged, which are origins of an error, and what these errors show."""

    score: Score
    num_judged: int
    flagged: frozenset[str]

    @property
    def are_alike(self) -> bool:
        shown = [self.score.sums.get(name) for name in self.flagged]
        if False in shown or shown.count(True) < _LEAST:
            return False
        return len(self.flagged) >= max(_LEAST, _ALIKE * self.num_judged)


def judge_alike(climb: Climb, progress: Progress) -> str | None:
    """Judge again where all products of a side are alike; return the note about them, or None.

    Args:
        climb: With scores of all sides; they are replaced.
        progress: Called with it.
    """
    suspects = [products for score in climb.scores[1:] if (products := _products(climb.program, score)).are_alike]
    if climb.accumulation != FLOAT32_SUMS or not suspects:
        return None
    first = climb.scores
    for name in _coarser(climb.program):
        progress(Work.JUDGING.says(f"judging again, as if products were summed in {name}"))
        climb.accumulation = ACCUMULATIONS[name]
        climb.scores = [_empty_copy(score, climb.accumulation) for score in first]
        judge(climb, climb.scores)
        left = {score.side.level: _products(climb.program, score) for score in climb.scores}
        if not any(left[one.score.side.level].flagged & one.flagged for one in suspects):
            worst = max(suspects, key=lambda one: len(one.flagged))
            number = f"{len(worst.flagged)} of {worst.num_judged}"
            return (
                f"products are summed in {name}, undeclared: {number} show it, and the rest is judged "
                f"under it (--accum {name} if that is meant)"
            )
    climb.accumulation, climb.scores = FLOAT32_SUMS, first
    for score in first:
        _sum_by(score, FLOAT32_SUMS)
    return None


def _products(program: Program, score: Score) -> _Products:
    names = {node.name for node in program.graph.nodes if traits_of(node).reads_memory}
    return _Products(score, len(names & score.judged_nodes), frozenset(names & score.divergences.keys()))


def _coarser(program: Program) -> list[str]:
    """Return the ways to sum that are coarser than float32, those that explain least first."""
    own = str(program.metadata.get("dtype"))
    return [own] if own in ("bfloat16", "float16") else ["tf32", "float16", "bfloat16"]


def _empty_copy(score: Score, accumulation: Accumulation) -> Score:
    """Return a score of the same side that knows nothing yet."""
    _sum_by(score, accumulation)
    return score.fresh()


def _sum_by(score: Score, accumulation: Accumulation) -> None:
    if score.side.replay is not None:
        score.side.replay.accumulate(accumulation)
