"""The first answer of a check that builds engines: of model and program, while another process compiles."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import environment
from glassengine.backends.eager import EagerBackend
from glassengine.cli.main import main
from glassengine.diagnose import check_ladder
from glassengine.engine.build import build
from glassengine.errors import BackendError
from glassengine.program.kinds import causal_lm
from glassengine.progress import Event, Work
from glassengine.testing import models
from glassengine.workers import Died
from glassengine.workers.protocol import InProcess


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Listener:
    """Keeps the events of a check, and lets the compiler go on once there is a first answer.

    Both are threads of one process here, where torch does not take two of them: the check waits for the compiler.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.answered, self.is_over = threading.Event(), threading.Event()
        self.compiled: list[Path] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.work is Work.FIRST_ANSWER:
            assert not self.compiled
            self.answered.set()
            assert self.is_over.wait(60)

    @property
    def answer(self) -> str:
        (text,) = [event.text for event in self.events if event.work is Work.FIRST_ANSWER]
        return text


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    """The listener of a check whose back-end compiles in another thread, and not before the first answer."""
    heard = Listener()

    class Waiting(InProcess):
        def run(self, requests: Any, *, attempts: int = 1) -> Iterator[Any]:
            (request,) = requests
            if request[0] is None:
                return
            assert heard.answered.wait(60)
            heard.compiled.append(Path(request[0]))
            try:
                yield self._function(request)
            finally:
                heard.is_over.set()

    monkeypatch.setattr(EagerBackend, "capabilities", replace(EagerBackend.capabilities, compiles_slowly=True))
    monkeypatch.setattr(environment, "num_cpus", lambda: 2)
    monkeypatch.setattr(environment, "owns_process", lambda: True)
    monkeypatch.setattr(build, "Processes", lambda function, count: Waiting(function))
    return heard


def compiling() -> list[threading.Thread]:
    """Return the threads that wait for a compiler."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("compiler-beside")]


def check(model: nn.Module, listener: Listener, **options: Any) -> glass.Comparison:
    return glass.check(model, backend="eager", progress=listener, **options)


def test_the_first_answer_comes_while_the_engine_is_compiled(listener: Listener) -> None:
    result = check(Net(), listener, inputs={"x": torch.randn(2, 8)})
    assert result.ok and [level.name for level in result.levels] == ["program", "engine", "release"]
    assert listener.answer == "first answer (inputs, step 0): the model and its program agree"
    assert len(listener.compiled) == 1 and not listener.compiled[0].exists()
    assert not compiling()


def test_the_whole_answer_is_the_same(listener: Listener, monkeypatch: pytest.MonkeyPatch, token_ids: str) -> None:
    beside = check(models.llama(), listener, inputs=token_ids, steps=1)
    monkeypatch.setattr(environment, "owns_process", lambda: False)
    alone = glass.check(models.llama(), backend="eager", inputs=token_ids, steps=1)
    assert beside.to_dict() == alone.to_dict()


def test_a_wrong_program_is_told_before_the_engine_is_built(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, token_ids: str
) -> None:
    original = causal_lm.CausalLM.forward

    def doubled(self: Any, *given: Any, position_ids: Any, **named: Any) -> Any:
        return original(self, *given, position_ids=position_ids * 2, **named)

    monkeypatch.setattr(causal_lm.CausalLM, "forward", doubled)
    result = check(models.llama(), listener, inputs=token_ids, steps=1)
    assert not result.ok and listener.compiled
    assert "the model and its program do not agree at ./mul.0: the multiplication by 2 is missing" in listener.answer


def test_what_is_not_decided_is_not_told_as_a_disagreement(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = check_ladder.findings_of
    monkeypatch.setattr(
        check_ladder, "findings_of", lambda *a, **k: replace(judged(*a, **k), left="all of it is a tie")
    )
    heard: list[Event] = []

    def progress(event: Event) -> None:
        heard.append(event)
        if event.work is Work.BUILDING_OBSERVABLE:  # there is no first answer for which the compiler waits
            listener.answered.set()
            assert listener.is_over.wait(60)

    result = glass.check(Net(), backend="eager", progress=progress, inputs={"x": torch.randn(2, 8)})
    assert result.too_little and not any(event.work is Work.FIRST_ANSWER for event in heard)


def test_a_build_that_fails_after_the_first_answer_is_told(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, program: Any, directory: Path) -> None:
        assert listener.answered.wait(60)
        raise BackendError("the compiler failed", got="planted")

    monkeypatch.setattr(EagerBackend, "build", fails)
    with pytest.raises(BackendError, match="the compiler failed"):
        check(Net(), listener, inputs={"x": torch.randn(2, 8)})
    assert listener.answer.endswith("agree") and not compiling()


def test_an_interrupt_during_the_first_answer_ends_the_compiler(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        listener.answered.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("glassengine.diagnose.check_ladder.judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(Net(), listener, inputs={"x": torch.randn(2, 8)})
    assert not compiling() and not any(path.exists() for path in listener.compiled)


def test_the_first_answer_is_on_stderr(
    listener: Listener, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(InProcess):
        def run(self, requests: Any, *, attempts: int = 1) -> Iterator[Any]:
            yield Died("killed by SIGKILL")

    monkeypatch.setattr(build, "Processes", lambda function, count: Dead(function))
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef net():\n    return torch.nn.Linear(8, 8)\n\n\n"
        "def inputs():\n    return {'input': torch.randn(2, 8)}\n"
    )
    command = ["check", f"{tmp_path}/net.py:net", "--inputs", f"{tmp_path}/net.py:inputs", "--backend", "eager"]
    assert main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    first, building = map(
        shown.err.index, ("\nfirst answer (inputs, step 0): the model and its program agree\n", "building")
    )
    assert first < building and json.loads(shown.out)["ok"]
    assert main([*command, "--quiet"]) == 0
    assert "first answer" not in "".join(capsys.readouterr())
