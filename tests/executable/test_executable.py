"""The one place where graphs are compiled and run: what it counts, and how it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from glassengine.errors import BackendError, UsageError
from glassengine.executable.executable import Executable, compile_executable, ledger, load_executable

X = {"x": torch.ones(2, 3)}


def double(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    time.sleep(0.01)
    return {"y": inputs["x"] * 2}


def fail(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    raise RuntimeError("segment of the third kind")


def refuse(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    raise UsageError("not with these inputs")


def test_runs_are_counted_and_timed() -> None:
    executable = Executable("tiny/main", double)
    for count in (1, 2, 3):
        assert torch.equal(executable.run(X)["y"], X["x"] * 2)
        assert executable.num_executions == count
    assert 0.03 <= executable.execute_s < 5


def test_a_failure_names_the_executable_and_keeps_the_original() -> None:
    executable = Executable("tiny/main", double)
    executable.run(X)
    executable.run_graph = fail
    with pytest.raises(BackendError, match=r"'tiny/main' failed in execution 1\n.*RuntimeError: segment") as error:
        executable.run(X)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert "x: torch.float32 (2, 3)" in str(error.value)
    assert executable.num_executions == 1  # completed ones only


def test_what_a_user_can_act_on_is_passed_on() -> None:
    with pytest.raises(UsageError, match="not with these inputs"):
        Executable("tiny/main", refuse).run(X)


def test_a_compilation_is_in_the_ledger(tmp_path: Path) -> None:
    before = len(ledger.compilations)
    compile_executable("tiny/main", lambda path: (path / "code").write_text("x") and None, tmp_path)
    (record,) = ledger.compilations[before:]
    assert record.name == "tiny/main"
    assert 0 <= record.compile_s < 5
    assert (tmp_path / "code").is_file()


def broken(path: Path) -> Executable:
    raise RuntimeError("no such instruction")


def full(path: Path) -> Executable:
    raise OSError("No space left on device")


def test_a_failed_compilation(tmp_path: Path) -> None:
    before = len(ledger.compilations)
    with pytest.raises(
        BackendError, match=r"compiling 'tiny/main' failed\n.*no such instruction\n.*--backend"
    ) as error:
        compile_executable("tiny/main", broken, tmp_path)
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(OSError, match="No space left"):
        compile_executable("tiny/main", full, tmp_path)
    assert len(ledger.compilations) == before


def test_a_failed_load(tmp_path: Path) -> None:
    with pytest.raises(
        BackendError, match=r"loading 'tiny/main' failed\n.*no such instruction\n.*build it again"
    ) as error:
        load_executable("tiny/main", broken, tmp_path)
    assert isinstance(error.value.__cause__, RuntimeError)
    loaded = load_executable("tiny/main", lambda path: double, tmp_path)
    assert (loaded.name, loaded.num_executions) == ("tiny/main", 0)
    assert torch.equal(loaded.run(X)["y"], X["x"] * 2)
