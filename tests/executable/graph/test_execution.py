"""Who may look at an execution, and what they see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glassengine.executable.graph.execution import Execution, attach, detach, observers
from glassengine.executable.run.executable import Executable


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, list[str], list[str]]] = []

    def note(self, what: str, execution: Execution) -> None:
        self.seen.append((what, execution.number, list(execution.inputs), list(execution.outputs)))

    def before(self, execution: Execution) -> None:
        self.note("before", execution)

    def after(self, execution: Execution) -> None:
        self.note("after", execution)

    def failed(self, execution: Execution, error: BaseException) -> None:
        self.note(f"failed {error}", execution)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    attach(watcher)
    yield watcher
    detach(watcher)
    assert not observers()


def add(arguments: list[Any]) -> list[Any]:
    total = arguments[0] + arguments[1]
    arguments.clear()
    return [total, None]


def test_inputs_and_outputs_are_seen_by_name_though_the_list_is_emptied(watcher: Watcher) -> None:
    executable = Executable("sum", add, ("a", "b"), ("total", "none"))
    for _ in range(2):
        arguments = [torch.ones(2), torch.ones(2)]
        assert torch.equal(executable.run(arguments)[0], torch.full((2,), 2.0)) and arguments == []
    names = ["a", "b"]
    assert watcher.seen == [
        (what, number, names, ["total", "none"] if what == "after" else [])
        for number in (0, 1)
        for what in ("before", "after")
    ]


def test_an_error_of_the_users_graph_is_raised_as_it_is_with_a_note(watcher: Watcher) -> None:
    executable = Executable("sum", add, ("a", "b"), ("total", "none"))
    with pytest.raises(RuntimeError, match="must match") as caught:
        executable.run([torch.ones(2), torch.ones(3)])
    assert caught.value.__notes__ == ["in executable 'sum', execution 0"]
    assert [what.split()[0] for what, *_ in watcher.seen] == ["before", "failed"]
    assert executable.num_executions == 0


def test_errors_of_an_observer_reach_the_caller(watcher: Watcher) -> None:
    class Stop(Watcher):
        def after(self, execution: Execution) -> None:
            raise FloatingPointError("not a number")

    stop = Stop()
    attach(stop)
    try:
        with pytest.raises(FloatingPointError):
            Executable("sum", add, ("a", "b"), ("total", "none")).run([torch.ones(2), torch.ones(2)])
    finally:
        detach(stop)


def test_an_error_of_one_observer_does_not_block_the_others(watcher: Watcher) -> None:
    class Refusing(Watcher):
        def after(self, execution: Execution) -> None:
            raise ValueError("after")

    class Interrupted(Watcher):
        def before(self, execution: Execution) -> None:
            raise KeyboardInterrupt

    executable = Executable("sum", add, ("a", "b"), ("total", "none"))
    for refusing, error, expected in (
        (Refusing(), ValueError, ["before", "after"]),
        (Interrupted(), KeyboardInterrupt, ["before", "failed "]),
    ):
        attach(refusing)
        try:
            with pytest.raises(error):
                executable.run([torch.ones(2), torch.ones(2)])
        finally:
            detach(refusing)
        assert [what for what, *_ in watcher.seen] == expected
        watcher.seen.clear()
