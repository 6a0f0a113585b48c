"""Judges a chunk: a pure function of paths, options and numbers, the same in this process and in any other.

What is opened is kept for the next chunk of the same comparison. Nothing of one chunk has an influence on another: of a
run of several processes, whose parts are put together step by step, a chunk has all pairs of its steps, and begins with
nothing known of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from glassengine.blocks.pieces import one_thread
from glassengine.compare.judging import Judge
from glassengine.compare.matching.maps import TensorMap, load_map
from glassengine.compare.matching.matching import Match, Matching
from glassengine.compare.precision import two_precisions
from glassengine.compare.ranks.findings import Told
from glassengine.compare.ranks.rank_and_hints import rank_and_hints
from glassengine.compare.ranks.ranks import PutTogether
from glassengine.compare.ranks.shared_gradients import sum_of
from glassengine.compare.ranks.sides import expect_counterparts, sides_of_one_rank
from glassengine.compare.rearranged import rearranged
from glassengine.compare.requirements import printed_statistics
from glassengine.compare.units import (
    Answer,
    Chunk,
    Outcome,
    Request,
    Statistics,
    Unit,
    answer_to_bytes,
    asked_from_bytes,
    failure_of,
)
from glassengine.numerics.metrics.tolerance import is_inexact, tolerance
from glassengine.recording.layout.noise_floor import NoiseFloor, read_noise_floor
from glassengine.recording.read.ranks import RankRecordings
from glassengine.recording.read.reader import Recording
from glassengine.recording.read.source import TensorSource, open_source

_MOST_OPEN = 2


def judge_chunk(asked: bytes) -> bytes:
    """Return the figures of a chunk; what is asked and found is `units.Asked` and `units.Answer`, as bytes."""
    found = asked_from_bytes(asked)
    try:
        answer = opened(found.request.key()).answer(found.chunk)
    except Exception as error:
        answer = Answer(failure=failure_of(error))
    return answer_to_bytes(answer)


@functools.lru_cache(maxsize=_MOST_OPEN)
def opened(request: bytes) -> Bench:
    """Return a comparison that is open for judging."""
    found = Request.of(request)
    left, right = open_source(found.baseline), open_source(found.candidate)
    return Bench.of(found, left, right, None if found.map is None else load_map(found.map))


@dataclass
class Bench:
    """A comparison that is open for judging.

    Attributes:
        judge: Of both sides; where one is of several ranks and the other of one, it is put together.
        rules: Of the map.
    """

    judge: Judge
    rules: TensorMap | None

    def __post_init__(self) -> None:
        self._step: _Step | None = None

    @classmethod
    def of(cls, request: Request, left: TensorSource, right: TensorSource, rules: TensorMap | None) -> Bench:
        """Return what judges two sources that are open.

        Args:
            request: Its paths are not read.
            left: The baseline.
            right: The candidate.
            rules: What its map says.
        """
        left, right = printed_statistics(left, right) or (left, right)
        left, right = sides_of_one_rank(left, right)
        has_drift = two_precisions(left, right) is not None
        floor, _ = usable_floor(left, right)
        judge = Judge(
            left,
            right,
            request.transpose,
            request.rtol,
            request.atol,
            request.device,
            floor,
            has_drift,
            has_drift and request.by_drift,
        )
        return cls(judge, rules)

    @property
    def is_put_together(self) -> bool:
        """Whether parts of several ranks are."""
        return isinstance(self.judge.left, PutTogether) or isinstance(self.judge.right, PutTogether)

    def match(self, unit: Unit) -> Match:
        """Return the match that a unit stands for."""
        rule = None if unit.rule is None or self.rules is None else self.rules.rules[unit.rule]
        theirs = tuple(self.judge.right.entries[place] for place in unit.candidates)
        return Match(self.judge.left.entries[unit.baseline], theirs, unit.method, rule)

    def answer(self, chunk: Chunk) -> Answer:
        """Return what is found of a chunk.

        Raises:
            GlassError: A side is damaged, or a map does not fit it.
        """
        with one_thread():
            if not self.is_put_together:
                return self._answer(self.judge, chunk, lambda _: None)
            step = self._step_of(chunk)
            answer = self._answer(step.judge, chunk, step.reach)
            return msgspec.structs.replace(answer, told=step.told(chunk.units)) if chunk.kind == "judge" else answer

    def _answer(self, judge: Judge, chunk: Chunk, reach: Callable[[Unit], None]) -> Answer:
        """Return what is found; `reach` is called with each unit before that is asked about."""
        if chunk.kind != "judge":
            for unit in chunk.units:
                reach(unit)
        if chunk.kind == "trace":
            entries = [self.match(unit).baseline for unit in chunk.units]
            return Answer(found=sum_of(entries[0], entries[1:], judge.left))
        if chunk.kind == "explain":
            judged = [self.match(unit) for unit in chunk.units]
            pairs = [judge.pair_of(one, unit.verdict) for one, unit in zip(judged, chunk.units, strict=True)]
            rank, hints = rank_and_hints(chunk.asked, pairs, judged, judge.left, judge.right)
            if not hints and not self.is_put_together:
                hints = rearranged(judged[chunk.asked], judge.left, judge.right)
            return Answer(found=rank, hints=hints)
        outcomes = []
        for unit in chunk.units:
            reach(unit)
            outcomes.append(self._outcome(judge, chunk.kind, unit))
        return Answer(tuple(outcomes))

    def _outcome(self, judge: Judge, kind: str, unit: Unit) -> Outcome:
        match = self.match(unit)
        if kind == "summarize":
            return Outcome(unit.number, statistics=Statistics(*judge.statistics(match)))
        if unit.rows is not None:
            evidence, counted = judge.rows(match, *unit.rows)
            return Outcome(unit.number, evidence=evidence, counted=counted)
        left, right = self.judge.left.entries, self.judge.right.entries
        added = [replace(match, baseline=left[one], candidates=(right[other],)) for one, other in unit.added]
        pair, drift, counted = judge.pair(match, added=added)
        return Outcome(unit.number, pair, drift=drift, counted=counted)

    def _step_of(self, chunk: Chunk) -> _Step:
        """Return what is known of the steps of a chunk; of the last one that was asked about it is kept."""
        matches = [self.match(unit) for unit in chunk.context]
        steps = frozenset(one.baseline.step for one in matches)
        if self._step is None or self._step.steps != steps:
            self._step = _Step(self.judge, steps, chunk.context, matches)
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


def usable_floor(left: TensorSource, right: TensorSource) -> tuple[NoiseFloor | None, str | None]:
    """Return the noise floor of the baseline, or why it cannot be used."""
    floor = None
    if isinstance(left, Recording):
        floor = read_noise_floor(left.path)
    elif isinstance(left, RankRecordings):
        floor = left.noise_floor()
    if floor is None:
        return None, None
    ours, theirs = (str(side.metadata.get("dtype")) for side in (left, right))
    # A coarser model's tensors may have been recorded in a finer dtype: its float32 islands, logits that were cast.
    if (
        all(is_inexact(dtype) for dtype in (ours, theirs))
        and tolerance(theirs, theirs).rtol > tolerance(ours, ours).rtol
    ):
        return None, f"the floor of {left.path} is that of {ours}, too fine for {theirs}"
    return floor, None
