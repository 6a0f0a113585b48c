"""Calls that nest deeply, and calls that come while another one is being noted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.capture.intake import Intake
from glassengine.capture.record import record
from glassengine.recording.reader import Recording


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def nested(depth: int) -> nn.Module:
    module: nn.Module = nn.Identity()
    for _ in range(depth):
        module = Inside(module)
    return module


class Again(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Identity()

    def forward(self, x: Tensor, left: int) -> Tensor:
        return self(x, left - 1) if left else self.leaf(x)


@pytest.mark.parametrize(("module", "arguments"), [(nested(180), ()), (Again(), (180,))])
def test_s20_modules_nest_as_deep_as_without_a_recorder(
    module: nn.Module, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    limit, x = sys.getrecursionlimit(), torch.ones(1)
    module(x, *arguments)
    with record(module, tmp_path / "one"):
        with record(module, tmp_path / "two"):
            module(x, *arguments)
        module(x, *arguments)
    assert sys.getrecursionlimit() == limit
    assert [len({entry.step for entry in Recording.open(tmp_path / name).entries}) for name in ("one", "two")] == [2, 1]


def test_s20_a_limit_that_the_user_sets_stays(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    try:
        with record(nn.Identity(), tmp_path / "one"):
            sys.setrecursionlimit(limit + 7)
        assert sys.getrecursionlimit() == limit + 7
    finally:
        sys.setrecursionlimit(limit)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda call: signal.signal(signal.SIGUSR1, lambda *_: call()) and None
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_s22_a_handler_calls_the_model_while_a_call_is_noted(
    moment: int, whole: bool, on_signal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    take, taken = Intake.take, [0]

    def interrupted(self: Intake, *args: Any, **kwargs: Any) -> None:
        taken[0] += 1
        if taken[0] == moment + 1:
            signal.raise_signal(signal.SIGUSR1)
        take(self, *args, **kwargs)

    monkeypatch.setattr(Intake, "take", interrupted)
    called = model if whole else model[2]
    on_signal(lambda: called(torch.zeros(1, 2)))
    x = torch.ones(1, 2)
    with torch.no_grad(), record(model, tmp_path / "run"):
        results = [model(x), model(2 * x)]
    recording = Recording.open(tmp_path / "run")
    outputs = [recording.tensor(entry) for entry in recording.entries if entry.site.partition("@")[0] == "."]
    assert all(any(torch.equal(result, output) for output in outputs) for result in results)
    assert len(outputs) == (3 if whole else 2)
    if whole:
        assert any(torch.equal(model(torch.zeros(1, 2)), output) for output in outputs)


@pytest.mark.parametrize("kind", ["forward hook", "pre-hook"])
def test_s22_a_hook_calls_the_model_again(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inside: list[bool] = []

    def again(*_: Any) -> None:
        if not inside:
            inside.append(True)
            model(torch.zeros(1, 2))
            inside.clear()

    register = model[1].register_forward_hook if kind == "forward hook" else model[1].register_forward_pre_hook
    register(again)
    with torch.no_grad(), record(model, tmp_path / "run"):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert len({entry.step for entry in Recording.open(tmp_path / "run").entries}) == 2
