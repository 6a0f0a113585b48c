"""What triggers, and what does not; memory is bounded by the window."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from glassengine.capture.triggers import NumberTriggers, OutsideTriggers
from glassengine.errors import UsageError
from glassengine.recording.series import ABSENT, MEASURED, NONFINITE
from glassengine.recording.write.policy import Watch

NAMES = ["a", "b", "c"]


def look(triggers: NumberTriggers, norms: list[float], loss: float | None = None, bad: int | None = None) -> list[str]:
    states = np.full(3, MEASURED, dtype=np.uint8)
    if bad is not None:
        states[bad] = NONFINITE
    return triggers.look(states, np.array(norms, dtype=np.float32), NAMES, [] if loss is None else [loss])


def test_the_first_step_that_is_not_finite_triggers_and_those_after_it_do_not() -> None:
    triggers = NumberTriggers(Watch())
    assert look(triggers, [1, 1, 1]) == []
    assert look(triggers, [1, 1, 1], bad=1) == ["not finite: b"]
    assert look(triggers, [1, 1, 1], bad=0) == []
    assert look(triggers, [1, 1, 1]) == []
    assert look(triggers, [1, 1, 1], loss=float("nan")) == ["the loss is nan"]
    assert look(NumberTriggers(Watch(nonfinite=False)), [1, 1, 1], bad=1) == []


def test_a_norm_beyond_its_running_median_triggers() -> None:
    rng = np.random.default_rng(0)
    triggers = NumberTriggers(Watch(norm=10.0))
    for step in range(200):
        # A norm that grows slowly by a factor of 100 is no jump; one that was 0 for long has no median to be beyond.
        assert look(triggers, [1.02**step * rng.uniform(0.5, 2.0), 1.0, 0.0 if step < 150 else 5.0]) == [], step
    (line,) = look(triggers, [50.0, 11.0, 5.0])
    assert "beyond 10 times its median 1:" in line and line.endswith(": b")


def test_a_spike_of_the_loss_triggers_and_noise_does_not() -> None:
    rng = np.random.default_rng(0)
    triggers = NumberTriggers(Watch())
    lines = [look(triggers, [1, 1, 1], 3.0 * 0.999**step + rng.normal(0, 0.1)) for step in range(3000)]
    assert not any(lines)
    (line,) = look(triggers, [1, 1, 1], 9.0)
    assert line.startswith("loss 9")
    constant = NumberTriggers(Watch())
    assert not any(look(constant, [1, 1, 1], 2.0 + 1e-7 * (step % 2)) for step in range(100))


def test_columns_that_come_later_have_a_median_of_their_own() -> None:
    triggers = NumberTriggers(Watch(norm=10.0))
    for _ in range(40):
        triggers.look(np.full(1, MEASURED, np.uint8), np.ones(1, np.float32), NAMES, [])
    for _ in range(40):
        assert look(triggers, [1.0, 100.0, 3.0]) == []
    assert look(triggers, [1.0, 100.0, 300.0])
    absent = np.array([MEASURED, ABSENT, ABSENT], dtype=np.uint8)
    assert triggers.look(absent, np.ones(3, np.float32), NAMES, []) == []


def test_a_file_a_signal_and_a_period(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    triggers = OutsideTriggers(Watch(file=tmp_path / "now", signal="USR1", every=3), None, 0)
    assert OutsideTriggers(Watch(file=there), None, 0).look(1) == ([], [])
    before = signal.getsignal(signal.SIGUSR1)
    assert triggers.attach() is None
    try:
        assert triggers.look(1) == ([], [])
        (tmp_path / "now").touch()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert triggers.look(3) == (["signal USR1", "the file now"], ["every 3 steps"])
        assert triggers.look(4) == ([], [])
    finally:
        triggers.detach()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_ranks_ask_each_other(tmp_path: Path) -> None:
    shared = tmp_path / "triggers.log"
    shared.write_text('{"rank": 1, "step": 3, "why": "an earlier run"}\n')
    one, other = (OutsideTriggers(Watch(), shared, rank) for rank in (0, 1))
    assert other.asked_by_others() == []
    one.tell(7, ["not finite: x"])
    assert one.asked_by_others() == []
    assert other.asked_by_others() == [(7, "rank 0: not finite: x")]
    assert other.asked_by_others() == []
    with shared.open("a") as file:
        file.write('garbage\n{"rank": 0, "step": 8, "why": "half')
    assert other.asked_by_others() == []
    with shared.open("a") as file:
        file.write(' a line"}\n')
    assert other.asked_by_others() == [(8, "rank 0: half a line")]


@pytest.mark.parametrize(
    "options", [{"before": -1}, {"every": 0}, {"norm": 0.5}, {"signal": "NONE"}, {"trackers": "x"}]
)
def test_a_watch_that_cannot_be_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Watch(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        '{"rank": 0, "step": -1, "why": "x"}', '{"rank": 0, "step": 1e400, "why": "x"}', '{"rank": 0, "why": "x"}',
        '{"rank": 0, "step": 1, "why": 5}', "[" * 5000, f'{{"rank": 0, "step": 1, "why": "{"x" * 10_000}"}}',
        "[1]", "null",
    ],
)  # fmt: skip
def test_messages_that_are_no_request_of_a_rank_are_ignored(tmp_path: Path, line: str) -> None:
    shared = tmp_path / "triggers.log"
    other = OutsideTriggers(Watch(), shared, 1)
    shared.write_text(line + '\n{"rank": 0, "step": 9, "why": "\\u001b[2Jred"}\n')
    assert other.asked_by_others() == [(9, "rank 0: \\x1b[2Jred")]


def test_a_line_without_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.capture.triggers._MOST_BYTES", 1 << 14)
    shared = tmp_path / "triggers.log"
    other = OutsideTriggers(Watch(), shared, 1)
    shared.write_bytes(bytes(1 << 17))
    while other._read < 1 << 17:
        assert other.asked_by_others() == [] and other._rest == b""
    OutsideTriggers(Watch(), shared, 0).tell(7, ["file \udc80"])  # ends the line that was there
    OutsideTriggers(Watch(), shared, 0).tell(8, ["file \udc80"])
    assert (8, "rank 0: file \\udc80") in other.asked_by_others()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_requests_are_read_and_written_in_a_plain_file_only(tmp_path: Path, kind: str) -> None:
    shared, target = tmp_path / "triggers.log", tmp_path / "other"
    one, other = (OutsideTriggers(Watch(), shared, rank) for rank in (0, 1))
    target.write_text('{"rank": 0, "step": 9, "why": "x"}\n')
    if kind == "link":
        shared.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(shared)
    else:
        shared.mkdir()
    before = target.read_bytes()
    one.tell(7, ["x"])
    other._read = -1  # whatever size it says
    assert other.asked_by_others() == [] and target.read_bytes() == before
