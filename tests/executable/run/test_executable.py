"""The one place where graphs are compiled and run: what it counts, and how it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.errors import BackendError, UsageError
from glassengine.executable.compilation import compilations
from glassengine.executable.run.executable import Executable, compile_executable, load_executable

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
    executable.function = fail
    with pytest.raises(BackendError, match=r"'tiny/main' failed in execution 1\n.*RuntimeError: segment") as error:
        executable.run(X)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert "x: float32[2,3]@cpu" in str(error.value)
    assert executable.num_executions == 1  # completed ones only


class Elsewhere:
    """What an executable sees of a tensor on an accelerator."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.dtype, self.shape = torch.bfloat16, (1, 17)


def on(*devices: str) -> Any:
    return {f"x{index}": Elsewhere(device) for index, device in enumerate(devices)}


def test_synchronous_waits_for_each_accelerator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append(str(device)))
    executable = Executable("tiny/main", lambda inputs: {})
    executable.run(on("cuda:0"))
    assert waited == []
    executable.synchronous = True
    executable.run(on("cuda:0", "cpu", "cuda:1", "cuda:0"))
    assert waited == ["cuda:0", "cuda:1"]
    executable.run(X)
    assert waited == ["cuda:0", "cuda:1"]


def test_an_error_that_comes_late_names_its_own_execution_when_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    # Planted: the device reports what went wrong when it is waited for, as accelerators do.
    pending: list[str] = []

    def wait(device: torch.device) -> None:
        if pending:
            raise RuntimeError(pending.pop())

    def launch(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if pending:
            raise RuntimeError(pending.pop())
        if executable.num_executions == 1:
            pending.append("device-side assert triggered")
        return {}

    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    executable = Executable("tiny/main", launch)
    executable.run(on("cuda:0"))
    executable.run(on("cuda:0"))
    with pytest.raises(BackendError, match=r"failed in execution 2, or one before it\n.*device-side") as late:
        executable.run(on("cuda:0"))
    assert "GLASS_SYNCHRONOUS=1" in str(late.value) and "bfloat16[1,17]@cuda:0" in str(late.value)
    executable = Executable("tiny/main", launch, synchronous=True)
    executable.run(on("cuda:0"))
    with pytest.raises(BackendError, match=r"'tiny/main' failed in execution 1\n.*device-side") as exact:
        executable.run(on("cuda:0"))
    assert "GLASS_SYNCHRONOUS" not in str(exact.value)


@pytest.mark.parametrize(
    ("name", "value", "synchronous"),
    [
        ("GLASS_SYNCHRONOUS", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("GLASS_SYNCHRONOUS", "0", False),
        ("CUDA_LAUNCH_BLOCKING", "", False),
    ],
)
def test_synchronous_by_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, synchronous: bool) -> None:
    for other in ("GLASS_SYNCHRONOUS", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(other, raising=False)
    assert not Executable("tiny/main", double).synchronous
    monkeypatch.setenv(name, value)
    assert Executable("tiny/main", double).synchronous is synchronous


def test_errors_that_users_can_act_on_are_passed_on() -> None:
    with pytest.raises(UsageError, match="not with these inputs"):
        Executable("tiny/main", refuse).run(X)


def test_a_compilation_is_noted(tmp_path: Path) -> None:
    before = len(compilations())
    compile_executable("tiny/main", lambda path: (path / "code").write_text("x") and None, tmp_path)
    (record,) = compilations()[before:]
    assert record.name == "tiny/main"
    assert 0 <= record.compile_s < 5
    assert record.cause.kind == "build" and not record.from_cache
    assert str(record).startswith("compiled tiny/main in 0.00 s because an engine is built")
    assert (tmp_path / "code").is_file()


def broken(path: Path) -> Executable:
    raise RuntimeError("no such instruction")


def full(path: Path) -> Executable:
    raise OSError("No space left on device")


def test_a_failed_compilation(tmp_path: Path) -> None:
    before = len(compilations())
    with pytest.raises(
        BackendError, match=r"compiling 'tiny/main' failed\n.*no such instruction\n.*--backend"
    ) as error:
        compile_executable("tiny/main", broken, tmp_path)
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(OSError, match="No space left"):
        compile_executable("tiny/main", full, tmp_path)
    assert len(compilations()) == before


def test_a_failed_load(tmp_path: Path) -> None:
    with pytest.raises(
        BackendError, match=r"loading 'tiny/main' failed\n.*no such instruction\n.*build it again"
    ) as error:
        load_executable("tiny/main", broken, tmp_path)
    assert isinstance(error.value.__cause__, RuntimeError)
    loaded = load_executable("tiny/main", lambda path: double, tmp_path)
    assert (loaded.name, loaded.num_executions) == ("tiny/main", 0)
    assert torch.equal(loaded.run(X)["y"], X["x"] * 2)
