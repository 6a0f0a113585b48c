"""`glass compare` and `glass show` from the command line to the screen, the JSON and the exit status."""

import json
from pathlib import Path

import pytest
import torch

from glassengine.cli import options
from glassengine.cli.errors import exit_status
from glassengine.cli.main import load_command
from glassengine.recording.writer import RecordingWriter


def glass(name: str, *arguments: object) -> int:
    options.reset()
    command = load_command(name)

    def invoke() -> int:
        with command.make_context(name, [str(argument) for argument in arguments]) as context:
            status: int = command.invoke(context)
            return status

    return exit_status(invoke)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    x = torch.arange(12.0).reshape(3, 4) + 1
    torch.save({"mm": x, "ids": torch.tensor([3])}, tmp_path / "x.pt")
    torch.save({"mm": x * (1 + 1e-7), "ids": torch.tensor([3])}, tmp_path / "round.pt")
    bad = x.clone()
    bad[1, 2] = float("nan")
    torch.save({"mm": bad, "ids": torch.tensor([4])}, tmp_path / "bad.pt")
    torch.save({"mm": x}, tmp_path / "less.pt")
    torch.save({"other": x}, tmp_path / "other.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("candidate", "flags", "status"),
    [
        ("x.pt", [], 0),
        ("round.pt", [], 0),
        ("round.pt", ["--fail-on", "rounding"], 1),
        ("round.pt", ["--rtol", "0", "--atol", "0"], 1),
        ("bad.pt", [], 1),
        ("less.pt", [], 0),
        ("less.pt", ["--show-only", "ids", "--show-only", "mm"], 4),
        ("other.pt", [], 4),
        ("missing.pt", [], 2),
        ("x.pt", ["--device", "abacus"], 2),
        ("x.pt", ["--show-only", "nope"], 2),
        ("x.pt", ["--fail-on", "sometimes"], 2),
        ("x.pt", ["--transpose", "mm"], 1),
        ("x.pt", ["--floating-point-only", "--min-coverage", "1"], 0),
    ],
)
def test_exit_status(dumps: Path, candidate: str, flags: list[str], status: int) -> None:
    assert glass("compare", dumps / "x.pt", dumps / candidate, *flags) == status


def test_too_little_coverage_is_status_4(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"mm": torch.ones(3), "nn": torch.ones(3)}, dumps / "two.pt")
    torch.save({"mm": torch.ones(3)}, dumps / "one.pt")
    assert glass("compare", dumps / "two.pt", dumps / "one.pt") == 4
    assert "because coverage 50.0% is below --min-coverage 0.9" in capsys.readouterr().out


def test_the_screen_says_where_and_how_much(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    glass("compare", dumps / "x.pt", dumps / "bad.pt")
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert shown.err == ""
    assert len(lines) < 45
    assert lines[0].startswith("NOT OK  verdict wrong  2 compared: 2 wrong")
    assert "because 2 of 2 tensors are wrong" in lines[1]
    assert "first divergence: step 0, mm" in lines
    assert any("[1, 2] baseline 7, candidate nan; 1 of 12 elements" in line for line in lines)
    for row in ("x ", "y ", "abs error", "rel error"):
        assert any(line.startswith(row) for line in lines)
    for column in ("min", "mean", "median", "max", "std", "NaN", "Inf", "tensor"):
        assert column in shown.out
    assert "float32[3,4]" in shown.out
    assert lines.index(next(line for line in lines if line.startswith("wrong") and "mm" in line)) < lines.index(
        next(line for line in lines if line.startswith("wrong") and "ids" in line)
    )


def test_long_names_are_whole_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model." + "layers.0." * 20 + "[bold]mlp"
    torch.save({name: torch.ones(2)}, tmp_path / "x.pt")
    torch.save({name: torch.zeros(2)}, tmp_path / "y.pt")
    glass("compare", tmp_path / "x.pt", tmp_path / "y.pt")
    assert any(line.startswith("wrong") and name in line for line in capsys.readouterr().out.splitlines())


def test_unmatched_are_on_the_screen(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    glass("compare", dumps / "x.pt", dumps / "less.pt")
    shown = capsys.readouterr().out
    assert "not judged: 1" in shown
    assert "1 of the baseline: the candidate has no tensor of this name, step and rank: ids" in shown


def test_json(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("compare", dumps / "x.pt", dumps / "bad.pt", "--json", "-") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["first_divergence"]["site"] == "mm"
    assert document["pairs"][0]["figures"]["max_abs_diff"] == "inf"
    assert {
        "schema_version", "ok", "verdict", "first_divergence", "origins", "counts", "pairs", "skipped", "environment",
    } <= document.keys()  # fmt: skip
    assert glass("compare", dumps / "x.pt", dumps / "bad.pt", "--json", dumps / "out.json") == 1
    assert capsys.readouterr().out.startswith("NOT OK")
    assert json.loads((dumps / "out.json").read_text()) == document


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with RecordingWriter(tmp_path / "r", metadata={"seed": 1}) as w:
        for step in range(2):
            w.write("model.layers.0.mlp", step, torch.tensor([1.0, 3.0, float("inf")]))
            w.write("model.norm", step, torch.tensor([True]))
            w.commit(step)
    return tmp_path / "r"


def test_show(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("show", recording, "layers.*") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["0", "0", "model.layers.0.mlp", "float32[3]", "1", "2", "1", "3", "1.414", "0", "1"]
    assert glass("show", recording, "nothing") == 2
    assert glass("show", recording / "x") == 2


def test_show_json(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert glass("show", recording, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["steps"], document["metadata"], document["complete"]) == ([0, 1], {"seed": 1}, True)
    assert [t["site"] for t in document["tensors"]] == ["model.layers.0.mlp", "model.norm"] * 2
    assert document["tensors"][0]["num_inf"] == 1


def test_show_says_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as w:
        w.write("a", 0, torch.ones(1))
        w.commit(0)
        assert glass("show", tmp_path / "r") == 0
    assert capsys.readouterr().out.startswith("incomplete: it was never closed")
