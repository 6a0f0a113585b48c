"""Finds the cause of a difference between two ways, and the switch that removes it: each is tried, none guessed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from glassengine.diagnose.invariance.alone import PRODUCTS, differs_in_float64, rounding_of, tried_alone
from glassengine.diagnose.invariance.subjects import InvarianceSubject, Results
from glassengine.diagnose.invariance.trace import CallDifference
from glassengine.diagnose.invariance.ways import SPARE, InvarianceWay, PartMapping, PositionSpan, Way, same_under
from glassengine.ops.row import Rounding
from glassengine.results.without_tensors import FirstOperation, SwitchTried, Variation, What

RANDOM = "random numbers without a seed"
STATE = "state kept between calls"
MEMORY = "uninitialized memory is read"
ATOMICS = "sums of several threads in no fixed order (atomics)"
MIXED = "rows are mixed: an operation reads other rows of the batch"
PADDING = "padding is read"
SHAPE = "another kernel for another shape"
SPLIT = "a reduction that is split by size"
TAIL = "the vector body and the scalar tail of a loop round otherwise"
FUNCTION = "it depends on the size, in whatever precision: it is another function of the row"
THREADS = "a reduction that is split by threads"


@dataclass(frozen=True)
class InvarianceCause:
    """What the trials have shown.

    Attributes:
        text: The cause; None where no trial decides.
        switch: What makes both sides bitwise equal.
        tried: All that was tried.
        first: The operation, where a trial found it.
    """

    text: str | None
    switch: str | None = None
    tried: tuple[SwitchTried, ...] = ()
    first: FirstOperation | None = None


class SettingTrials:
    """Runs a variant again under one setting after the other."""

    def __init__(self, subject: InvarianceSubject, variant: InvarianceWay) -> None:
        self.subject, self.variant = subject, variant
        self.tried: list[SwitchTried] = []

    def works(self, name: str, variant: InvarianceWay, *, repeats: int = 1, listed: bool = True) -> bool:
        """Whether both ways of a variant are bitwise equal, each time."""
        try:
            found = all(self.same(variant) for _ in range(repeats))
        except Exception:  # a setting that the model cannot run with is none for it
            found = False
        if listed:
            self.tried.append(SwitchTried(name, found))
        return found

    def same(self, variant: InvarianceWay) -> bool:
        """Whether both ways of a variant are bitwise equal."""
        return same_results(variant, self.subject.run(variant.first), self.subject.run(variant.second))

    def under(self, name: str, context: Any) -> bool:
        """Whether a setting makes both ways bitwise equal."""
        return self.works(name, self.variant.under(context))

    def cause(self, text: str | None) -> InvarianceCause:
        """Return the cause with the first switch that works."""
        switch = next((one.name for one in self.tried if one.works), None)
        return InvarianceCause(text, switch, tuple(self.tried))


def same_results(variant: InvarianceWay, first: Results, second: Results) -> bool:
    """Whether what belongs together is bitwise equal."""
    views = zip(variant.views, second, strict=True)
    return all(same_under(view, first[call], results) for (call, view), results in views)


def cause_of(
    subject: InvarianceSubject,
    what: What,
    variant: InvarianceWay,
    found: CallDifference | None,
    run: Variation | None,
    *,
    is_mistake: bool,
) -> InvarianceCause:
    """Try what makes the two ways of a variant equal, and return the cause that follows."""
    trials = SettingTrials(subject, variant)
    if what == "run" or (run is not None and run.verdict != "bitwise" and not _is_repeatable(subject, variant.second)):
        return _of_run(trials, variant, found)
    if what == "compile":
        return replace(_of_compiler(trials, variant), first=subject.first_compiled(variant.first))
    if what == "attention":
        return trials.cause("another attention kernel adds in another order")
    if what == "cache" and (text := _of_cache(trials, variant)) is not None:
        return trials.cause(text)
    if is_mistake and what in ("batch", "order") and _reads_other_rows(subject, variant):
        return trials.cause(_with_detail(MIXED, found))
    if is_mistake and what == "padding" and _reads_padding(subject, variant):
        return trials.cause(_with_detail(PADDING, found))
    text = _of_operation(found, what, is_mistake)
    if text is None and what in ("batch", "order", "padding"):
        reads = _reads_padding if what == "padding" else _reads_other_rows
        text = None if reads(subject, variant) else f"{SHAPE}: what the other rows or the padding hold does not matter"
    if text == FUNCTION or not subject.in_torch:
        return trials.cause(text)
    _switches(trials, found)
    return _with_operation(found, trials.cause(text))


def _is_repeatable(subject: InvarianceSubject, way: Way) -> bool:
    """Whether a way, from a fresh start, gives the same bits three times."""
    own = InvarianceWay("", way, way)
    first = subject.run(way)
    return all(same_results(own, first, subject.run(way)) for _ in range(2))


def _of_run(trials: SettingTrials, variant: InvarianceWay, found: CallDifference | None) -> InvarianceCause:
    if variant.second.garbage is not None:
        trials.works("torch.zeros in place of torch.empty", variant.changed(garbage=0.0))
        return trials.cause(MEMORY)
    if trials.works("torch.manual_seed before each call", variant.changed(seeded=True), repeats=2):
        return trials.cause(RANDOM)
    fresh = replace(variant, second=replace(variant.second, is_next=False))
    if trials.works("a fresh copy of the model for each call", fresh, repeats=2):
        what = found.ops[1] if found is not None and found.kind == "state" else None
        return trials.cause(STATE if what is None else f"{STATE}: {what.name} reads a tensor of an earlier call")
    if trials.works("a fresh copy and torch.manual_seed for each call", fresh.changed(seeded=True), repeats=2):
        return trials.cause(f"{RANDOM}, and {STATE}")
    if trials.works("torch.zeros in place of torch.empty", variant.changed(garbage=0.0), repeats=2):
        return trials.cause(MEMORY)
    one = trials.works("torch.set_num_threads(1)", variant.changed(threads=1), repeats=4)
    deterministic = trials.works("torch.use_deterministic_algorithms(True)", variant.under(_deterministic), repeats=4)
    return trials.cause(ATOMICS if one or deterministic else None)


def _of_cache(trials: SettingTrials, variant: InvarianceWay) -> str | None:
    if variant.second.earlier == "prefix":
        return "the prefix of another request is not what it would be from scratch: a stale cache"
    return STATE + (
        ", which other requests change"
        if trials.works(
            "a fresh copy of the model for each request", replace(variant, second=replace(variant.second, earlier=""))
        )
        else ""
    )


def _of_compiler(trials: SettingTrials, variant: InvarianceWay) -> InvarianceCause:
    for backend, text in (
        ("aot_eager", "kernels that Inductor generates: fused operations round and add otherwise"),
        ("eager", "another order of operations: AOTAutograd's decompositions"),
    ):
        own = replace(variant, second=replace(variant.second, compiler=backend))
        if trials.works(f"torch.compile(backend={backend!r})", own):
            return trials.cause(text)
    return trials.cause("the graph that Dynamo traces is another one")


def _reads_other_rows(subject: InvarianceSubject, variant: InvarianceWay) -> bool:
    """Whether the shared rows change when the others do."""
    way = variant.second
    # Where all rows are shared, one in the middle is kept.
    own = {0} if len(variant.first.rows) <= subject.least_rows else {way.rows[len(way.rows) // 2]}
    changed = tuple(row if row in own else row + SPARE for row in way.rows)
    places = [i for i, row in enumerate(way.rows) if row in own]
    size = len(way.rows)
    view = PartMapping((size, size), (places, places))
    before, after = subject.run(way), subject.run(replace(way, rows=changed))
    return not all(same_under(view, *calls) for calls in zip(before, after, strict=True))


def _reads_padding(subject: InvarianceSubject, variant: InvarianceWay) -> bool:
    """Whether real tokens change when the token of the padding does."""
    way = variant.second
    before = subject.run(way)
    return any(_moves(variant, before, subject.run(replace(way, filler=way.filler + more))) for more in (1, 2, 5))


def _moves(variant: InvarianceWay, before: Results, after: Results) -> bool:
    """Whether results of real tokens differ."""
    views = []
    for _, view in variant.views:
        span = view.tokens
        own = None if span is None else PositionSpan((span.sizes[1],) * 2, (span.starts[1],) * 2, span.length)
        views.append(PartMapping(tokens=own))
    return not all(same_under(*one) for one in zip(views, before, after, strict=True))


def _with_detail(text: str, found: CallDifference | None) -> str:
    return text if found is None or found.detail is None else f"{text} ({found.detail})"


def _of_operation(found: CallDifference | None, what: What, is_mistake: bool) -> str | None:
    """Return the cause that the kind of the first difference, and its operation run alone, show."""
    if found is None:
        return None
    op = found.ops[1]
    if found.kind == "argument":
        return f"an argument that depends on the change: {found.detail}"
    if found.kind == "state":
        return f"{STATE}: {op.name} reads a tensor of an earlier call"
    if found.kind == "memory":
        return MEMORY
    if found.kind == "indices":
        return "other positions, indices or another mask" + (f": {found.detail}" if found.detail else "")
    if found.kind == "region" and found.ops[0] is op:
        return f"other operations run: {found.detail}"
    if found.kind == "region":
        return None if op.func is None else "it reads other parts of tensors that are the same: a slice or a view"
    if is_mistake or (what != "threads" and op.func is not None and differs_in_float64(found)):
        return FUNCTION
    if what == "threads":
        return THREADS
    rounding, text = rounding_of(op.name), ""
    if rounding is Rounding.ATTENTION:
        text = f"{SPLIT}: attention adds its keys in blocks"
    elif rounding in PRODUCTS:
        text = f"{SHAPE}: products of few rows have one of their own"
    elif rounding is Rounding.POINTWISE:
        text = TAIL
    elif rounding in (Rounding.SUMS, Rounding.COMPOSITE):
        text = SPLIT
    else:
        return None
    return text if found.detail is None else f"{text} ({found.detail})"


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _switches(trials: SettingTrials, found: CallDifference | None) -> None:
    """Try settings of torch on the whole model."""
    name = "" if found is None else found.ops[1].name
    variant = trials.variant
    if torch.get_num_threads() > 1 or any((way.threads or 1) > 1 for way in (variant.first, variant.second)):
        trials.works("torch.set_num_threads(1)", variant.changed(threads=1))
    if rounding_of(name) is Rounding.ATTENTION:
        trials.works("attn_implementation='eager'", variant.changed(attention="eager"))
        trials.works("sdpa_kernel(SDPBackend.MATH)", variant.changed(attention="math"))
    trials.under("torch.backends.mkldnn.flags(enabled=False)", _without_mkldnn)
    trials.under("torch.use_deterministic_algorithms(True)", _deterministic)


def _with_operation(found: CallDifference | None, cause: InvarianceCause) -> InvarianceCause:
    """Add what was tried on the first operation alone, where no setting of the model helps."""
    if cause.switch is not None or found is None or found.kind != "operation" or found.ops[1].func is None:
        return cause
    tried = [*cause.tried, *tried_alone(found)]
    works = next((one.name for one in tried if one.works and one.scope == "operation"), None)
    return replace(cause, switch=None if works is None else f"{works} (the operation alone)", tried=tuple(tried))
