"""Cuts a comparison into chunks, from the indices of both sides alone.

Pairs are numbered in the order of the baseline's steps, and a chunk has those of some 256 MB that follow one another.
Pairs whose checksums are equal are in no chunk; tensors that are larger than one are cut into rows. Sides are read
step by step, and of each pair a few numbers are kept, in columns.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from glassengine.compare.bench import Bench
from glassengine.compare.matching.maps import TensorMap
from glassengine.compare.matching.matching import Match, Matcher, Matching, by_step
from glassengine.compare.ranks.sides import expect_counterparts
from glassengine.compare.units import Chunk, Kind, Unit
from glassengine.numerics.metrics.tolerance import is_inexact
from glassengine.recording.layout.entries import Lazy
from glassengine.recording.layout.layout import STORED, Entry, num_bytes
from glassengine.results import Skipped
from glassengine.sites import matches as names_it

CHUNK_BYTES = 256 << 20
_UNIT_BYTES = 1 << 16
"""What a small pair costs, as bytes of a large one: opening both, and a verdict."""

_METHODS = ("name", "alias", "map")
_JUDGED, _SAME, _CUT = 0, 1, 2


class Pairs(Lazy[Match]):
    """Matches in columns: where both tensors are in the entries of their sides, and how they were paired."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._baseline, self._candidate, self._method = array("q"), array("q"), array("b")
        self._more: dict[int, tuple[tuple[int, ...], int | None]] = {}

    def add(self, baseline: int, candidates: Sequence[int], method: str, rule: int | None) -> None:
        """Add a match."""
        if len(candidates) > 1 or rule is not None:
            self._more[len(self)] = tuple(candidates), rule
        self._baseline.append(baseline)
        self._candidate.append(candidates[0])
        self._method.append(_METHODS.index(method))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._baseline)

    def unit(self, place: int, *, number: int | None = None) -> Unit:
        """Return one as what workers are sent; `number` is another one than its place."""
        candidates, rule = self._more.get(place, ((self._candidate[place],), None))
        method = _METHODS[self._method[place]]
        return Unit(place if number is None else number, self._baseline[place], candidates, method, rule)

    def _item(self, place: int) -> Match:
        return self._bench.match(self.unit(place))


class Span(NamedTuple):
    """The pairs from `first` to `end`, or some rows of one."""

    first: int
    end: int
    rows: tuple[int, int] | None = None


@dataclass
class Plan:
    """What is judged, and what is not.

    Attributes:
        bench: Both sides.
        pairs: What is judged.
        kinds: Of each pair: whether it is judged, known to be the same, or cut into rows.
        spans: The chunks, in order.
        skipped: What is not judged, with the reason.
        impossible: Of that, what has a counterpart that the parts of its ranks do not make up.
        unmatched: Side -> tensors that were asked for and have no counterpart.
        counted: Tensors of the baseline by which coverage is measured: those of floats where there are any.
        judged: How many of these have a counterpart.
        floats_alone: Whether these are floats.
        context: Matches of all tensors, where those of a step are judged together.
        numbers: Their numbers among `pairs`; -1 of those that are not judged.
        steps: Where steps begin in `context`, and by the numbers of pairs.
    """

    bench: Bench
    pairs: Pairs
    kinds: bytearray = field(default_factory=bytearray)
    spans: list[Span] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    impossible: list[Skipped] = field(default_factory=list)
    unmatched: dict[str, int] = field(default_factory=lambda: {"baseline": 0, "candidate": 0})
    counted: int = 0
    judged: int = 0
    floats_alone: bool = False
    context: Pairs | None = None
    numbers: array[int] = field(default_factory=lambda: array("q"))
    steps: list[tuple[int, int]] = field(default_factory=list)

    def is_same(self, number: int) -> bool:
        """Whether the bytes of a pair are known to be the same."""
        return self.kinds[number] == _SAME

    def is_cut(self, number: int) -> bool:
        """Whether a pair is judged by its rows."""
        return self.kinds[number] == _CUT

    def is_asked(self, span: Span) -> bool:
        """Whether anything of a span is not known."""
        return span.rows is not None or self.kinds.find(_JUDGED, span.first, span.end) >= 0

    def chunk(self, span: Span) -> Chunk:
        """Return what is asked about a span."""
        if span.rows is not None:
            return self.asked("judge", [_with_rows(self.pairs.unit(span.first), span.rows)])
        units = [self.pairs.unit(number) for number in range(span.first, span.end) if not self.kinds[number]]
        return self.asked("judge", units)

    def asked(self, kind: Kind, units: Sequence[Unit]) -> Chunk:
        """Return units as a chunk, with the pairs that they depend on."""
        if self.context is None or not units:
            return Chunk(kind, tuple(units))
        step = bisect_right(self.steps, units[0].number, key=lambda start: start[1]) - 1
        end = self.steps[step + 1][0] if step + 1 < len(self.steps) else len(self.context)
        context = (self.context.unit(i, number=self.numbers[i]) for i in range(self.steps[step][0], end))
        return Chunk(kind, tuple(units), tuple(context))

    def coverage(self, lost: Iterable[Entry] = ()) -> float:
        """Return the share of the baseline that was judged; `lost` could not be."""
        missed = {(entry.step, entry.rank, entry.site) for entry in lost if self._counts(entry)}
        return (self.judged - len(missed)) / self.counted

    def _counts(self, entry: Entry) -> bool:
        return is_inexact(entry.dtype) or not self.floats_alone


