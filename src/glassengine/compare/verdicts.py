"""Judges all blocks of a plan by one map over workers, merges the verdicts in order, and adds shared gradients up.

A block whose workers die is halved, until the one pair that kills them is found: that pair is reported, and never ok.
What is asked again of single pairs, this process answers.

The gradient of what a module is given is that of the tensor: all who read it add to it. A module whose input is another
tensor of the same values (it was copied, cast, or spread over processes for it alone) has its own share. Where the sum
is recorded under another name, as the gradient of what made the tensor, it is judged there, and the share with it.
"""

from __future__ import annotations

import bisect
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from glassengine.compare.judge import PairJudge, PairVerdict, RowFigures
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.compare.pairs import ComparisonPlan, PairBlock, PairItem, PairSpan
from glassengine.compare.precision import PrecisionTable
from glassengine.compare.rounded_updates import rounded_update
from glassengine.compare.session import Answer, ComparisonSession, PairFindings
from glassengine.errors import CorruptError
from glassengine.numerics.exemptions import Ledger
from glassengine.recording.layout.entries import Lazy
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import FLAGGED, Hint, Packed, Pair
from glassengine.workers import Died, Workers

SHARED = "added up with those of the modules that are given the same tensor"
OWN_SHARE = "the module's own share of a gradient whose sum is right"

_MAX_SHARES = 256


def shared_gradients(pairs: Packed, judged: Sequence[MatchedPair]) -> list[list[int]]:
    """Return the numbers of flagged pairs that the baseline has as one gradient and the candidate as several.

    Args:
        pairs: All verdicts.
        judged: What was judged.
    """
    if not any(is_share(pairs[i]) for i in pairs.flagged()):
        return []
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, pair in enumerate(pairs):
        if is_share(pair) and (entry := judged[i].baseline).location is not None and _is_given(judged[i]):
            groups[entry.step, entry.rank, entry.location].append(i)
    return [
        numbers
        for numbers in groups.values()
        if len(numbers) > 1
        and all(pairs[i].verdict in FLAGGED for i in numbers)
        and len({judged[i].candidates[0].location for i in numbers}) == len(numbers)
    ]


def shares(pairs: Packed, judged: Sequence[MatchedPair]) -> dict[int, list[int]]:
    """Return the numbers of flagged pairs that may be a module's share -> those of right pairs that may be the sum.

    In the baseline both are one gradient: a share that is wrong would make the sum wrong.

    Args:
        pairs: All verdicts.
        judged: What was judged.
    """
    flagged = [i for i in pairs.flagged() if is_share(pairs[i]) and _is_given(judged[i])]
    if not flagged:
        return {}
    right: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, pair in enumerate(pairs):
        if pair.verdict not in FLAGGED and ":grad_" in pair.site:
            right[_like(judged[i].baseline)].append(i)
    candidates = {i: right[_like(judged[i].baseline)] for i in flagged[:_MAX_SHARES]}
    return {i: sums for i, sums in candidates.items() if sums}


def sum_of(share: Entry, sums: Sequence[Entry], left: TensorSource) -> int | None:
    """Return the place of the sum whose gradient is that of the share; None if none is, or it cannot be known."""
    values = left.tensor(share).flatten()
    if not bool((values != values[:1]).any()):
        return None  # a constant tensor does not show what it is a gradient of
    for place, other in enumerate(sums):
        is_one = share.location is not None and share.location == other.location
        if is_one or bool((values == left.tensor(other).flatten()).all()):
            return place
    return None


def is_share(pair: Pair) -> bool:
    """Whether a wrong tensor may turn out to be a share of what is right."""
    return ":grad_in" in pair.site


def _is_given(match: MatchedPair) -> bool:
    return match.rule is None and match.baseline.site.partition(":")[2].startswith("grad_in")


def _like(entry: Entry) -> tuple[object, ...]:
    return entry.step, entry.rank, entry.dtype, entry.shape


@dataclass
class Verdicts:
    """What is merged of a comparison.

    Attributes:
        pairs: Verdicts, in the order of the plan.
        numbers: Of each pair.
        judged: The matches of these.
        lost: Number -> why it could not be judged.
        stopped_at: Number of the first pair that was not judged any more.
    """

    pairs: Packed = field(default_factory=Packed)
    numbers: array[int] = field(default_factory=lambda: array("q"))
    judged: Sequence[MatchedPair] = ()
    lost: dict[int, str] = field(default_factory=dict)
    stopped_at: int | None = None


