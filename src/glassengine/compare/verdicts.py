"""Judges all blocks of a plan by one map over workers, and applies the rules over several verdicts.

A block whose workers die is halved, until the one pair that kills them is found: that pair is reported, and never ok.
What is asked again of single pairs, this process answers.

The gradient of what a module is given is that of the tensor: all who read it add to it. A module whose input is another
tensor of the same values (it was copied, cast, or spread over processes for it alone) has its own share. Where the sum
is recorded under another name, as the gradient of what made the tensor, it is judged there, and the share with it.

Ranks may never add up their shares of a sum. That is derived from what follows: the next new tensor. Where it is wrong,
and not the same in all ranks, nothing was added up before; where nothing follows, it is not added up at all.
"""

from __future__ import annotations

import bisect
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from glassengine.compare.judge import PairJudge, PairVerdict, RowFigures
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.sources import CACHES, SourceWrapper, is_of_parameter, phase_of
from glassengine.compare.pairs import ComparisonPlan, PairBlock, PairItem, PairSpan
from glassengine.compare.roundings import PrecisionTable, rounded_update
from glassengine.compare.session import Answer, ComparisonSession, PairFindings
from glassengine.errors import CorruptError
from glassengine.numerics.exemptions import Ledger
from glassengine.numerics.tolerance import is_inexact
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.results import FLAGGED, Hint, Packed, Pair
from glassengine.results.base import Lazy
from glassengine.sites import ROOT
from glassengine.workers import Died, Workers

if TYPE_CHECKING:
    from glassengine.compare.ranks.ranks import AssembledRanks

SHARED = "added up with those of the modules that are given the same tensor"
OWN_SHARE = "the module's own share of a gradient whose sum is right"

_MAX_SHARES = 256


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


ADDED_OTHERWISE = "a sum over some of the microbatches, in another order; that over all is right"
_GRADIENT = ":grad"

Place = tuple[str, int, int]
"""Site, step and rank."""


def apply_cross_pair_rules(found: Packed, chosen: Sequence[MatchedPair], judging: Judging) -> None:
    """Change the verdicts on single pairs by what several of them say together."""
    left, right = judging.sides
    for i, k in _with_right_sums(found, chosen, _partial_sums(left, right)).items():
        found[i] = replace(found[i], verdict=found[k].verdict, reason=ADDED_OTHERWISE)
    groups = shared_gradients(found, chosen)
    for numbers, together in zip(groups, judging.added_up(groups), strict=True):
        if together.verdict not in FLAGGED:
            for i in numbers:
                site, other = chosen[i].baseline.site, chosen[i].candidate_site
                found[i] = replace(together, site=site, candidate_site=other, reason=SHARED)
    for i, k in judging.sums_of(shares(found, chosen)).items():
        found[i] = replace(found[i], verdict=found[k].verdict, reason=f"{OWN_SHARE}: {found[k].site}")
    for side, is_left in ((left, True), (right, False)):
        if side.is_assembled:
            entries = [one.baseline if is_left else one.candidates[0] for one in chosen]
            open_ones = never_added_up(found, chosen, cast("AssembledRanks", side), entries)
            for i, pair in zip(open_ones, judging.rejected(open_ones), strict=True):
                side.reject(entries[i])
                found[i] = pair


