"""The time left of work in stages, and the bar that shows it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from glassengine.cli.bars import Estimate, bar, left_in_words

SHARES = (("loading", 1.0), ("exporting", 3.0), ("judging", 6.0))


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
    estimate.begin("loading the model")
    clock.now += 5
    assert estimate.left_s() is None


def test_what_is_over_tells_how_long_the_rest_takes(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin("loading")
    clock.now += 2
    estimate.begin("exporting m")
    assert estimate.left_s() == pytest.approx(18)
    clock.now += 5
    assert estimate.left_s() == pytest.approx(13)
    assert estimate.fraction() == pytest.approx(7 / 20)
    clock.now += 50  # longer than foreseen: it must end sometime
    assert estimate.left_s() == pytest.approx(12)


def test_a_stage_that_counts_tells_of_itself(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin("loading")
    clock.now += 1
    estimate.begin("judging 3 cases")
    clock.now += 30
    estimate.begin("judging: 3 of 12 steps")
    assert estimate.left_s() == pytest.approx(90)
    clock.now += 90
    estimate.begin("judging: 12 of 12 steps")
    assert estimate.left_s() == 0 and estimate.fraction() == 1


def test_a_stage_left_out_takes_no_time(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin("loading")
    clock.now += 4
    estimate.begin("judging")
    assert estimate.left_s() == pytest.approx(24)


def test_unknown_sentences_belong_to_the_stage_before(clock: Clock) -> None:
    estimate = Estimate(SHARES, clock)
    estimate.begin("something else")
    assert estimate.left_s() is None
    estimate.begin("loading")
    clock.now += 4
    estimate.begin("exporting")
    estimate.begin("a detail, 0 of 0")
    assert estimate.left_s() == pytest.approx(36)


@pytest.mark.parametrize(("seconds", "words"), [(None, ""), (40.2, "about 40 s left"), (600, "about 10 min left")])
def test_words(seconds: float | None, words: str) -> None:
    assert left_in_words(seconds) == words


def test_bar_shows_stage_and_time_left_and_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.cli.bars.Estimate.left_s", lambda self: 42.0)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with bar(console, SHARES) as begin:
        begin("judging [3] cases")
    shown = written.getvalue()
    assert "judging [3] cases" in shown and "about 42 s left" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is cleared"
