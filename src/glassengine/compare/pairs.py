"""Plans a comparison from the indices of both sides: what is judged, what is not, and in which blocks of work.

Pairs are numbered in the order of the baseline's steps. A block has pairs of some 256 MB that follow one another, or
some rows of a tensor that is larger. Of ranks that are put together a block has the pairs of a step. Sides are read
step by step, and of each pair a few numbers are kept, in columns.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from glassengine.compare.judge import PairJudge, rows_of
from glassengine.compare.matching.maps import TensorMap
from glassengine.compare.matching.matching import MatchedPair, Matcher, Matching, by_step
from glassengine.numerics.tolerance import is_inexact
from glassengine.recording.layout.layout import STORED, Entry, num_bytes
from glassengine.results import Skipped
from glassengine.results.base import Lazy
from glassengine.sites import matches as names_it

BLOCK_BYTES = 256 << 20
_PAIR_BYTES = 1 << 16
"""What a small pair costs, as bytes of a large one: opening both, and a verdict."""
_METHODS = ("name", "alias", "map")


class PairItem(NamedTuple):
    """A pair of tensors, as plain numbers.

    Attributes:
        number: Of the pair, in the order of the comparison; -1 of one that is not judged.
        baseline: Place of the tensor in the entries of the baseline.
        candidates: Places of its counterparts.
        method: How they were paired.
        rule: Number of the rule of the map.
        rows: First and end, where not all rows are meant.
    """

    number: int
    baseline: int
    candidates: tuple[int, ...]
    method: str
    rule: int | None = None
    rows: tuple[int, int] | None = None


class PairBlock(NamedTuple):
    """Pairs that are judged together.

    Attributes:
        items: Which.
        context: All pairs of the same step, where ranks are put together: each depends on those before it.
    """

    items: tuple[PairItem, ...]
    context: tuple[PairItem, ...] = ()


class PairSpan(NamedTuple):
    """The numbers of the pairs of a block: from `first` to `end`, or some rows of one."""

    first: int
    end: int
    rows: tuple[int, int] | None = None
    context: tuple[int, int] | None = None


class Pairs(Lazy[MatchedPair]):
    """Matches in columns: where both tensors are in the entries of their sides, and how they were paired."""

    def __init__(self, judge: PairJudge, rules: TensorMap | None) -> None:
        self._judge, self._rules = judge, rules
        self._numbers, self._baseline, self._candidate = array("q"), array("q"), array("q")
        self._method = array("b")
        self._more: dict[int, tuple[tuple[int, ...], int | None]] = {}

    def add(self, item: PairItem) -> None:
        """Add a pair."""
        if len(item.candidates) > 1 or item.rule is not None:
            self._more[len(self)] = item.candidates, item.rule
        self._numbers.append(item.number)
        self._baseline.append(item.baseline)
        self._candidate.append(item.candidates[0])
        self._method.append(_METHODS.index(item.method))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._baseline)

    def item(self, place: int) -> PairItem:
        """Return a pair as plain numbers."""
        candidates, rule = self._more.get(place, ((self._candidate[place],), None))
        return PairItem(self._numbers[place], self._baseline[place], candidates, _METHODS[self._method[place]], rule)

    def match(self, item: PairItem) -> MatchedPair:
        """Return the pair that an item stands for."""
        rule = None if item.rule is None or self._rules is None else self._rules.rules[item.rule]
        theirs = tuple(self._judge.right.entries[place] for place in item.candidates)
        return MatchedPair(self._judge.left.entries[item.baseline], theirs, item.method, rule)

    def _item(self, place: int) -> MatchedPair:
        return self.match(self.item(place))


@dataclass
class ComparisonPlan:
    """What is judged, and what is not.

    Attributes:
        judge: Both sides.
        pairs: What is judged.
        context: All pairs, where ranks are put together.
        same: Of each pair, 1 where both sides are known to have the same bytes.
        spans: The blocks, in order.
        num_bytes: Of all blocks.
        skipped: What is not judged, with the reason.
        impossible: Of that, what has a counterpart that the parts of its ranks do not make up.
        unmatched: Side -> tensors that were asked for and have no counterpart.
        counted: Tensors of the baseline by which coverage is measured: those of floats where there are any.
        judged: How many of these have a counterpart.
        floats_alone: Whether these are floats.
    """

    judge: PairJudge
    pairs: Pairs
    context: Pairs
    same: bytearray = field(default_factory=bytearray)
    spans: list[PairSpan] = field(default_factory=list)
    num_bytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    impossible: list[Skipped] = field(default_factory=list)
    unmatched: dict[str, int] = field(default_factory=lambda: {"baseline": 0, "candidate": 0})
    counted: int = 0
    judged: int = 0
    floats_alone: bool = False

    def block(self, span: PairSpan) -> PairBlock:
        """Return what is to be judged of a span; nothing where all is known."""
        if span.rows is not None:
            return PairBlock((self.pairs.item(span.first)._replace(rows=span.rows),))
        items = tuple(self.pairs.item(number) for number in range(span.first, span.end) if not self.same[number])
        if span.context is None or not items:
            return PairBlock(items)
        return PairBlock(items, tuple(self.context.item(place) for place in range(*span.context)))

    def coverage(self, lost: Iterable[Entry] = ()) -> float:
        """Return the share of the baseline that was judged; `lost` could not be."""
        missed = {entry.place for entry in lost if is_inexact(entry.dtype) or not self.floats_alone}
        return (self.judged - len(missed)) / self.counted


def planned(
    judge: PairJudge, rules: TensorMap | None, *, show_only: Sequence[str] = (), floating_point_only: bool = False
) -> ComparisonPlan:
    """Return how two sides are compared.

    Args:
        judge: Both.
        rules: Of the map.
        show_only: Patterns: only these are judged.
        floating_point_only: Skip integers and bools.

    Raises:
        UsageError: A rule names nothing, or is ambiguous.
    """
    maker = _Planner(judge, rules, show_only, floating_point_only)
    matcher = Matcher(judge.left, judge.right, rules)
    for ours, theirs in by_step(judge.left.entries, judge.right.entries):
        places = [{entry.place: place for place, entry in side.items()} for side in (ours, theirs)]
        maker.add(matcher.match(ours.values(), theirs.values()), *places)
    return maker.made()


_Place = tuple[str, int, int]


class _Planner:
    def __init__(self, judge: PairJudge, rules: TensorMap | None, show_only: Sequence[str], floats: bool) -> None:
        self._plan = ComparisonPlan(judge, Pairs(judge, rules), Pairs(judge, rules))
        self._is_assembled = judge.left.is_assembled or judge.right.is_assembled
        self._rules = {id(rule): number for number, rule in enumerate(() if rules is None else rules.rules)}
        self._show_only, self._floats = show_only, floats
        self._first, self._bytes = 0, 0
        self._skipped: dict[str, list[Skipped]] = {"deselected": [], "baseline": [], "impossible": [], "candidate": []}
        # [not of floats, of floats]: how many tensors of the baseline are wanted and judged.
        self._wanted, self._judged = [0, 0], [0, 0]

    def add(self, matching: Matching, ours: Mapping[_Place, int], theirs: Mapping[_Place, int]) -> None:
        """Add the tensors of a step."""
        plan, judge, possible = self._plan, self._plan.judge, matching
        if self._is_assembled:
            from glassengine.compare.ranks.sides import expect_counterparts

            possible = expect_counterparts(judge.left, judge.right, matching)
        start, known = len(plan.context), {id(one) for one in possible.matches}
        judged: dict[_Place, bool] = {}
        for one in matching.matches:
            why_not = self._why_deselected(one)
            is_judged = id(one) in known and why_not is None
            number = len(plan.pairs) if is_judged else -1
            candidates = tuple(theirs[entry.place] for entry in one.candidates)
            rule = None if one.rule is None else self._rules[id(one.rule)]
            item = PairItem(number, ours[one.baseline.place], candidates, one.method, rule)
            if self._is_assembled:
                plan.context.add(item)
            if is_judged:
                judged[one.baseline.place] = is_inexact(one.baseline.dtype)
                plan.pairs.add(item)
                self._cut(one)
            elif id(one) in known:
                self._skipped["deselected"].append(_skip(one.baseline, "baseline", str(why_not)))
        wanted = dict(judged)
        impossible = possible.baseline_only[len(matching.baseline_only) :]
        for name, side, entries in (
            ("baseline", "baseline", matching.baseline_only),
            ("impossible", "baseline", impossible),
            ("candidate", "candidate", matching.candidate_only),
        ):
            for entry, why in entries:
                reason = self._why_deselected(MatchedPair(entry, (), "name"))
                plan.unmatched[side] += reason is None
                self._skipped[name].append(_skip(entry, side, reason or why))
                if reason is None and side == "baseline":
                    wanted[entry.place] = is_inexact(entry.dtype)
        for counts, found in ((self._judged, judged), (self._wanted, wanted)):
            for is_float in found.values():
                counts[is_float] += 1
        if self._is_assembled:
            self._close(context=(start, len(plan.context)))

    def made(self) -> ComparisonPlan:
        """Return the plan."""
        self._close()
        plan = self._plan
        plan.impossible = self._skipped["impossible"]
        plan.skipped = list(itertools.chain(*self._skipped.values()))
        plan.floats_alone = self._wanted[True] > 0
        plan.counted, plan.judged = (
            counts[True] if plan.floats_alone else sum(counts) for counts in (self._wanted, self._judged)
        )
        return plan

    def _cut(self, one: MatchedPair) -> None:
        """Add the last pair to the block that is open, or begin another."""
        plan, number = self._plan, len(self._plan.pairs) - 1
        plan.same.append(not self._is_assembled and plan.judge.is_same(one))
        if plan.same[number]:
            return
        size = sum(map(_bytes_of, (one.baseline, *one.candidates)))
        plan.num_bytes += size + _PAIR_BYTES
        if self._is_assembled:
            return
        if size > BLOCK_BYTES and plan.judge.can_be_cut(one):
            self._close(number)
            plan.spans += [PairSpan(number, number + 1, rows) for rows in rows_of(one, BLOCK_BYTES // 2)]
            self._first = number + 1
            return
        if self._bytes and self._bytes + size > BLOCK_BYTES:
            self._close(number)
        self._bytes += size + _PAIR_BYTES

    def _close(self, end: int | None = None, context: tuple[int, int] | None = None) -> None:
        end = len(self._plan.pairs) if end is None else end
        if end > self._first:
            self._plan.spans.append(PairSpan(self._first, end, context=context))
        self._first, self._bytes = end, 0

    def _why_deselected(self, one: MatchedPair) -> str | None:
        entries = (one.baseline, *one.candidates)
        if self._show_only and not any(names_it(name, entry.site) for name in self._show_only for entry in entries):
            return "not selected by --show-only"
        if self._floats and not all(is_inexact(entry.dtype) for entry in entries):
            return "not floating point"
        return None


def _bytes_of(entry: Entry) -> int:
    return num_bytes(entry.dtype, entry.shape) if entry.dtype in STORED else 8 * math.prod(entry.shape)


def _skip(entry: Entry, side: str, reason: str) -> Skipped:
    rank = f" (rank {entry.rank})" if entry.rank else ""
    return Skipped(entry.site, side, reason + rank, step=entry.step)
