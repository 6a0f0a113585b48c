"""`glass export` of a document that `--json` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from glassengine.cli.main import main


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(4)}, "one.pt")
    torch.save({"a": torch.zeros(4)}, "two.pt")
    assert main(["compare", "one.pt", "two.pt", "--json", "r.json", "-q"]) == 1
    capsys.readouterr()
    return "r.json"


@pytest.mark.parametrize("to", ["perfetto", "model-explorer"])
def test_a_document_is_written_and_replaced(to: str, result: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["export", result, "--to", to, "-o", "out.json"]) == 0
        assert capsys.readouterr().out == "wrote out.json\n"
    assert "a" in json.dumps(json.loads(Path("out.json").read_text()))
    assert main(["export", result, "--to", to, "-o", "one.pt"]) == 2
    assert "--output replaces only what glass itself wrote" in capsys.readouterr().err


def test_tensorboard_is_a_directory(result: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    assert main(["export", result, "--to", "tensorboard", "-o", "board/run"]) == 0
    assert len(list(Path("board/run").glob("events.out.tfevents.*"))) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    "words",
    [["--to", "onnx"], ["--to", "perfetto", "--model", "m.onnx"], ["--to", "perfetto", "--names", "m"], ["--to", "x"]],
)
def test_options_that_exclude_each_other_are_refused(
    words: list[str], result: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", result, *words, "-o", "out"]) == 2
    assert not Path("out").exists() and capsys.readouterr().err.startswith("error: ")
