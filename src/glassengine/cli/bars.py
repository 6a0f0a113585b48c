"""A bar with the time left, for work in stages.

The duration of a stage is not known in advance. The stages of a command have known rough shares of its time, so
finished stages give the time of the rest, and a stage that counts (3 of 12 steps) gives its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from glassengine.progress import Event, Work

Shares = Sequence[tuple[Work, float]]
"""(stage, its share of the time) in the order in which stages may come."""


class Estimate:
    """Time left of work in stages.

    Args:
        shares: Of the stages; one that is not among them belongs to the stage before it.
        clock: Seconds.
    """

    def __init__(self, shares: Shares, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = shares
        self._clock = clock
        self._stage = -1
        self._began = self._started = clock()
        self._done = 0.0  # shares of the stages that are over
        self._counted = 0.0  # what the present stage says of itself

    def begin(self, event: Event) -> None:
        """Take note of an event: a stage begins, or says how far it is."""
        stage = next((i for i, (work, _) in enumerate(self._shares) if work is event.work), self._stage)
        if stage != self._stage:
            self._done += self._shares[self._stage][1] if self._stage >= 0 else 0.0
            self._stage, self._began, self._counted = stage, self._clock(), 0.0
        if event.total:
            self._counted = min(event.done / event.total, 1.0)

    def left_s(self) -> float | None:
        """Return the seconds left; None as long as nothing is known."""
        if self._stage < 0:
            return None
        now = self._clock()
        within, share = now - self._began, self._shares[self._stage][1]
        known = self._done + self._counted * share
        if not known:
            return None
        spent = now - self._started if self._counted else self._began - self._started
        per_share = spent / known
        here = within * (1 / self._counted - 1) if self._counted else max(per_share * share - within, 0.0)
        return here + per_share * sum(later for _, later in self._shares[self._stage + 1 :])

    def fraction(self) -> float | None:
        """Return how much of the time is over; None as long as nothing is known."""
        left = self.left_s()
        spent = self._clock() - self._started
        return None if left is None else spent / max(spent + left, 1e-9)


class _Bar(ProgressColumn):
    def __init__(self, estimate: Estimate) -> None:
        super().__init__()
        self._estimate = estimate

    def render(self, task: Task) -> ProgressBar:
        fraction = self._estimate.fraction()
        return ProgressBar(total=1.0, completed=fraction or 0.0, width=30, pulse=fraction is None)


class _Left(ProgressColumn):
    def __init__(self, estimate: Estimate) -> None:
        super().__init__()
        self._estimate = estimate

    def render(self, task: Task) -> Text:
        return Text(left_in_words(self._estimate.left_s()), style="progress.remaining")


def left_in_words(seconds: float | None) -> str:
    """Return "about 40 s left"; coarse, as the estimate is."""
    if seconds is None:
        return ""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


@contextmanager
def bar(console: Console, shares: Shares) -> Iterator[Callable[[Event], None]]:
    """Show what is being done, a bar, and the time spent and left, while the block runs.

    Yields:
        A function that takes the events of the work.
    """
    estimate = Estimate(shares)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), _Bar(estimate), TimeElapsedColumn())
    with Progress(*columns, _Left(estimate), console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)

        def begin(event: Event) -> None:
            estimate.begin(event)
            shown.update(task, description=event.text)

        yield begin
