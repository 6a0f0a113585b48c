"""Judges a chunk: a pure function of paths, options and numbers, the same in this process and in any other.

What is opened is kept for the next chunk of the same comparison. Nothing of one chunk has an influence on another: of a
run of several processes, whose parts are put together step by step, a chunk has all pairs of its steps, and begins with
nothing known of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glassengine.compare.matching.maps import TensorMap, load_map
from glassengine.compare.matching.matching import Match
from glassengine.compare.precision import two_precisions
from glassengine.compare.ranks.findings import Findings
from glassengine.compare.ranks.sides import sides_of_one_rank
from glassengine.compare.requirements import printed_statistics
from glassengine.compare.ruling import Ruling
from glassengine.compare.units import (
    Answer,
    Chunk,
    Request,
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

if TYPE_CHECKING:
    from glassengine.compare.answering import Answering

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

    What measures tensors is imported with the first chunk: who plans and merges does without torch.

    Attributes:
        judge: Of both sides; where one is of several ranks and the other of one, it is put together.
        rules: Of the map.
    """

    judge: Ruling
    rules: TensorMap | None

    def __post_init__(self) -> None:
        self._answers: Answering | None = None

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
        judge = Ruling(
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
        return isinstance(self.judge.left, Findings) or isinstance(self.judge.right, Findings)

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
        if self._answers is None:
            from glassengine.compare.answering import Answering

            self._answers = Answering(self)
        return self._answers.answer(chunk)


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