def _partial_sums(left: SourceWrapper, right: SourceWrapper) -> dict[Place, Place]:
    """Return where the baseline has a sum over some of the microbatches of an update -> where it has that over all.

    Of runs that do not say that they are of several microbatches, nothing is returned.
    """
    counts = (side.metadata.get("microbatches") for side in (left, right))
    count = max((number for number in counts if isinstance(number, int)), default=1)
    if count < 2:
        return {}
    places = [entry.place for entry in left.entries if entry.site.endswith(_GRADIENT)]
    group = {step: number // count for number, step in enumerate(sorted({step for _, step, _ in places}))}
    last: dict[tuple[str, int, int], Place] = {}
    for place in places:
        site, step, rank = place
        last[site, group[step], rank] = max(place, last.get((site, group[step], rank), place))
    each = ((place, last[place[0], group[place[1]], place[2]]) for place in places)
    return {place: final for place, final in each if place != final}


def _with_right_sums(pairs: Packed, judged: Sequence[MatchedPair], sums: Mapping[Place, Place]) -> dict[int, int]:
    """Return the numbers of flagged pairs that are such sums -> that of the right pair with the sum over all."""
    flagged = [i for i in pairs.flagged() if judged[i].baseline.place in sums] if sums else []
    wanted = {sums[judged[i].baseline.place] for i in flagged}
    right = {}
    for i, pair in enumerate(pairs if wanted else ()):
        if pair.verdict not in FLAGGED and (place := judged[i].baseline.place) in wanted:
            right[place] = i
    each = ((i, right.get(sums[judged[i].baseline.place])) for i in flagged)
    return {i: k for i, k in each if k is not None}


def shared_gradients(pairs: Packed, judged: Sequence[MatchedPair]) -> list[list[int]]:
    """Return the numbers of flagged pairs that the baseline has as one gradient and the candidate as several."""
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


def never_added_up(
    pairs: Sequence[Pair], judged: Sequence[MatchedPair], side: AssembledRanks, own: Sequence[Entry]
) -> list[int]:
    """Return the numbers of the pairs that are shares of a sum, or of a mean, which nothing shows to be made.

    Args:
        pairs: All verdicts, in order of execution.
        judged: What was judged.
        side: The one of several ranks.
        own: Its entries of them.
    """
    is_open = [one.rule is None and side.standing(entry)[0] for one, entry in zip(judged, own, strict=True)]
    if not any(is_open):
        return []
    found = []
    by_step: dict[int, list[int]] = {}
    for i, one in enumerate(judged):
        by_step.setdefault(one.baseline.step, []).append(i)
    of_site: dict[str, list[int]] = {}
    for i, one in enumerate(judged):
        of_site.setdefault(one.baseline.site, []).append(i)
    for i in (i for i, flag in enumerate(is_open) if flag):
        site = judged[i].baseline.site
        if is_of_parameter(site):
            is_made = _is_used(i, is_open, pairs, judged, of_site, side, own)
        else:
            after = [k for k in by_step[judged[i].baseline.step] if k > i]
            following = next((k for k in after if _is_made_of(judged[k]) and _is_new(k, i, judged)), None)
            # Rows of a table become shares of a sum by a mask; what is made of shares has rows only without their sum.
            is_masked = following is not None and side.is_of_rows(own[following]) and not side.is_of_rows(own[i])
            later = [k for k in after if not is_open[k]]
            is_made = not is_masked and _is_made(i, later, pairs, judged, side, own)
        if not is_made:
            found.append(i)
    return found


def _is_new(k: int, i: int, judged: Sequence[MatchedPair]) -> bool:
    """Whether a later tensor is another than the one before it: not the same storage under another name."""
    location = judged[k].baseline.location
    return location is None or location != judged[i].baseline.location


def _is_used(
    i: int,
    is_open: Sequence[bool],
    pairs: Sequence[Pair],
    judged: Sequence[MatchedPair],
    of_site: Mapping[str, Sequence[int]],
    side: AssembledRanks,
    own: Sequence[Entry],
) -> bool:
    """Whether the gradients that ranks have of a parameter are put together: what is made of them later shows it.

    That is the next update, which may be steps later where gradients are accumulated; or the sum of gradients itself.
    """
    entry = judged[i].baseline
    path = entry.site.partition(":")[0].partition("@")[0]
    updates = [k for k in of_site.get(f"{path}:param", ()) if judged[k].baseline.step >= entry.step]
    if updates:
        # All ranks made the same of them, or one of them what is right: what is wrong then came after.
        update = updates[0]
        if pairs[update].verdict not in FLAGGED or _is_same_in_all(side, own[update]):
            return True
        from glassengine.compare.ranks.assembly import EXPLAINED

        _, reference = side.assembly(own[update])
        errors = None if reference is None else side.errors(own[update], reference)
        return errors is not None and min(errors.values()) <= EXPLAINED * max(errors.values())
    later = [k for k in of_site[entry.site] if judged[k].baseline.step > entry.step and not is_open[k]]
    return bool(later) and pairs[later[0]].verdict not in FLAGGED


def _is_made(
    i: int,
    later: Sequence[int],
    pairs: Sequence[Pair],
    judged: Sequence[MatchedPair],
    side: AssembledRanks,
    own: Sequence[Entry],
) -> bool:
    site = judged[i].baseline.site
    seen = {one.baseline.location for one in judged[:i] if one.baseline.step == judged[i].baseline.step}
    same_phase = [k for k in later if phase_of(judged[k].baseline.site) == phase_of(site) and _is_made_of(judged[k])]
    new = [k for k in same_phase if judged[k].baseline.location is None or judged[k].baseline.location not in seen]
    if not new:
        return False
    following = new[0]
    if pairs[following].verdict in FLAGGED:
        return _is_same_in_all(side, own[following])
    around = next((k for k in same_phase if _is_around(judged[k].baseline.site, site)), None)
    if around is None or pairs[around].verdict not in FLAGGED or _is_same_in_all(side, own[around]):
        return True
    # The module around it is wrong, and each rank has another result: something else in it is, or this.
    return any(pairs[k].verdict in FLAGGED for k in same_phase if k < around)


def _is_made_of(match: MatchedPair) -> bool:
    """Whether a tensor may be made of those before it: no parameter, no mask, no cache (recorded when all is done)."""
    entry = match.baseline
    is_of_activations = not is_of_parameter(entry.site) and not entry.site.endswith(CACHES)
    return is_of_activations and is_inexact(entry.dtype) and not entry.site.startswith(f"{ROOT}:in")


def _is_same_in_all(side: AssembledRanks, entry: Entry) -> bool:
    return side.standing(entry)[1]


def _is_around(outer: str, inner: str) -> bool:
    """Whether `outer` is the result of a module around that of `inner`, or in a backward the gradient it passes on."""
    path, _, port = outer.partition(":")
    end = "grad_in" if phase_of(inner) == "backward" else "out"
    own = inner.partition(":")[0].partition("@")[0]
    path = path.partition("@")[0]
    return (port or "out").startswith(end) and own != path and (path == ROOT or own.startswith(f"{path}."))
