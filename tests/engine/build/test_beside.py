"""A release engine is compiled in another process while this one compiles the engine with debug outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine import environment
from glassengine.backends.eager import EagerBackend
from glassengine.engine.build import beside
from glassengine.engine.build.build import build_program
from glassengine.engine.build.write import Made
from glassengine.program import Program, export_program, load_model
from glassengine.workers import Died
from glassengine.workers.protocol import InProcess


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compilers be slow, processors two, and this process a command."""
    monkeypatch.setattr(EagerBackend, "capabilities", replace(EagerBackend.capabilities, compiles_slowly=True))
    monkeypatch.setattr(environment, "num_cpus", lambda: 2)
    monkeypatch.setattr(environment, "owns_process", lambda: True)


@pytest.fixture
def program() -> Program:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    return export_program(load_model(module), inputs={"input": torch.randn(4, 8)})


def built(program: Program, folder: Path, workers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build, and return the engine and what was compiled in this process."""
    monkeypatch.setattr(beside, "Processes", workers)
    here: list[Path] = []
    build = EagerBackend.build
    monkeypatch.setattr(EagerBackend, "build", lambda *given: (here.append(given[-1]), build(*given))[1])
    with beside.compiled_beside(program, "eager") as compiled:
        assert compiled is not None
        return build_program(program, folder / "release", backend="eager", made=Made(compiled)), here


def in_process(function: Callable[[Any], Any], count: int) -> InProcess:
    return InProcess(function)


class _Dead(InProcess):
    def run(self, requests: Any, *, attempts: int = 1) -> Iterator[Any]:
        yield Died("killed by SIGKILL")


@pytest.mark.parametrize("workers", [in_process, pytest.param(beside.Processes, marks=pytest.mark.slow)])
def test_the_engine_is_the_one_that_is_built_here(
    slow: None, program: Program, workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, here = built(program, tmp_path, workers, monkeypatch)
    assert all("glassengine-beside-" in str(path) for path in here)
    x = torch.randn(4, 8)
    alone = build_program(program, tmp_path / "alone", backend="eager")
    ours, theirs = (next(iter(one.forward(inputs={"input": x}).outputs.values())) for one in (engine, alone))
    assert torch.equal(ours, theirs)
    assert engine.manifest.added_outputs == ()


def test_where_the_other_process_dies_this_one_compiles(
    slow: None, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, here = built(program, tmp_path, lambda function, count: _Dead(function), monkeypatch)
    assert len(here) == 1 and engine.forward(inputs={"input": torch.randn(4, 8)}).outputs


def test_only_a_command_on_several_processors_starts_another_process(
    slow: None, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts() -> bool:
        with beside.compiled_beside(program, "eager") as compiled:
            return compiled is not None

    monkeypatch.setattr(beside, "Processes", lambda function, count: _Dead(function))
    assert starts()
    with monkeypatch.context() as one:
        one.setattr(environment, "num_cpus", lambda: 1)
        assert not starts()
    with monkeypatch.context() as one:
        one.setattr(environment, "owns_process", lambda: False)
        assert not starts()
    monkeypatch.setattr(beside, "_MOST_BYTES", 8)
    assert not starts()
