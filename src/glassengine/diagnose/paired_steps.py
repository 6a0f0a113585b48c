"""Compares the steps of two models while both run; `watch_modules` compares two modules of one process.

The verdict of a step is that of `compare`. Most steps need less: a quick pass proves that `compare` would call
every tensor identical or rounding. What it cannot prove, `compare` judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from glassengine.capture.record import Recorder, RecorderSettings, describe_model
from glassengine.compare.compare import compare
from glassengine.compare.roundings import SLACK
from glassengine.errors import IncomparableError, UsageError
from glassengine.numerics.tolerance import EXACT, tolerance
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.layout.layout import Entry, LeftOut
from glassengine.recording.layout.tensors import dtype_name
from glassengine.recording.write.policy import RecordingPolicy
from glassengine.results import VERDICTS, Comparison, Skipped, Verdict

_Kept = TypeVar("_Kept")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 18
_SHARE = 0.99
"""Of a limit: the quick pass measures in float32, and leaves the rest to `compare`."""
_SIZES = 1e-12, 1e18
"""Norms whose squares float32 adds up."""
_MOST_AHEAD = 16
"""Steps of one side that wait in memory for the other side."""


class LiveStep:
    """One step of a running model, as a source of tensors."""

    complete = True

    def __init__(
        self,
        name: str,
        metadata: dict[str, Any],
        step: int,
        tensors: Mapping[str, Tensor],
        left_out: Sequence[LeftOut] = (),
    ) -> None:
        self.path = Path(name)
        self.metadata, self.tensors = metadata, tensors
        self.entries = [
            Entry(site, step, 0, dtype_name(one.dtype), tuple(one.shape), nbytes=one.nbytes)
            for site, one in tensors.items()
        ]
        self.skipped = [Skipped(one.site, "baseline", one.reason, step=step) for one in left_out]

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        return self.tensors[entry.site]


class KeptOnce(Generic[_Kept]):
    """What is kept of each tensor of a step.

    What one module returns the next is given: it is kept and compared once, unless it was written to in between.
    """

    def __init__(self, keep: Callable[[Tensor], _Kept]) -> None:
        self._keep = keep
        self._known: dict[int, tuple[Tensor, int, _Kept]] = {}

    def of(self, tensor: Tensor) -> _Kept:
        """Return what is kept of a tensor."""
        if tensor.is_inference():  # has no count of what was written to it
            return self._keep(tensor)
        known = self._known.get(id(tensor))
        if known is None or known[1] != tensor._version:
            known = self._known[id(tensor)] = tensor, tensor._version, self._keep(tensor)
        return known[2]

    def clear(self) -> None:
        """Let the tensors of the step go."""
        self._known.clear()


class StepSink(Protocol):
    """Takes the tensors of a step, and then the step."""

    def put(self, site: str, tensor: Tensor) -> None:
        """Copy the values of a tensor."""

    def leave_out(self, item: LeftOut) -> None:
        """Note a tensor without values."""

    def send(self, model: int, step: int) -> None:
        """Hand over what came since the last step."""


class _StepWriter:
    """Takes the tensors of one model."""

    is_behind = was_forked = False

    def __init__(self, sink: StepSink, model: int) -> None:
        self.metadata: dict[str, Any] = {}
        self._sink, self._model = sink, model

    def take_repeat(self, *_: Any) -> bool:
        return False

    def measure(self, *_: Any, **__: Any) -> bool:
        return False

    def write(self, site: str, step: int, tensor: Tensor, **_: Any) -> None:
        self._sink.put(site, tensor)

    def leave_out(self, item: LeftOut) -> None:
        self._sink.leave_out(item)

    def hold(self, *_: Any, **__: Any) -> None:
        pass

    def commit(self, step: int, **_: Any) -> None:
        self._sink.send(self._model, step)

    def close(self, reason: str | None = None) -> None:
        pass


class StepRecorder(Recorder):
    """Hands each step of a model to a sink."""

    def __init__(self, sink: StepSink, number: int, model: nn.Module, path: Path, sites: Sequence[str] | None) -> None:
        settings = RecorderSettings(False, None, None, 1, {})
        super().__init__(model, path, RecordingPolicy(sites=sites), settings)
        self._sink, self._number = sink, number

    def open_writer(self, options: dict[str, Any]) -> BackgroundWriter:
        """Return what passes tensors on."""
        return cast(BackgroundWriter, _StepWriter(self._sink, self._number))


class StepComparison:
    """Compares steps until one is not ok.

    Attributes:
        num_steps: Steps that were compared.
        num_tensors: Of the baseline.
        found: The comparison of the first step that is not ok, else of the step with the mildest worst verdict.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.num_steps = self.num_tensors = 0
        self.found: Comparison | None = None
        self._options = dict(options)
        given = {name for name, value in options.items() if value is not None}
        self._may_be_quick = given <= {"rtol", "atol"}
        self._models: set[int] = set()

    def add(self, model: int, left: LiveStep, right: LiveStep) -> bool:
        """Compare a step of both sides; return whether it is ok."""
        self.num_steps, self.num_tensors = self.num_steps + 1, self.num_tensors + len(left.entries)
        # The first step of a model says whether the names fit.
        if self.found is not None and model in self._models and self._is_no_worse(left, right):
            return True
        self._models.add(model)
        one = compare(left, right, **self._options)
        if not one.ok:
            step = left.entries[0].step
            self.found = _with_note(one, f"stopped at step {step}, after {self.num_steps - 1} steps that are ok")
        elif self.found is None or _severity(one.verdict) > _severity(self.found.verdict):
            self.found = one
        return one.ok

    def conclusion(self, counts: str | None = None) -> Comparison:
        """Return `found`, with a note of how many steps were compared.

        Args:
            counts: How many steps each side made, for the error.

        Raises:
            IncomparableError: No step was compared.
        """
        if self.found is None:
            raise IncomparableError(
                "there is nothing to compare: no step of a PyTorch module was seen on both sides", got=counts
            )
        if not self.found.ok:
            return self.found
        note = f"{self.num_steps} steps were compared while they ran, {self.num_tensors} tensors"
        return _with_note(self.found, note)

    def _is_no_worse(self, left: LiveStep, right: LiveStep) -> bool:
        assert self.found is not None
        known = quick_verdict(left, right, self._options) if self._may_be_quick else None
        return known is not None and _severity(known) <= _severity(self.found.verdict)


