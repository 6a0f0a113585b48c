"""`glass show` of what `glass.record` wrote: the tree, filters, values, what was left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine
from glassengine.cli.main import main
from glassengine.recording.layout import layout
from glassengine.recording.layout.records import frame
from glassengine.recording.write.writer import RecordingWriter


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
    light = "step 1, rank 0, block.0: float32[1, 2] without values, min -, max -, norm 0, 2 not finite"
    assert show("block.0").splitlines()[-1] == f"{light}: values were not asked for"
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

    monkeypatch.setattr("glassengine.recording.layout.tensors.summarize", planted)
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


def test_dumps_of_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"fc": torch.tensor([[1.0, 3.0]])}, "epoch": "3"}, tmp_path / "dump.pt")
    assert main(["show", str(tmp_path / "dump.pt")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [":out", "float32[1,2]", "1", "2", "3", "1.414", "0", "0"] in lines
    assert any(line[-3:] == ["a", "tensor:", "str"] for line in lines)
    assert main(["show", str(tmp_path / "dump.pt"), "fc", "--values"]) == 0
    assert "tensor([[1., 3.]])" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "dump.pt"), "nothing"]) == 2
    assert "model.fc" in capsys.readouterr().err


def test_all_ranks_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        with RecordingWriter(tmp_path / f"rank{rank}", metadata={}) as writer:
            writer.write("fc", 0, torch.tensor([float(rank)]), rank=rank)
            light = layout.LightStatistics(-1.0, 7.0 + rank, 9.0, 0)
            writer.leave_out(layout.LeftOut("fc2", 0, rank, "values were not asked for", "float32", (2,), light))
            writer.commit(0)
    assert main(["show", str(tmp_path), "fc", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] and [(item["rank"], item["max"]) for item in document["tensors"]] == [
        (0, 0.0),
        (1, 1.0),
    ]
    assert main(["show", str(tmp_path), "--rank", "1"]) == 0
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert [":out", "float32[2]", "-1", "-"] in lines and ["step", "0,", "rank", "1"] in lines


def test_a_directory_of_several_recordings_says_so(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(recording, tmp_path / "Net")
    assert main(["show", str(tmp_path)]) == 0  # the only one
    shutil.copytree(recording, tmp_path / "Other")
    assert main(["show", str(tmp_path)]) == 2
    assert f"one of the recordings in it: {tmp_path / 'Net'}" in " ".join(capsys.readouterr().err.split())


def test_names_do_not_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "fc:out.\x1b[2J\u202e\udc80\n"
    with RecordingWriter(tmp_path / "r", metadata={"modules": {"fc": "\x1b]0;x\x07"}}) as writer:
        writer.write(name, 0, torch.ones(1))
        writer.leave_out(layout.LeftOut(name + "2", 0, 0, "first\nsecond \x1b[1m"))
        writer.commit(0)
    for flags in ([], ["*"], ["*", "--values"]):
        assert main(["show", str(tmp_path / "r"), *flags]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and "\u202e" not in shown and "\\x1b[2J\\u202e\\udc80\\n" in shown


def test_f41_statistics_of_a_recording_without_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = torch.nn.Linear(2, 2).requires_grad_(False)
    with glassengine.record(net, tmp_path / "r", values=False):
        net(torch.tensor([3.0, -4.0]))
    assert main(["show", str(tmp_path / "r"), ".:in[0]"]) == 0
    assert "float32[2] without values, min -4, max 3, norm 5: " in capsys.readouterr().out
