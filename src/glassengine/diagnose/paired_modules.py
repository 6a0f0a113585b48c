"""Compares a module with its baseline in one process, step by step while both run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from glassengine.capture.record import describe_model
from glassengine.diagnose.paired_steps import LiveStep, StepComparison, StepRecorder
from glassengine.errors import IncomparableError, UsageError
from glassengine.recording.layout.layout import LeftOut
from glassengine.results import Comparison

_MOST_AHEAD = 16
"""Steps of one side that wait in memory for the other side."""


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
            raise AssertionError(_words(found))
        self._on_difference(found)


class _StepsInMemory:
    """The steps of one side that are not compared yet."""

    def __init__(self, name: str, model: nn.Module, both: _BothSides) -> None:
        self.name = name
        self.steps: list[LiveStep] = []
        self.num_steps = 0
        self._metadata, self._both = describe_model(model), both
        self._tensors: dict[str, Tensor] = {}
        self._left_out: list[LeftOut] = []

    def put(self, site: str, tensor: Tensor) -> None:
        if not self._both.has_ended:
            self._tensors[site] = tensor.detach().cpu().clone()

    def leave_out(self, item: LeftOut) -> None:
        self._left_out.append(item)

    def send(self, model: int, step: int) -> None:
        if self._both.has_ended:
            return
        self.steps.append(LiveStep(self.name, self._metadata, step, self._tensors, self._left_out))
        self._tensors, self._left_out = {}, []
        self.num_steps += 1
        if len(self.steps) > _MOST_AHEAD:
            self._both.has_ended = True
            raise IncomparableError(
                f"the {self.name} is {len(self.steps)} steps ahead of the other side",
                expected=f"at most {_MOST_AHEAD}",
                hint="call both modules in turn",
            )
        self._both.compare()


def _words(found: Comparison) -> str:
    first = found.first_divergence
    where = [] if first is None else [f"first divergence: step {first.step}, {first.site}"]
    return "\n".join([f"NOT OK: {found.not_ok_because}", *where, found.notes[-1]])
