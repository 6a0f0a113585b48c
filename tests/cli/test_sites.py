"""`glass sites` of a model, an engine and a recording."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.cli.main import main


def sites(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[list[str]]:
    """Return the lines of the table, split at two blanks."""
    assert main(["sites", *map(str, arguments)]) == 0
    return [[cell.strip() for cell in line.split("  ") if cell] for line in capsys.readouterr().out.splitlines()]


def test_table_of_a_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    header, *rows = sites(capsys, checkpoint)
    assert time.monotonic() - start < 30, "seconds, also on a loaded machine"
    assert header == ["site", "op", "dtype", "shape", "aliases"]
    by_name = {row[0]: row for row in rows}
    assert by_name["model.layers.0.self_attn.q_proj/linear.0"][1:] == [
        "linear", "float32", "[batch, sequence, 64]", "linear mm_default",
    ]  # fmt: skip
    assert any("gpt_attention_plugin" in row[-1] for row in rows)


def test_sites_of_a_pattern_are_listed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", str(checkpoint), "layers.*.mlp"]) == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()[1:]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert "2 sites match 'layers.*.mlp'" in captured.err


def test_quiet(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", str(checkpoint), "layers.*.mlp", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_engine_has_the_sites_of_its_model(
    checkpoint: Path, engine_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sites(capsys, engine_directory) == sites(capsys, checkpoint)


def test_json(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", str(engine_directory), "mm_default", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["pattern"]) == (1, "mm_default")
    assert [site["node"] for site in document["sites"]] == ["linear"]


def test_recording(engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    glass.load(engine_directory).generate(input_ids=[[5, 6]], max_new_tokens=2, record=tmp_path / "r")
    rows = sites(capsys, tmp_path / "r", "mlp")
    assert [row[0] for row in rows] == ["site", "model.layers.0.mlp", "model.layers.1.mlp"]


@pytest.mark.parametrize("target", ["model", "engine", "recording"])
def test_unknown_name(
    checkpoint: Path, engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    glass.load(engine_directory).generate(input_ids=[[5, 6]], max_new_tokens=1, record=tmp_path / "r")
    path = {"model": checkpoint, "engine": engine_directory, "recording": tmp_path / "r"}[target]
    assert main(["sites", str(path), "layers.7.mlp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "nearest: model.layers.0.mlp" in captured.err


def test_unknown_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", str(tmp_path / "nothing")]) == 2
    assert "unknown model" in capsys.readouterr().err