def planned(
    bench: Bench,
    rules: TensorMap | None,
    *,
    show_only: Sequence[str] = (),
    floating_point_only: bool = False,
    chunk_bytes: int | None = None,
) -> Plan:
    """Return how two sides are compared.

    Args:
        bench: Both.
        rules: Of the map.
        show_only: Patterns: only these are judged.
        floating_point_only: Skip integers and bools.
        chunk_bytes: Of both sides, in a chunk; None is `CHUNK_BYTES`.

    Raises:
        UsageError: A rule names nothing, or is ambiguous.
    """
    plan = Plan(bench, Pairs(bench))
    maker = _Maker(plan, rules, show_only, floating_point_only, chunk_bytes or CHUNK_BYTES)
    left, right = bench.judge.left, bench.judge.right
    matcher = Matcher(left, right, rules)
    for ours, theirs in by_step(left.entries, right.entries):
        maker.add(matcher.match(ours.values(), theirs.values()), _places(ours), _places(theirs))
    maker.end()
    return plan


_Reason = Literal["not selected by --show-only", "not floating point"]


class _Maker:
    def __init__(
        self, plan: Plan, rules: TensorMap | None, show_only: Sequence[str], floats: bool, chunk_bytes: int
    ) -> None:
        self._plan = plan
        self._rules = {id(rule): number for number, rule in enumerate(() if rules is None else rules.rules)}
        self._show_only, self._floats, self._chunk_bytes = show_only, floats, chunk_bytes
        self._first, self._bytes = 0, 0
        self._deselected: list[Skipped] = []
        self._alone: dict[str, list[Skipped]] = {"baseline": [], "impossible": [], "candidate": []}
        self._wanted, self._judged = [0, 0], [0, 0]  # of floats, and of all

    def add(self, matching: Matching, ours: dict[_Place, int], theirs: dict[_Place, int]) -> None:
        plan, judge = self._plan, self._plan.bench.judge
        possible = expect_counterparts(judge.left, judge.right, matching)
        impossible = possible.baseline_only[len(matching.baseline_only) :]
        start = len(plan.pairs)
        known = {id(one) for one in possible.matches}
        if plan.bench.is_put_together:
            plan.context = plan.context or Pairs(plan.bench)
            plan.steps.append((len(plan.context), start))
        judged: list[Entry] = []
        for one in matching.matches:
            why_not = _deselected(one, self._show_only, self._floats)
            told = ours[_place(one.baseline)], [theirs[_place(entry)] for entry in one.candidates]
            rule = None if one.rule is None else self._rules[id(one.rule)]
            is_judged = id(one) in known and why_not is None
            if plan.context is not None:
                plan.context.add(*told, one.method, rule)
                plan.numbers.append(len(plan.pairs) if is_judged else -1)
            if is_judged:
                judged.append(one.baseline)
                plan.pairs.add(*told, one.method, rule)
                self._cut(one)
            elif id(one) in known:
                self._deselected.append(_skip(one.baseline, "baseline", str(why_not)))
        missed = []
        for name, side, entries in (
            ("baseline", "baseline", matching.baseline_only),
            ("impossible", "baseline", impossible),
            ("candidate", "candidate", matching.candidate_only),
        ):
            for entry, why in entries:
                reason = _deselected(Match(entry, (), "name"), self._show_only, self._floats)
                plan.unmatched[side] += reason is None
                self._alone[name].append(_skip(entry, side, reason or why))
                if reason is None and side == "baseline":
                    missed.append(entry)
        self._count(judged, missed)
        if plan.context is not None:
            self._close()

    def end(self) -> None:
        self._close()
        plan = self._plan
        plan.impossible = self._alone["impossible"]
        plan.skipped = [*self._deselected, *itertools.chain(*self._alone.values())]
        plan.floats_alone = self._wanted[0] > 0
        plan.counted, plan.judged = self._wanted[not plan.floats_alone], self._judged[not plan.floats_alone]

    def _count(self, judged: Sequence[Entry], missed: Sequence[Entry]) -> None:
        for counts, entries in ((self._judged, judged), (self._wanted, [*judged, *missed])):
            places = {_place(entry): is_inexact(entry.dtype) for entry in entries}
            counts[0] += sum(places.values())
            counts[1] += len(places)

    def _cut(self, one: Match) -> None:
        """Add the last pair to the chunk that is open, or begin another."""
        plan, judge = self._plan, self._plan.bench.judge
        number = len(plan.pairs) - 1
        if plan.context is not None:
            plan.kinds.append(_JUDGED)
            return
        if judge.is_same(one):
            plan.kinds.append(_SAME)
            return
        size = sum(map(_bytes_of, (one.baseline, *one.candidates)))
        if size > self._chunk_bytes and judge.can_be_cut(one):
            self._close(number)
            plan.kinds.append(_CUT)
            count = one.baseline.shape[0]
            at_once = max(1, count * self._chunk_bytes // size)
            plan.spans += [
                Span(number, number + 1, (first, min(count, first + at_once))) for first in range(0, count, at_once)
            ]
            self._first = number + 1
            return
        plan.kinds.append(_JUDGED)
        if self._bytes and self._bytes + size > self._chunk_bytes:
            self._close(number)
        self._bytes += size + _UNIT_BYTES

    def _close(self, end: int | None = None) -> None:
        end = len(self._plan.pairs) if end is None else end
        if end > self._first:
            self._plan.spans.append(Span(self._first, end))
        self._first, self._bytes = end, 0


_Place = tuple[int, int, str]


def _places(entries: dict[int, Entry]) -> dict[_Place, int]:
    return {_place(entry): place for place, entry in entries.items()}


def _place(entry: Entry) -> _Place:
    return entry.step, entry.rank, entry.site


def _bytes_of(entry: Entry) -> int:
    return num_bytes(entry.dtype, entry.shape) if entry.dtype in STORED else 8 * math.prod(entry.shape)


def _with_rows(unit: Unit, rows: tuple[int, int]) -> Unit:
    return Unit(unit.number, unit.baseline, unit.candidates, unit.method, unit.rule, rows)


def _deselected(one: Match, show_only: Sequence[str], floating_point_only: bool) -> _Reason | None:
    names = [entry.site for entry in (one.baseline, *one.candidates)]
    if show_only and not any(names_it(pattern, name) for pattern in show_only for name in names):
        return "not selected by --show-only"
    if floating_point_only and not all(is_inexact(entry.dtype) for entry in (one.baseline, *one.candidates)):
        return "not floating point"
    return None


def _skip(entry: Entry, side: str, reason: str) -> Skipped:
    rank = f" (rank {entry.rank})" if entry.rank else ""
    return Skipped(entry.site, side, reason + rank, step=entry.step)