def quick_verdict(
    left: LiveStep, right: LiveStep, options: Mapping[str, Any]
) -> Literal["identical", "rounding"] | None:
    """Return the verdict that `compare` has on a step whose tensors pair by name; None if that takes `compare`.

    "identical" proves that all bits are equal. "rounding" proves of every tensor that its dtype and shape are
    equal, each element is within the tolerance of `compare`, and the signal is what `compare` wants where its tolerance
    is mostly absolute. Elements that are not finite, integers that differ and tensors without values prove nothing.
    """
    if left.entries != right.entries or left.skipped or right.skipped:
        return None
    found: Literal["identical", "rounding"] = "identical"
    pairs = [(baseline, right.tensors[site]) for site, baseline in left.tensors.items()]
    for baseline, candidate in {(id(one), id(other)): (one, other) for one, other in pairs}.values():
        b, c = baseline.reshape(-1), candidate.reshape(-1)
        word = _WORDS.get(b.dtype.itemsize)
        if torch.equal(b, c) if word is None else torch.equal(b.view(word), c.view(word)):
            continue
        found = "rounding"
        if not _is_rounding(b, c, options):
            return None
    return found


def _is_rounding(b: Tensor, c: Tensor, options: Mapping[str, Any]) -> bool:
    rtol: float | None = options.get("rtol")
    atol: float | None = options.get("atol")
    allowed = tolerance(dtype_name(b.dtype), dtype_name(b.dtype), rtol=rtol, atol=atol)
    if not b.is_floating_point() or allowed == EXACT:
        return False
    dtype = b.dtype if b.dtype == torch.float64 else torch.float32
    error_norm = size_norm = 0.0
    for x, y in zip(torch.split(b, _PIECE), torch.split(c, _PIECE), strict=True):
        x = x.to(dtype)
        error = (y.to(dtype) - x).abs_()
        limit = _SHARE * allowed.atol
        # NaN is not below a limit.
        if not (float(error.max()) <= limit or float((error - _SHARE * allowed.rtol * x.abs()).max()) <= limit):
            return False
        error_norm += float(error.dot(error))
        size_norm += float(x.dot(x))
    if rtol is not None or atol is not None:
        return True
    least: float = _SHARE * (allowed.rtol + SLACK * allowed.atol)
    size = math.sqrt(size_norm)
    return _SIZES[0] < size < _SIZES[1] and math.sqrt(error_norm) <= least * size


