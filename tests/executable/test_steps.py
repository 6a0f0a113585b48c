"""Steps: what a closure sees, what becomes of its errors, and what is left at the end of the program."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import glassengine as glass
from glassengine import spans
from glassengine.errors import UsageError
from glassengine.executable import steps
from tests import children


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_steps", steps._Steps())
    glass.metrics.reset()


def test_steps_are_counted() -> None:
    assert glass.compat.current_step() == 0
    for number in range(1, 4):
        glass.compat.mark_step()
        assert glass.compat.current_step() == number
    assert glass.metrics.current().counters == {"MarkStep": 3}


def test_closures_run_once_at_the_end_of_their_step_in_order() -> None:
    seen: list[tuple[str, int]] = []

    def note(name: str) -> None:
        seen.append((name, glass.compat.current_step()))

    glass.compat.add_step_closure(note, args=("a",))
    glass.compat.add_step_closure(note, ("b",))
    assert seen == []
    glass.compat.mark_step()
    assert seen == [("a", 0), ("b", 0)]
    glass.compat.mark_step()
    assert len(seen) == 2


def test_a_closure_added_by_a_closure_belongs_to_the_next_step() -> None:
    seen: list[int] = []
    glass.compat.add_step_closure(
        lambda: glass.compat.add_step_closure(lambda: seen.append(glass.compat.current_step()))
    )
    glass.compat.mark_step()
    assert seen == []
    glass.compat.mark_step()
    assert seen == [1]


def test_an_asynchronous_closure_runs_beside_and_sees_the_values_of_its_step() -> None:
    go = threading.Event()
    seen: list[tuple[float, str]] = []

    def note(given: dict[str, torch.Tensor]) -> None:
        assert go.wait(10)
        seen.append((given["loss"].item(), threading.current_thread().name))

    loss = torch.tensor(1.0, requires_grad=True)
    glass.compat.add_step_closure(note, ({"loss": loss},), run_async=True)
    glass.compat.mark_step()
    with torch.no_grad():
        loss.fill_(2.0)
    assert seen == []
    go.set()
    steps._steps.waiting.join()
    assert seen == [(1.0, "glass-step-closures")]


def fail(text: str) -> None:
    raise ValueError(text)


def test_an_error_comes_out_of_mark_step_after_all_closures_and_the_count() -> None:
    seen: list[int] = []
    glass.compat.add_step_closure(fail, ("first",))
    glass.compat.add_step_closure(lambda: seen.append(1))
    with pytest.raises(ValueError, match="first") as error:
        glass.compat.mark_step()
    assert error.value.__notes__ == ["in the step closure fail, added in step 0"]
    assert (seen, glass.compat.current_step()) == ([1], 1)
    glass.compat.mark_step()


def test_asynchronous_errors_come_out_of_the_next_step() -> None:
    go = threading.Event()

    def fail_later(text: str) -> None:
        assert go.wait(10)
        fail(text)

    glass.compat.add_step_closure(fail_later, ("late",), run_async=True)
    glass.compat.add_step_closure(fail_later, ("later",), run_async=True)
    glass.compat.mark_step()
    go.set()
    steps._steps.waiting.join()
    with pytest.raises(ExceptionGroup) as error:
        glass.compat.mark_step()
    assert [str(part) for part in error.value.exceptions] == ["late", "later"]
    assert glass.compat.current_step() == 2
    glass.compat.mark_step()


def test_an_asynchronous_closure_may_add_another() -> None:
    seen: list[int] = []
    glass.compat.add_step_closure(lambda: glass.compat.add_step_closure(lambda: seen.append(1)), run_async=True)
    glass.compat.mark_step()
    steps._steps.waiting.join()
    glass.compat.mark_step()
    assert seen == [1]


def test_a_tensor_is_no_list_of_arguments() -> None:
    with pytest.raises(UsageError, match=r"hint: args=\(tensor,\)"):
        glass.compat.add_step_closure(lambda loss: None, torch.ones(3))


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_QUEUED", 2)
    monkeypatch.setattr(steps, "_steps", steps._Steps())
    go = threading.Event()
    for _ in range(4):
        glass.compat.add_step_closure(go.wait, (10,), run_async=True)
    ended = threading.Thread(target=glass.compat.mark_step)
    ended.start()
    ended.join(0.3)
    assert ended.is_alive()  # one runs, two wait, and the step waits for a place
    go.set()
    ended.join(10)
    assert not ended.is_alive()


def test_a_listener_hears_of_the_step() -> None:
    heard: list[int] = []
    undo = spans.on_step_end(lambda: heard.append(glass.compat.current_step()))
    glass.compat.mark_step()
    undo()
    glass.compat.mark_step()
    assert heard == [1]


SCRIPT = """
import logging, os, sys, time
import glassengine as glass
logging.basicConfig(format="%(levelname)s %(message)s")
def slow(text):
    time.sleep(0.2)
    os.write(1, f"{text}\\n".encode())
def fail():
    raise ValueError("too late")
glass.compat.add_step_closure(slow, ("parent",), run_async=True)
glass.compat.add_step_closure(fail, run_async=True)
glass.compat.mark_step()
pid = os.fork()
if not pid:
    glass.compat.add_step_closure(slow, ("child",), run_async=True)
    glass.compat.mark_step()
    sys.exit()
os.waitpid(pid, 0)
glass.compat.add_step_closure(slow, ("never",))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_at_the_end_closures_are_drained_errors_said_and_what_never_ran_is_counted() -> None:
    done = children.run([sys.executable, "-c", SCRIPT], check=True, timeout=600)
    assert sorted(done.stdout.split()) == ["child", "parent"]
    assert "ERROR a step closure failed after the last step" in done.stderr and "ValueError: too late" in done.stderr
    assert "WARNING step closures that never ran, since no mark_step came after them: 1" in done.stderr


def test_marking_within_compiled_code_is_not_traced() -> None:
    @torch.compile(backend="eager")
    def train(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        glass.compat.mark_step()
        return y * 2

    for expected in (1, 2, 3):
        train(torch.ones(2))
        assert glass.compat.current_step() == expected


def test_f39_the_first_process_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert glass.compat.is_master_ordinal() and glass.compat.is_master_ordinal(local=False)
    monkeypatch.setenv("RANK", "4")
    assert not glass.compat.is_master_ordinal() and not glass.compat.is_master_ordinal(local=False)
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first on the second machine
    assert glass.compat.is_master_ordinal() and not glass.compat.is_master_ordinal(local=False)


def test_f39_the_callback_is_registered_by_the_name_of_the_document() -> None:
    before = glass.compat.register_hlo_snapshot_callback(lambda name, addressable_device_index, execution_count: "")
    assert glass.snapshots.register_callback(before)("x", 0, 0) == ""