class Judging:
    """Judges the pairs of a plan.

    Args:
        session: What judges in this process.
        plan: What is judged.
        workers: Who judges blocks.
        task: Returns what a worker is sent of a block.
        ledger: Counts elements that do not count.
        precision: Table of drifts, of two precisions.
    """

    def __init__(
        self,
        session: ComparisonSession,
        plan: ComparisonPlan,
        workers: Workers,
        task: Callable[[PairBlock], Any],
        ledger: Ledger,
        precision: PrecisionTable | None,
    ) -> None:
        self._session, self._plan, self._workers, self._task = session, plan, workers, task
        self._ledger, self._precision = ledger, precision
        self._found = Verdicts()
        self._rows: dict[int, list[RowFigures]] = {}

    def verdicts(self, *, first: bool = False, on_block: Callable[[int], None] = lambda _: None) -> Verdicts:
        """Return the verdicts on all pairs.

        Args:
            first: Whether nothing is judged any more after the first block with a tensor that is wrong.
            on_block: Called with the number of blocks that are over.
        """
        plan, found = self._plan, self._found
        blocks = (block for block in map(plan.block, plan.spans) if block.items)
        with closing(self._workers.run(map(self._task, blocks))) as answers:
            for done, span in enumerate(plan.spans, 1):
                block = plan.block(span)
                is_wrong = self._merge(span, self._pieces(block, next(answers)) if block.items else ())
                on_block(done)
                if first and is_wrong:
                    found.stopped_at = span.end if span.end < len(plan.pairs) else None
                    break
        found.judged = _Some(plan.pairs, found.numbers)
        return found

    @property
    def sides(self) -> tuple[SourceWrapper, SourceWrapper]:
        """Both sides."""
        return self._session.sides

    def added_up(self, groups: Sequence[Sequence[int]]) -> list[Pair]:
        """Return for each group of pairs the verdict on the first, to whose candidate those of the others are added."""
        return [self._added_up(*places) for places in groups]

    def rejected(self, places: Sequence[int]) -> list[Pair]:
        """Return the verdicts on pairs whose parts are not shares."""
        return [self._session.rejected(*self._block(place)).pair for place in places]

    def sums_of(self, wanted: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Return the places of pairs that are a share -> that of the pair, of several, which is its sum."""
        sum_of_share = {}
        for place, sums in wanted.items():
            own, *others = (self._at(each) for each in (place, *sums))
            number = sum_of(own[1].baseline, [match.baseline for _, match in others], own[0].left)
            if number is not None:
                sum_of_share[place] = sums[number]
        return sum_of_share

    def with_statistics(self, wanted: Sequence[tuple[int, Pair]]) -> Iterable[Pair]:
        """Yield pairs, given with their places, with the statistics of both sides and of the errors."""
        return self._session.mapped(self._with_statistics, wanted)

    def _with_statistics(self, one: tuple[int, Pair]) -> Pair:
        judge, match = self._at(one[0])
        baseline, candidate, absolute, relative = judge.statistics(match)
        return replace(one[1], baseline=baseline, candidate=candidate, abs_error=absolute, rel_error=relative)

    def explained(self, places: Sequence[int], asked: int) -> tuple[int | None, tuple[Hint, ...]]:
        """Return which rank has a tensor wrong, and hints.

        Args:
            places: Of the pairs of this tensor in all ranks.
            asked: The one in question.
        """
        rank: int | None = None
        hints: tuple[Hint, ...] = ()
        each = [self._at(place) for place in places]
        judge, match = self._at(asked)
        left, right = judge.left, judge.right
        if self._session.is_assembled or any(entry.rank != match.baseline.rank for entry in left.entries):
            from glassengine.compare.ranks.hints import rank_and_hints

            pairs = [self._found.pairs[place] for place in places]
            rank, hints = rank_and_hints(places.index(asked), pairs, [match for _, match in each], left, right)
        hints = (*rounded_update(match, left, right), *hints)
        if not hints and not self._session.is_assembled:
            from glassengine.compare.rearranged import rearranged

            hints = rearranged(match, left, right)
        return rank, hints

    def _added_up(self, first: int, *others: int) -> Pair:
        judge, match = self._at(first)
        added = []
        for other in others:
            item = self._block(other)[0]
            theirs = (judge.right.entries[item.candidates[0]],)
            added.append(replace(match, baseline=judge.left.entries[item.baseline], candidates=theirs))
        return judge.judged(match, added=added).pair

    def _block(self, place: int) -> tuple[PairItem, Sequence[PairItem]]:
        """Return a pair that has a verdict as an item, and the pairs that it depends on."""
        number, plan = self._found.numbers[place], self._plan
        span = plan.spans[bisect.bisect_right(plan.spans, number, key=lambda one: one.first) - 1]
        context = range(*span.context) if span.context is not None else ()
        return plan.pairs.item(number), [plan.context.item(each) for each in context]

    def _at(self, place: int) -> tuple[PairJudge, MatchedPair]:
        return self._session.at(*self._block(place))

    def _pieces(self, block: PairBlock, answer: Answer | Died, *, attempts: int = 2) -> Sequence[PairFindings]:
        """Return what was found of a block; where its workers died, of its halves, down to what killed them."""
        if isinstance(answer, Answer):
            self._session.note(answer.remarks)
            self._require_unchanged(answer.found)
            return answer.found
        if len(block.items) == 1:
            self._found.lost.setdefault(block.items[0].number, answer.reason)
            return ()
        middle = len(block.items) // 2
        found: list[PairFindings] = []
        for items in (block.items[:middle], block.items[middle:]):
            half = block._replace(items=items)
            with closing(self._workers.run([self._task(half)], attempts=attempts)) as answers:
                found += self._pieces(half, next(answers))
        return found

    def _merge(self, span: PairSpan, pieces: Sequence[PairFindings]) -> bool:
        """Add what was found of a span; return whether a tensor of it is wrong, whatever others say."""
        found, is_wrong = {one.number: one for one in pieces}, False
        for number in range(span.first, span.end):
            judged = self._judged(span, number, found.get(number))
            if judged is None:
                continue
            pair, drift, counted = judged
            self._found.pairs.append(pair)
            self._found.numbers.append(number)
            # A share of a gradient may turn out to be right.
            is_wrong |= pair.verdict == "wrong" and not is_share(pair)
            self._ledger.merge(pair.site, *counted)
            if drift is not None and self._precision is not None:
                self._precision.add(pair.site, pair.candidate_site, drift)
        return is_wrong

    def _judged(self, span: PairSpan, number: int, found: PairFindings | None) -> PairVerdict | None:
        """Return the verdict on a pair; None where it is lost, or where some of its rows are still to come."""
        plan = self._plan
        if plan.same[number]:
            return plan.judge.same(plan.pairs[number])
        if span.rows is None:
            if found is None:
                return None
            assert found.pair is not None and found.counted is not None
            return PairVerdict(found.pair, found.drift, found.counted)
        match = plan.pairs[number]
        parts = self._rows.setdefault(number, [])
        parts += found.rows if found is not None else ()
        if span.rows[1] < match.baseline.shape[0]:
            return None
        del self._rows[number]
        if number in self._found.lost:
            return None
        return plan.judge.of_rows(match, parts) or plan.judge.judged_whole(match)

    def _require_unchanged(self, found: Sequence[PairFindings]) -> None:
        """Raise a `CorruptError` where a worker has read other files than this process."""
        for one in found[:1]:
            entry, there = self._plan.pairs[one.number].baseline, one.pair
            if there is not None and (there.site, there.step, there.rank) != (entry.site, entry.step, entry.rank):
                raise CorruptError(
                    "a worker has other files under the same path",
                    got=f"{there.site!r}, step {there.step}, rank {there.rank}",
                    expected=f"{entry.site!r}, step {entry.step}, rank {entry.rank}",
                    hint="--cluster needs paths that are the same on all its machines: a shared disk, or s3://",
                )


class _Some(Lazy[MatchedPair]):
    """Some matches of a plan."""

    def __init__(self, pairs: Sequence[MatchedPair], numbers: Sequence[int]) -> None:
        self._pairs, self._numbers = pairs, numbers

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._numbers)

    def _item(self, place: int) -> MatchedPair:
        return self._pairs[self._numbers[place]]
