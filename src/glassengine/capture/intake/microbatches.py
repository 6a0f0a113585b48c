"""Which step a gradient of a parameter belongs to, where several microbatches are added up to one update.

Schedules of pipelines run the backwards in any order. What a parameter has after the first of them belongs to the first
step, and what it has after the last one, the sum over all, to the last step: as in a run that takes one microbatch
after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor

from glassengine.capture.intake.intake import Intake


class Microbatches:
    """Counts the microbatches of an update.

    Args:
        count: How many there are; 1 where each step is an update.
        intake: Knows of the backward that runs.
        awaited: Returns the steps whose backward may come.
    """

    def __init__(self, count: int, intake: Intake, awaited: Callable[[], Iterable[int]]) -> None:
        self.are_several = count > 1
        self._count, self._intake, self._awaited = count, intake, awaited
        # Those of the update, and the last one before it.
        self._steps: set[int] = set()
        self._before = -1
        self._backwards: list[int] = []
        self._num_added: Counter[Tensor] = Counter()

    def step_of(self, parameter: Tensor) -> int | None:
        """Return the step that what is added to a parameter now belongs to; None if to none that is known."""
        own = self._intake.step_of_backward()
        self._steps.update(step for step in self._awaited() if step > self._before)
        steps = self._of_update()
        is_over = self._num_added[parameter] >= self._count or (own is not None and steps and own > steps[-1])
        if is_over and len(steps) == self._count:
            self._before = steps[-1]
            self._steps = {step for step in self._steps if step > self._before}
            self._num_added.clear()
            self._backwards.clear()
            steps = self._of_update()
        number = self._num_added[parameter]
        self._num_added[parameter] += 1
        if own is not None:
            if own not in self._backwards:
                self._backwards.append(own)
            number = self._backwards.index(own)
        step = steps[number] if number < len(steps) else own
        return own if step is None or self._intake.has_ended(step) else step

    def _of_update(self) -> list[int]:
        return sorted(self._steps)[: self._count]