def _with_note(comparison: Comparison, note: str) -> Comparison:
    return dataclasses.replace(comparison, notes=(*comparison.notes, note))


def _severity(verdict: Verdict) -> int:
    return VERDICTS.index(verdict)


@contextlib.contextmanager
def watch_modules(
    baseline: nn.Module,
    candidate: nn.Module,
    *,
    sites: Sequence[str] | None = None,
    on_difference: Callable[[Comparison], object] | None = None,
    **options: Any,
) -> Iterator[StepComparison]:
    """Compare two modules of this process while the code of the `with` block calls both.

    The n-th call of the candidate belongs to the n-th call of the baseline; either may come first. Each step is
    compared as soon as both have made it.

    Args:
        baseline: What is right.
        candidate: Judged against it.
        sites: Patterns of the sites to compare; all when None.
        on_difference: Called with the comparison of the first step that is not ok, after which nothing more is
            compared; when None, an AssertionError is raised in the call that made the step.
        options: As for `compare`.

    Yields:
        What was found so far; `conclusion()` returns it as a comparison.

    Raises:
        AssertionError: A step is not ok.
        IncomparableError: No side made a step, one made more steps than the other, or no tensor has a partner.
        UsageError: Both are the same module.
    """
    if baseline is candidate:
        raise UsageError("a module is watched beside itself", hint="watch_modules(baseline, copy.deepcopy(baseline))")
    steps = StepComparison(options)
    both = _BothSides(steps, on_difference)
    with tempfile.TemporaryDirectory(prefix="glassengine-watch-") as folder:
        with contextlib.ExitStack() as stack:
            for name, model in (("baseline", baseline), ("candidate", candidate)):
                sink = _StepsInMemory(name, model, both)
                both.sides.append(sink)
                stack.enter_context(StepRecorder(sink, 0, model, Path(folder, name), sites))
            yield steps
        if both.has_ended:
            return
        counts = "; ".join(f"{side.name}: {side.num_steps} steps" for side in both.sides)
        if (rest := max(both.sides, key=lambda side: len(side.steps))).steps:
            raise IncomparableError(f"the {rest.name} made steps that the other side did not make", got=counts)
        steps.conclusion(counts)  # a block that compares nothing is not ok


class _BothSides:
    def __init__(self, steps: StepComparison, on_difference: Callable[[Comparison], object] | None) -> None:
        self.sides: list[_StepsInMemory] = []
        self.has_ended = False
        self._steps, self._on_difference = steps, on_difference

    def compare(self) -> None:
        """Compare the oldest step that both sides have."""
        if not all(side.steps for side in self.sides):
            return
        left, right = (side.steps.pop(0) for side in self.sides)
        try:
            self.has_ended = not self._steps.add(0, left, right)
        except BaseException:
            self.has_ended = True
            raise
        if not self.has_ended:
            return
        found = self._steps.conclusion()
        if self._on_difference is None:
            first = found.first_divergence
            where = [] if first is None else [f"first divergence: step {first.step}, {first.site}"]
            raise AssertionError("\n".join([f"NOT OK: {found.not_ok_because}", *where, found.notes[-1]]))
        self._on_difference(found)


class _StepsInMemory:
    """The steps of one side that are not compared yet."""

    def __init__(self, name: str, model: nn.Module, both: _BothSides) -> None:
        self.name = name
        self.steps: list[LiveStep] = []
        self.num_steps = 0
        self._metadata, self._both = describe_model(model), both
        self._tensors: dict[str, Tensor] = {}
        self._copies: KeptOnce[Tensor] = KeptOnce(lambda tensor: tensor.detach().cpu().clone())
        self._left_out: list[LeftOut] = []

    def put(self, site: str, tensor: Tensor) -> None:
        if not self._both.has_ended:
            self._tensors[site] = self._copies.of(tensor)

    def leave_out(self, item: LeftOut) -> None:
        self._left_out.append(item)

    def send(self, model: int, step: int) -> None:
        if self._both.has_ended:
            return
        self.steps.append(LiveStep(self.name, self._metadata, step, self._tensors, self._left_out))
        self._tensors, self._left_out = {}, []
        self._copies.clear()
        self.num_steps += 1
        if len(self.steps) > _MOST_AHEAD:
            self._both.has_ended = True
            raise IncomparableError(
                f"the {self.name} is {len(self.steps)} steps ahead of the other side",
                expected=f"at most {_MOST_AHEAD}",
                hint="call both modules in turn",
            )
        self._both.compare()
