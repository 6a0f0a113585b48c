"""`--format agent` and `--sarif` on the commands that compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.cli.main import main


@pytest.fixture
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(4)}, "one.pt")
    torch.save({"a": torch.tensor([1.0, 1.0, 2.0, 1.0])}, "two.pt")
    return tmp_path


def log(path: Path) -> Any:
    return json.loads(path.read_text())["runs"][0]


def test_agent_text_takes_the_place_of_the_screen(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one.pt", "two.pt", "--format", "agent", "--sarif", "out.sarif"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("NOT OK") and "op: a; record, step 0, verdict wrong" in printed
    last = "next: glass compare one.pt two.pt --format agent --sarif out.sarif --json result.json, then glass explain"
    assert printed.splitlines()[-1] == f"{last} result.json a"
    (found,) = log(dumps / "out.sarif")["results"]
    assert found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "two.pt"
    assert main(["compare", "one.pt", "one.pt", "--sarif", "out.sarif"]) == 0
    assert log(dumps / "out.sarif")["results"] == []
    assert capsys.readouterr().out.startswith("ok")


def test_several_candidates_are_one_log(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one.pt", "one.pt", "two.pt", "--format", "agent", "--sarif", "out.sarif"]) == 1
    assert capsys.readouterr().out.startswith("1 of 2 candidates are NOT OK\n  ok: one.pt\n  NOT OK: two.pt\n")
    assert len(log(dumps / "out.sarif")["results"]) == 1


def test_an_error_leaves_no_log_of_an_earlier_run(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one.pt", "two.pt", "--sarif", "out.sarif", "-q"]) == 1
    assert main(["compare", "one.pt", "missing.pt", "--sarif", "out.sarif"]) != 0
    (invocation,) = log(dumps / "out.sarif")["invocations"]
    assert invocation["executionSuccessful"] is False
    capsys.readouterr()


def test_impossible_options_are_refused_before_work(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dumps / "mine.txt").write_text("mine")
    for words, message in (
        (["--sarif", "mine.txt"], "--sarif replaces only what glass itself wrote"),
        (["--sarif", "-"], "--sarif takes a file"),
        (["--format", "agent", "--json"], "two outputs to stdout"),
    ):
        assert main(["compare", "one.pt", "two.pt", *words]) == 2
        assert message in capsys.readouterr().err
    assert (dumps / "mine.txt").read_text() == "mine"
