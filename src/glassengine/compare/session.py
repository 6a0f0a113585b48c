"""A comparison that is open: judges blocks of pairs, the same in this process and in any other.

Nothing of one block has an influence on another. Where the parts of several ranks are put together, a block has all
pairs of a step, and begins with nothing known of them.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from glassengine.compare.judge import ROW_BYTES, PairJudge, PairVerdict, RowFigures, rows_of
from glassengine.compare.loader import Counted
from glassengine.compare.matching.maps import TensorMap, load_map
from glassengine.compare.matching.matching import MatchedPair, Matching
from glassengine.compare.matching.sources import Remark, SourceWrapper
from glassengine.compare.normalizers import normalized
from glassengine.compare.pairs import PairBlock, PairItem, Pairs
from glassengine.compare.roundings import two_precisions
from glassengine.errors import UsageError
from glassengine.numerics.drift import DriftSums
from glassengine.numerics.tolerance import is_inexact, tolerance
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.recording.source import TensorSource, open_source
from glassengine.results import Pair
from glassengine.stores.places import place

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Side = str | Path | TensorSource
Map = str | Path | Mapping[str, Any] | TensorMap | None


@dataclass(frozen=True)
class ComparisonOptions:
    """What the verdict on a pair depends on, beside the two sides; see `compare.compare`."""

    rtol: float | None = None
    atol: float | None = None
    transpose: tuple[str, ...] = ()
    device: str = "cpu"
    by_drift: bool = False


@dataclass(frozen=True)
class ComparisonRequest:
    """What another process opens.

    Attributes:
        baseline: Path.
        candidate: Path.
        map: Path, or what the map holds.
        options: Of the comparison.
        token: Of one comparison, as files may change until the next one.
    """

    baseline: str
    candidate: str
    map: str | Mapping[str, Any] | None
    options: ComparisonOptions
    token: str

    def __hash__(self) -> int:
        return hash(self.token)

    @classmethod
    def of(cls, baseline: Side, candidate: Side, map: Map, options: ComparisonOptions) -> ComparisonRequest:
        """Return what other processes are sent.

        Raises:
            UsageError: A side is open, or the map is not a document.
        """
        if isinstance(map, TensorMap) or not (isinstance(baseline, str | Path) and isinstance(candidate, str | Path)):
            raise UsageError(
                "other processes cannot be given what is open in this one",
                got="a TensorMap" if isinstance(map, TensorMap) else "a source",
                expected="paths",
                hint="jobs=1",
            )
        rules = map if map is None else dict(map) if isinstance(map, Mapping) else absolute_path(map)
        return cls(absolute_path(baseline), absolute_path(candidate), rules, options, uuid.uuid4().hex)


class PairFindings(NamedTuple):
    """What was found of one pair.

    Attributes:
        number: Of the pair.
        pair: The verdict; None of some rows.
        drift: Sums of the difference of two precisions.
        counted: What counts.
        rows: Figures of some rows.
    """

    number: int
    pair: Pair | None = None
    drift: DriftSums | None = None
    counted: Counted | None = None
    rows: tuple[RowFigures, ...] = ()


class Answer(NamedTuple):
    """What was found of the pairs of a block, and of the tensors that several ranks have parts of."""

    found: tuple[PairFindings, ...] = ()
    remarks: tuple[Remark, ...] = ()


class ComparisonSession:
    """Two sources that are open and in one form.

    Attributes:
        judge: Of both sides.
        rules: Of the map.
        why_no_floor: Why the noise floor of the baseline cannot be used, where it has one.
        dtypes: Of the models that the sides are of, where these differ in precision.
        is_drift: Whether such sides are judged by what is left of the signal.
        num_threads: Threads that judge pairs, where neither side forbids it.
    """

    def __init__(
        self, left: TensorSource, right: TensorSource, rules: TensorMap | None, options: ComparisonOptions
    ) -> None:
        sides = normalized(left, right, has_map=rules is not None, is_transposed=bool(options.transpose))
        self.rules, self.dtypes = rules, two_precisions(*sides)
        has_drift = self.dtypes is not None
        self.is_drift = has_drift and options.by_drift
        floor, self.why_no_floor = _usable_floor(*sides)
        self.judge = PairJudge(
            *sides,
            transpose=options.transpose,
            rtol=options.rtol,
            atol=options.atol,
            device=options.device,
            floor=floor,
            has_drift=has_drift,
            is_drift=self.is_drift,
        )
        self.num_threads = 1
        self._match = Pairs(self.judge, rules).match
        self._rejected: set[int] = set()
        self._step: _Step | None = None

    @property
    def sides(self) -> tuple[SourceWrapper, SourceWrapper]:
        """Both sides, each in the form in which it is compared."""
        return self.judge.left, self.judge.right

    @property
    def is_assembled(self) -> bool:
        """Whether a side is put together from parts of several ranks."""
        return any(side.is_assembled for side in self.sides)

    def answer(self, block: PairBlock) -> Answer:
        """Return what is found of a block.

        Raises:
            GlassError: A side is damaged, or a map does not fit it.
        """
        if not self.is_assembled:
            return Answer(tuple(self.mapped(lambda item: self._compared_pair(item, block), block.items)))
        from glassengine.blocks.pieces import one_thread

        with one_thread():
            found = tuple(self._compared_pair(item, block) for item in block.items)
        return Answer(found, self._step.remarks() if self._step is not None else ())

    def _compared_pair(self, item: PairItem, block: PairBlock) -> PairFindings:
        judge, match = self.at(item, block.context)
        if item.rows is None:
            return PairFindings(item.number, *judge.judged(match))
        pieces = rows_of(match, ROW_BYTES, *item.rows)
        return PairFindings(
            item.number, rows=tuple(self.mapped(lambda piece: judge.row_figures(match, *piece), pieces))
        )

    def mapped(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterable[_Result]:
        """Yield what a function returns of each item, in their order; arithmetic lets go of the interpreter lock."""
        num_threads = min(self.num_threads, len(items))
        if num_threads < 2 or self.is_assembled or not all(side.is_thread_safe for side in self.sides):
            yield from map(function, items)
            return
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="judge")
        try:
            yield from pool.map(function, items)
        finally:
            pool.shutdown(cancel_futures=True)

    def at(self, item: PairItem, context: Sequence[PairItem] = ()) -> tuple[PairJudge, MatchedPair]:
        """Return the match of an item, and who judges it: where ranks are put together, with all before it known."""
        if not self.is_assembled:
            return self.judge, self._match(item)
        steps = frozenset(self.judge.left.entries[one.baseline].step for one in context)
        if self._step is None or self._step.steps != steps:
            self._step = _Step(self.judge, steps, [(one, self._match(one)) for one in context])
        self._step.reach(item, is_rejected=item.number in self._rejected)
        return self._step.judge, self._match(item)

    def rejected(self, item: PairItem, context: Sequence[PairItem]) -> PairVerdict:
        """Return the verdict on a pair whose parts are never added up."""
        self._rejected.add(item.number)
        judge, match = self.at(item, context)
        found = judge.judged(match)
        names = {(entry.step, entry.site) for entry in (match.baseline, match.candidates[0])}
        self.note([one for one in self._step.remarks() if (one.step, one.site) in names] if self._step else [])
        return found

    def note(self, remarks: Sequence[Remark]) -> None:
        """Take over what was found of tensors that several ranks have parts of."""
        for side in self.sides:
            side.note(remarks)


class _Step:
    """The pairs of some steps whose parts are put together, in their order: each depends on those before it."""

    def __init__(self, judge: PairJudge, steps: frozenset[int], pairs: Sequence[tuple[PairItem, MatchedPair]]) -> None:
        from glassengine.compare.ranks.sides import expect_counterparts

        left, right = judge.left.fresh(), judge.right.fresh()
        self.steps = steps
        self.judge = replace(judge, left=left, right=right)
        expect_counterparts(left, right, Matching(tuple(match for _, match in pairs), (), ()))
        self._judged = [(item, match) for item, match in pairs if item.number >= 0]
        self._place = {item.number: place for place, (item, _) in enumerate(self._judged)}
        self._reached = 0

    def reach(self, item: PairItem, *, is_rejected: bool) -> None:
        """Put together all that is before a pair; note whether its parts are never added up."""
        place = self._place.get(item.number, -1)
        for _, before in self._judged[self._reached : place]:
            self.judge.whole(before)
        self._reached = max(self._reached, place + 1)
        if is_rejected:
            match = self._judged[place][1]
            for side, entry in ((self.judge.left, match.baseline), (self.judge.right, match.candidates[0])):
                side.reject(entry)

    def remarks(self) -> tuple[Remark, ...]:
        """Return what was found."""
        return (*self.judge.left.remarks(), *self.judge.right.remarks())


def judge_block(task: tuple[ComparisonRequest, PairBlock]) -> Answer:
    """Return what is found of a block in another process; what is opened is kept for the next block."""
    request, block = task
    return _opened(request).answer(block)


@functools.lru_cache(maxsize=2)
def _opened(request: ComparisonRequest) -> ComparisonSession:
    rules = None if request.map is None else load_map(request.map)
    return ComparisonSession(open_source(request.baseline), open_source(request.candidate), rules, request.options)


def absolute_path(path: str | Path) -> str:
    """Return a path as another process, which may be in another directory, finds it."""
    return str(place(path).absolute())


def _usable_floor(left: SourceWrapper, right: SourceWrapper) -> tuple[NoiseFloor | None, str | None]:
    """Return the noise floor of the baseline, or why it cannot be used."""
    floor = left.noise_floor()
    if floor is None:
        return None, None
    ours, theirs = (str(side.metadata.get("dtype")) for side in (left, right))
    # A coarser model's tensors may have been recorded in a finer dtype: its float32 islands, logits that were cast.
    is_known = is_inexact(ours) and is_inexact(theirs)
    if is_known and tolerance(theirs, theirs).rtol > tolerance(ours, ours).rtol:
        return None, f"the floor of {left.path} is that of {ours}, too fine for {theirs}"
    return floor, None
