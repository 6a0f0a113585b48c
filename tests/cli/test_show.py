"""`glass show` of what `glass.record` wrote: the tree, filters, values, what was left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine
from glassengine.cli.main import main
from glassengine.recording import layout
from glassengine.recording.records import frame
from glassengine.recording.writer import RecordingWriter


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return glassengine.tap("scaled", self.block(x) * 0 + x)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("show") / "r"
    with glassengine.record(Model(), path, values=["block", ".", ".:in[0]"]) as recorder:
        recorder.model(torch.tensor([[1.0, 2.0]]))
        recorder.model(torch.tensor([[1.0, float("nan")]]))
    return path


@pytest.fixture
def show(recording: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert main(["show", str(recording), *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_tree(show: Callable[..., str]) -> None:
    lines = [line.split() for line in show().splitlines()]
    assert lines[0] == ["step", "0"]
    assert [line[0] for line in lines[3:]] == [
        ".", ":in[0]", ".scaled", ":out", "block", ":in[0]", ":out", "0", ":in[0]", ":out", "1", ":in[0]", ":out",
    ]  # fmt: skip
    assert lines[3] == [".", "Model"] and lines[4] == [":in[0]", "float32[1,2]", "1", "1.5", "2", "0.7071", "0", "0"]
    light = [".scaled", "float32[1,2]", "1", "-", "2", "-", "0", "-"]
    assert lines[5][:8] == light and lines[5][8:] == ["values", "were", "not", "asked", "for"]


def test_filters(show: Callable[..., str], recording: Path) -> None:
    assert "block" not in show("--nonfinite", "--step", "0")
    shown = show("--step", "1", "--nonfinite")
    assert "block" in shown and "1 not finite" in shown and "step 1" in shown
    assert len(show("block").splitlines()) == 4
    assert show("block.0").splitlines()[-1] == "step 1, rank 0, block.0: not recorded: values were not asked for"
    assert main(["show", str(recording), "--step", "2"]) == main(["show", str(recording), "nothing"]) == 2


def test_values(show: Callable[..., str]) -> None:
    assert show(".:in[0]", "--values", "--step", "1") == "step 1, rank 0, .:in[0]: float32[1,2]\ntensor([[1., nan]])\n"


def test_large_values_are_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Identity()
    with glassengine.record(model, tmp_path / "r"):
        model(torch.arange(2000))
    for flag, ends in (("--values", False), ("--full", True)):
        assert main(["show", str(tmp_path / "r"), ".", flag]) == 0
        shown = capsys.readouterr().out
        assert ("..." not in shown) is ends and ("1000" in shown) is ends
    assert torch._tensor_str.PRINT_OPTS.threshold == 1000


def test_json(show: Callable[..., str]) -> None:
    document = json.loads(show("--json"))
    assert len(document["tensors"]) == 6 and len(document["left_out"]) == 12 and document["complete"]
    assert document["left_out"][0]["reason"] == "values were not asked for"


def test_statistics_are_kept_for_the_next_time(
    recording: Path, show: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = show("--json")
    assert (recording / layout.STATISTICS).stat().st_size > 0

    def planted(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("glassengine.recording.reader.summarize", planted)
    assert show("--json") == first
    damaged = bytearray((recording / layout.STATISTICS).read_bytes())
    damaged[20] ^= 1
    (recording / layout.STATISTICS).write_bytes(damaged)
    monkeypatch.undo()
    assert show("--json") == first


@pytest.mark.parametrize("payload", [{}, {"key": 5}, {"key": [[], 0, 0, ""]}, {"key": [0, 0, 0, ""], "shape": 1}])
def test_hostile_statistics_are_computed_again(
    recording: Path, show: Callable[..., str], payload: dict[str, object]
) -> None:
    (recording / layout.STATISTICS).write_bytes(frame(payload))
    assert len(json.loads(show("--json"))["tensors"]) == 6


def test_statistics_of_a_directory_that_cannot_be_written(recording: Path, show: Callable[..., str]) -> None:
    (recording / layout.STATISTICS).unlink(missing_ok=True)
    (recording / layout.STATISTICS).mkdir()
    try:
        assert len(json.loads(show("--json"))["tensors"]) == 6
    finally:
        (recording / layout.STATISTICS).rmdir()


def test_modules_that_were_not_seen_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unseen = {"a": "runs inside of compiled code: that of .", "b": "runs inside of compiled code: that of ."}
    with RecordingWriter(tmp_path / "r", metadata={"not_seen": unseen}) as writer:
        writer.write(".", 0, torch.ones(2))
        writer.commit(0)
    assert main(["show", str(tmp_path / "r")]) == 0
    assert "2 modules not seen: runs inside of compiled code: that of ." in capsys.readouterr().out
