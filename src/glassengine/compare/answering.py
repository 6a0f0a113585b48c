"""Answers chunks: measures the tensors of a comparison that is open.

Nothing of one chunk has an influence on another: of a run of several processes, whose parts are put together step by
step, a chunk has all pairs of its steps, and begins with nothing known of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from glassengine.blocks.pieces import one_thread
from glassengine.compare.bench import Bench
from glassengine.compare.judging import Judge
from glassengine.compare.matching.matching import Match, Matching
from glassengine.compare.ranks.findings import Told
from glassengine.compare.ranks.rank_and_hints import rank_and_hints
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.shared_gradients import sum_of
from glassengine.compare.ranks.sides import expect_counterparts
from glassengine.compare.rearranged import rearranged
from glassengine.compare.rounded_updates import rounded_update
from glassengine.compare.units import Answer, Chunk, Outcome, Statistics, Unit


class Answering:
    """Measures what a comparison asks for.

    Args:
        bench: The comparison.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench, self._judge = bench, Judge.of(bench.judge)
        self._step: _Step | None = None

    def answer(self, chunk: Chunk) -> Answer:
        """Return what is found of a chunk.

        Raises:
            GlassError: A side is damaged, or a map does not fit it.
        """
        with one_thread():
            if not self._bench.is_put_together:
                return self._answer(self._judge, chunk, lambda _: None)
            step = self._step_of(chunk)
            answer = self._answer(step.judge, chunk, step.reach)
            return msgspec.structs.replace(answer, told=step.told(chunk.units)) if chunk.kind == "judge" else answer

    def _answer(self, judge: Judge, chunk: Chunk, reach: Callable[[Unit], None]) -> Answer:
        """Return what is found; `reach` is called with each unit before that is asked about."""
        if chunk.kind != "judge":
            for unit in chunk.units:
                reach(unit)
        if chunk.kind == "trace":
            entries = [self._bench.match(unit).baseline for unit in chunk.units]
            return Answer(found=sum_of(entries[0], entries[1:], judge.left))
        if chunk.kind == "explain":
            judged = [self._bench.match(unit) for unit in chunk.units]
            pairs = [judge.pair_of(one, unit.verdict) for one, unit in zip(judged, chunk.units, strict=True)]
            rank, hints = rank_and_hints(chunk.asked, pairs, judged, judge.left, judge.right)
            hints = (*rounded_update(judged[chunk.asked], judge.left, judge.right), *hints)
            if not hints and not self._bench.is_put_together:
                hints = rearranged(judged[chunk.asked], judge.left, judge.right)
            return Answer(found=rank, hints=hints)
        outcomes = []
        for unit in chunk.units:
            reach(unit)
            outcomes.append(self._outcome(judge, chunk.kind, unit))
        return Answer(tuple(outcomes))

    def _outcome(self, judge: Judge, kind: str, unit: Unit) -> Outcome:
        match = self._bench.match(unit)
        if kind == "summarize":
            return Outcome(unit.number, statistics=Statistics(*judge.statistics(match)))
        if unit.rows is not None:
            evidence, counted = judge.rows(match, *unit.rows)
            return Outcome(unit.number, evidence=evidence, counted=counted)
        left, right = self._judge.left.entries, self._judge.right.entries
        added = [replace(match, baseline=left[one], candidates=(right[other],)) for one, other in unit.added]
        pair, drift, counted = judge.pair(match, added=added)
        return Outcome(unit.number, pair, drift=drift, counted=counted)

    def _step_of(self, chunk: Chunk) -> _Step:
        """Return what is known of the steps of a chunk; of the last one that was asked about it is kept."""
        matches = [self._bench.match(unit) for unit in chunk.context]
        steps = frozenset(one.baseline.step for one in matches)
        if self._step is None or self._step.steps != steps:
            self._step = _Step(self._judge, steps, chunk.context, matches)
        return self._step


class _Step:
    """The pairs of some steps whose parts are put together, in their order: each depends on those before it."""

    def __init__(self, judge: Judge, steps: frozenset[int], context: Sequence[Unit], matches: Sequence[Match]) -> None:
        left, right = (side.fresh() if isinstance(side, PutTogether) else side for side in (judge.left, judge.right))
        self.steps = steps
        self.judge = replace(judge, left=left, right=right)
        expect_counterparts(left, right, Matching(tuple(matches), (), ()))
        self._chosen = [(unit, one) for unit, one in zip(context, matches, strict=True) if unit.number >= 0]
        self._place = {unit.number: place for place, (unit, _) in enumerate(self._chosen)}
        self._reached = 0

    def reach(self, unit: Unit) -> None:
        """Put together all that is before a unit, which is asked about next; note whether its parts are not shares."""
        place = self._place.get(unit.number, -1)
        for before in range(self._reached, place):
            self.judge.tensors(self._chosen[before][1])
        self._reached = max(self._reached, place + 1)
        if unit.is_rejected:
            match = self._chosen[place][1]
            for side, entry in ((self.judge.left, match.baseline), (self.judge.right, match.candidates[0])):
                if isinstance(side, PutTogether):
                    side.reject(entry)

    def told(self, units: Sequence[Unit]) -> tuple[Told, ...]:
        """Return what was found; of what was asked again, of that alone."""
        sides = [side for side in (self.judge.left, self.judge.right) if isinstance(side, PutTogether)]
        found = [one for side in sides for one in side.told()]
        again = {unit.number for unit in units if unit.is_rejected}
        if again:
            names = {
                (entry.step, entry.site)
                for unit, match in self._chosen
                if unit.number in again
                for entry in (match.baseline, match.candidates[0])
            }
            found = [one for one in found if (one.step, one.site) in names]
        return tuple(found)
