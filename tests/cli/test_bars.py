"""The time left of work in stages, and the bar that shows it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from glassengine.cli.bars import Estimate, bar, left_in_words
from glassengine.progress import Work

SHARES = ((Work.LOADING, 1.0), (Work.EXPORTING, 3.0), (Work.JUDGING, 6.0))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_is_known_in_the_first_stage(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    assert estimate.left_s() is None and estimate.fraction() is None
    estimate.begin(Work.LOADING.says("loading the model"))
    clock.now += 5
    assert estimate.left_s() is None


def test_finished_work_estimates_the_remaining_time(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin(Work.LOADING.says("loading"))
    clock.now += 2
    estimate.begin(Work.EXPORTING.says("exporting m"))
    assert estimate.left_s() == pytest.approx(18)
    clock.now += 5
    assert estimate.left_s() == pytest.approx(13)
    assert estimate.fraction() == pytest.approx(7 / 20)
    clock.now += 50  # longer than foreseen: it must end sometime
    assert estimate.left_s() == pytest.approx(12)


def test_a_stage_that_counts_tells_of_itself(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin(Work.LOADING.says("loading"))
    clock.now += 1
    estimate.begin(Work.JUDGING.says("judging 3 cases"))
    clock.now += 30
    estimate.begin(Work.JUDGING.says("judging: 3 of 12 steps", 3, 12))
    assert estimate.left_s() == pytest.approx(90)
    clock.now += 90
    estimate.begin(Work.JUDGING.says("judging: 12 of 12 steps", 12, 12))
    assert estimate.left_s() == 0 and estimate.fraction() == 1


def test_a_stage_left_out_takes_no_time(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin(Work.LOADING.says("loading"))
    clock.now += 4
    estimate.begin(Work.JUDGING.says("judging"))
    assert estimate.left_s() == pytest.approx(24)


def test_unknown_work_belongs_to_the_stage_before(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin(Work.PAIRING.says("something else"))
    assert estimate.left_s() is None
    estimate.begin(Work.LOADING.says("loading"))
    clock.now += 4
    estimate.begin(Work.EXPORTING.says("exporting"))
    estimate.begin(Work.PAIRING.says("judging 3 of 12, in words alone", 0, 0))
    assert estimate.left_s() == pytest.approx(36)


@pytest.mark.parametrize(("seconds", "words"), [(None, ""), (40.2, "about 40 s left"), (600, "about 10 min left")])
def test_words(seconds: float | None, words: str) -> None:
    assert left_in_words(seconds) == words


def test_bar_shows_stage_and_time_left_and_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.cli.bars.Estimate.left_s", lambda self: 42.0)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with bar(console, SHARES) as begin:
        begin(Work.JUDGING.says("judging [3] cases"))
    shown = written.getvalue()
    assert "judging [3] cases" in shown and "about 42 s left" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is cleared"
