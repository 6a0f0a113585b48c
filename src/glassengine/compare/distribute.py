"""Sends the chunks of a plan to those who judge them, and merges what comes back, always in the order of the plan.

Here, in processes, on a cluster, or by jobs that have left their answers in files: what is merged is the same. A chunk
whose workers die is halved, until the one pair that kills them is found: that pair is reported, and never ok.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from glassengine.compare.evidence import Evidence
from glassengine.compare.matching.matching import Match
from glassengine.compare.plan import Plan, Span
from glassengine.compare.precision import Precision
from glassengine.compare.ranks.findings import Findings
from glassengine.compare.ranks.shared_gradients import is_share
from glassengine.compare.ruling import Judged
from glassengine.compare.units import (
    Answer,
    Asked,
    Chunk,
    Outcome,
    Request,
    Statistics,
    Unit,
    answer_from_bytes,
    asked_to_bytes,
    raised,
)
from glassengine.errors import CorruptError
from glassengine.numerics.exemptions import Ledger
from glassengine.recording.layout.entries import Lazy
from glassengine.results import Hint, Packed, Pair
from glassengine.workers import ATTEMPTS, Died, Workers


class Judges(Protocol):
    """Those who answer chunks."""

    def answers(self, chunks: Iterable[Chunk], *, again: bool = False) -> Generator[Answer | Died, None, None]:
        """Yield the answer to each chunk, in their order.

        Args:
            chunks: Of a comparison.
            again: Whether these are smaller chunks, of one that has killed its workers.
        """


@dataclass(frozen=True)
class Here:
    """Judges in this process."""

    answer: Callable[[Chunk], Answer]

    def answers(self, chunks: Iterable[Chunk], *, again: bool = False) -> Generator[Answer | Died, None, None]:
        """See `Judges`."""
        for chunk in chunks:
            yield self.answer(chunk)


@dataclass(frozen=True)
class Elsewhere:
    """Judges by workers."""

    workers: Workers
    request: Request

    def answers(self, chunks: Iterable[Chunk], *, again: bool = False) -> Generator[Answer | Died, None, None]:
        """See `Judges`."""
        asked = (asked_to_bytes(Asked(self.request, chunk)) for chunk in chunks)
        with closing(self.workers.run(asked, attempts=2 if again else ATTEMPTS)) as results:
            for found in results:
                answer = found if isinstance(found, Died) else answer_from_bytes(found)
                if isinstance(answer, Answer) and answer.failure is not None:
                    raise raised(answer.failure)
                yield answer


@dataclass
class Verdicts:
    """What is merged of a comparison.

    Attributes:
        pairs: Verdicts, in the order of the plan.
        numbers: Of each pair.
        judged: The matches of these.
        lost: Number -> why it could not be judged.
        stopped_at: Number of the first pair that was not asked about any more.
    """

    pairs: Packed = field(default_factory=Packed)
    numbers: array[int] = field(default_factory=lambda: array("q"))
    judged: Sequence[Match] = ()
    lost: dict[int, str] = field(default_factory=dict)
    stopped_at: int | None = None


class Distribution:
    """Asks about the pairs of a plan: first about all, then about some of those that have a verdict, by their places.

    Args:
        plan: What is judged.
        judges: By whom.
        ledger: Counts elements that do not count.
        precision: Table of drifts, of two precisions.
    """

    def __init__(self, plan: Plan, judges: Judges, ledger: Ledger, precision: Precision | None) -> None:
        self._plan, self._judges, self._ledger, self._precision = plan, judges, ledger, precision
        self._numbers: Sequence[int] = ()
        self._rejected: set[int] = set()
        self._rows: dict[int, list[Evidence]] = {}

    def verdicts(self, *, first: bool = False, on_chunk: Callable[[int], None] = lambda _: None) -> Verdicts:
        """Return the verdicts on all pairs.

        Args:
            first: Whether nothing is asked any more after the first chunk with a tensor that is wrong.
            on_chunk: Called with the number of chunks that are over.
        """
        found = Verdicts()
        with closing(self._answers()) as spans:
            for done, (span, answer) in enumerate(spans, 1):
                is_wrong = self._merge(span, answer, found)
                on_chunk(done)
                if first and is_wrong:
                    found.stopped_at = span.end if span.end < len(self._plan.pairs) else None
                    break
        self._numbers = found.numbers
        found.judged = _Some(self._plan.pairs, self._numbers)
        return found

    def added_up(self, groups: Sequence[Sequence[int]]) -> list[Pair]:
        """See `together.Again`."""
        units = []
        for places in groups:
            others = [self._unit(i) for i in places[1:]]
            added = tuple((one.baseline, one.candidates[0]) for one in others)
            units.append(msgspec.structs.replace(self._unit(places[0]), added=added))
        return self._pairs(units)

    def rejected(self, places: Sequence[int]) -> list[Pair]:
        """See `together.Again`."""
        self._rejected.update(self._numbers[i] for i in places)
        return self._pairs([self._unit(i) for i in places])

    def sums_of(self, wanted: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """See `together.Again`."""
        chunks = [
            self._plan.asked("trace", [self._unit(i), *(self._unit(k) for k in sums)]) for i, sums in wanted.items()
        ]
        answers = self._judges.answers(chunks)
        return {
            i: sums[answer.found]
            for (i, sums), answer in zip(wanted.items(), answers, strict=True)
            if isinstance(answer, Answer) and answer.found is not None
        }

    def statistics(self, places: Sequence[int]) -> dict[int, Statistics]:
        """Return the statistics of some pairs; not of those that kill workers."""
        chunks = [self._plan.asked("summarize", [self._unit(i)]) for i in places]
        answers = self._judges.answers(chunks)
        found = [one for answer in answers if isinstance(answer, Answer) for one in answer.outcomes]
        by_number = {one.number: one.statistics for one in found}
        each = ((i, by_number.get(self._numbers[i])) for i in places)
        return {i: statistics for i, statistics in each if statistics is not None}

    def explained(
        self, places: Sequence[int], pairs: Sequence[Pair], *, asked: int
    ) -> tuple[int | None, tuple[Hint, ...]]:
        """Return which rank has a tensor wrong, and hints.

        Args:
            places: Of the pairs of this tensor in all ranks.
            pairs: The verdicts on all.
            asked: Which of them is asked about.
        """
        units = [msgspec.structs.replace(self._unit(i), verdict=pairs[i].verdict) for i in places]
        answer = self._ask(msgspec.structs.replace(self._plan.asked("explain", units), asked=asked))
        return (answer.found, answer.hints) if isinstance(answer, Answer) else (None, ())

    def _unit(self, place: int) -> Unit:
        number = self._numbers[place]
        unit = self._plan.pairs.unit(number)
        return msgspec.structs.replace(unit, is_rejected=True) if number in self._rejected else unit

    def _pairs(self, units: Sequence[Unit]) -> list[Pair]:
        """Return the verdicts on whole pairs, of each in a chunk of its own."""
        found = []
        for unit, answer in zip(
            units, self._judges.answers(self._plan.asked("judge", [unit]) for unit in units), strict=True
        ):
            if isinstance(answer, Died):
                match = self._plan.pairs[unit.number]
                raise CorruptError(
                    "a tensor cannot be judged again",
                    got=f"{match.baseline.site!r}, step {match.baseline.step}: each worker was {answer.reason}",
                    hint="--jobs with fewer processes, or more memory",
                )
            pair = answer.outcomes[0].pair
            assert pair is not None
            self._note(answer)
            found.append(pair)
        return found

    def _answers(self) -> Generator[tuple[Span, Answer | Died], None, None]:
        """Yield all spans, in order, each with its answer; that of a span of which all is known is empty."""
        plan = self._plan
        asked = (plan.chunk(span) for span in plan.spans if plan.is_asked(span))
        with closing(self._judges.answers(asked)) as answers:
            for span in plan.spans:
                yield span, next(answers) if plan.is_asked(span) else Answer()

    def _merge(self, span: Span, answer: Answer | Died, found: Verdicts) -> bool:
        """Add what was found of a span; return whether a tensor of it is wrong, whatever others say."""
        outcomes = {}
        if not isinstance(answer, Answer) or answer.outcomes:
            outcomes = {one.number: one for one in self._outcomes(self._plan.chunk(span), answer, found)}
            self._require_unchanged(outcomes.values())
        is_wrong = False
        for number in range(span.first, span.end):
            judged = self._judged(span, number, outcomes.get(number), found)
            if judged is None:
                continue
            pair, drift, counted = judged
            found.pairs.append(pair)
            found.numbers.append(number)
            is_wrong |= _is_wrong(pair)
            self._ledger.merge(pair.site, *counted)
            if drift is not None and self._precision is not None:
                self._precision.add(pair.site, pair.candidate_site, drift)
        return is_wrong

    def _judged(self, span: Span, number: int, outcome: Outcome | None, found: Verdicts) -> Judged | None:
        """Return the verdict on a pair; None where it is lost, or where some of its rows are still to come."""
        plan = self._plan
        if plan.is_same(number):
            return plan.bench.judge.same(plan.pairs[number])
        if outcome is None:
            return None
        if span.rows is None:
            assert outcome.pair is not None and outcome.counted is not None
            return Judged(outcome.pair, outcome.drift, outcome.counted)
        assert outcome.evidence is not None and outcome.counted is not None
        match = plan.pairs[number]
        parts = self._rows.setdefault(number, [])
        parts.append(outcome.evidence)
        self._ledger.merge(match.baseline.site, *outcome.counted)
        if span.rows[1] < match.baseline.shape[0]:
            return None
        del self._rows[number]
        if number in found.lost:
            return None
        judged = plan.bench.judge.of_rows(match, parts)
        if judged is not None:
            return judged
        whole = plan.asked("judge", [plan.pairs.unit(number)])
        for again in self._outcomes(whole, self._ask(whole), found):
            assert again.pair is not None
            return Judged(again.pair, again.drift, (0, ()))
        return None

    def _ask(self, chunk: Chunk, *, again: bool = False) -> Answer | Died:
        with closing(self._judges.answers([chunk], again=again)) as answers:
            return next(answers)

    def _outcomes(self, chunk: Chunk, answer: Answer | Died, found: Verdicts) -> list[Outcome]:
        """Return what was found of a chunk; where its workers have died, of its halves, down to what killed them."""
        if isinstance(answer, Answer):
            self._note(answer)
            return list(answer.outcomes)
        if len(chunk.units) == 1:
            found.lost.setdefault(chunk.units[0].number, answer.reason)
            return []
        middle = len(chunk.units) // 2
        outcomes = []
        for units in (chunk.units[:middle], chunk.units[middle:]):
            half = Chunk(chunk.kind, units, chunk.context)
            outcomes += self._outcomes(half, self._ask(half, again=True), found)
        return outcomes

    def _note(self, answer: Answer) -> None:
        for side in (self._plan.bench.judge.left, self._plan.bench.judge.right):
            if isinstance(side, Findings):
                side.note(answer.told)

    def _require_unchanged(self, outcomes: Iterable[Outcome]) -> None:
        """Raise a `CorruptError` where a worker has read other files than this process."""
        for outcome in list(outcomes)[:1]:
            entry = self._plan.pairs[outcome.number].baseline
            there = outcome.pair
            if there is not None and (there.site, there.step, there.rank) != (entry.site, entry.step, entry.rank):
                raise CorruptError(
                    "a worker has other files under the same path",
                    got=f"{there.site!r}, step {there.step}, rank {there.rank}",
                    expected=f"{entry.site!r}, step {entry.step}, rank {entry.rank}",
                    hint="--cluster needs paths that are the same on all its machines: a shared disk, or s3://",
                )


class _Some(Lazy[Match]):
    """Some matches of a plan."""

    def __init__(self, pairs: Sequence[Match], numbers: Sequence[int]) -> None:
        self._pairs, self._numbers = pairs, numbers

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._numbers)

    def _item(self, place: int) -> Match:
        return self._pairs[self._numbers[place]]


def _is_wrong(pair: Pair) -> bool:
    """Whether a tensor is wrong, whatever others say; a share of a gradient may be right."""
    return pair.verdict == "wrong" and not is_share(pair)
