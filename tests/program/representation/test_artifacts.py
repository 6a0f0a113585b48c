"""Artifacts of two builds, compared: stages, settings, files, and damaged ones."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import glassengine as glass
from glassengine import commands
from glassengine.errors import CorruptError, UsageError
from glassengine.program.representation.artifacts import read_manifest
from glassengine.report.terminal_without_tensors import side_by_side
from glassengine.results.backends import ArtifactComparison

PASSES = """
import torch
def scale(gm):
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, {factor}))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
def swap(gm):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
        node.target = torch.ops.aten.sigmoid.default
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(torch.relu(self.fc(x))))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return name -> artifacts of builds of one model; they differ in passes, outputs and options."""
    where = tmp_path_factory.mktemp("builds")
    for factor in (2.0, 3.0):
        folder = where / str(factor)
        folder.mkdir()
        (folder / "mine.py").write_text(PASSES.replace("{factor}", str(factor)))
    two, three = where / "2.0" / "mine.py", where / "3.0" / "mine.py"
    builds: dict[str, dict[str, Any]] = {
        "plain": {},
        "again": {},
        "swap": {"passes": [f"{two}:swap"]},
        "scale, swap": {"passes": [f"{two}:scale", f"{two}:swap"]},
        "other scale, swap": {"passes": [f"{three}:scale", f"{two}:swap"]},
        "outputs": {"add_output": ["relu"]},
    }
    for name, options in builds.items():
        torch.manual_seed(0)
        inputs = {"x": torch.ones(2, 4)}
        glass.build(
            Model(), where / f"engine {name}", backend="eager", inputs=inputs, artifacts=where / name, **options
        )
    return {name: where / name for name in builds}


def statuses(result: ArtifactComparison) -> dict[str, str]:
    return {stage.name: stage.status for stage in result.stages}


def test_two_builds_of_the_same(artifacts: dict[str, Path]) -> None:
    result = commands.compare_artifacts(artifacts["plain"], artifacts["again"])
    assert result.ok and result.differences == () and result.files == ()
    assert set(statuses(result).values()) == {"identical"}
    assert result.to_dict()["stages"][0] == {"name": "exported", "status": "identical", "changes": []}


def test_builds_that_differ_in_one_pass_show_exactly_that_pass(artifacts: dict[str, Path]) -> None:
    result = commands.compare_artifacts(artifacts["swap"], artifacts["scale, swap"])
    assert not result.ok
    assert statuses(result) == {
        "exported": "identical", "functional": "identical", "pass-scale": "candidate only", "pass-swap": "inherited",
        "outputs": "inherited",
    }  # fmt: skip
    (changed,) = [stage for stage in result.stages if stage.changes]
    assert changed.name == "pass-scale"
    assert [change.kind for change in changed.changes] == ["added", "changed"]
    assert "aten.mul.Tensor(%relu, 2.0)" in str(changed.changes[0].candidate)
    assert result.differences == ()


def test_pass_of_one_name_that_does_something_else(artifacts: dict[str, Path]) -> None:
    result = commands.compare_artifacts(artifacts["scale, swap"], artifacts["other scale, swap"])
    assert [name for name, status in statuses(result).items() if status not in ("identical", "inherited")] == [
        "pass-scale"
    ]
    (changed,) = [stage for stage in result.stages if stage.changes]
    assert [("2.0" in str(c.baseline), "3.0" in str(c.candidate)) for c in changed.changes] == [(True, True)]


def test_two_sides_in_either_order(artifacts: dict[str, Path]) -> None:
    result = commands.compare_artifacts(artifacts["scale, swap"], artifacts["plain"])
    assert statuses(result)["pass-scale"] == statuses(result)["pass-swap"] == "baseline only"


def test_options_that_differ(artifacts: dict[str, Path]) -> None:
    result = commands.compare_artifacts(artifacts["plain"], artifacts["outputs"])
    assert [(entry.name, entry.baseline, entry.candidate) for entry in result.differences] == [
        ("options.add_output", [], ["relu"])
    ]
    assert statuses(result)["outputs"] == "different"


def test_versions_that_differ(artifacts: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifacts["plain"], tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    manifest["files"]["plugin.txt"]["sha256"] = "0"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = commands.compare_artifacts(artifacts["plain"], copy)
    assert not result.ok and set(statuses(result).values()) == {"identical"}
    assert [entry.name for entry in result.differences] == ["versions.torch"]
    assert result.files == ("plugin.txt",)


def test_unfinished_build_is_compared_and_said(artifacts: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifacts["plain"], tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest |= {"complete": False, "failure": "BackendError: no", "stages": manifest["stages"][:2]}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = commands.compare_artifacts(artifacts["plain"], copy)
    assert not result.ok and "BackendError: no" in result.notes[0]
    assert statuses(result)["outputs"] == "baseline only"
    (copy / "manifest.json").write_text(json.dumps({**manifest, "stages": []}))
    with pytest.raises(UsageError, match="no stages"):
        commands.compare_artifacts(copy, copy)


def test_terminal(artifacts: dict[str, Path]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(side_by_side(commands.compare_artifacts(artifacts["swap"], artifacts["scale, swap"])))
    text = console.export_text()
    assert text.startswith("NOT OK: Different: first in stage pass-scale, candidate only")
    assert "+ mul_tensor: float32[2, 4]" in text and "Files: Files of the back-end that differ." in text


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"}, {"schema_version": 99}, {"files": {"../secret": {}}}, {"files": []}, {"stages": [{}]},
        {"stages": [{"name": "x", "directory": "/etc"}]}, {"stages": [{"name": 1, "directory": "x"}]}, {"options": 3},
    ],
)  # fmt: skip
def test_damaged_manifest(artifacts: dict[str, Path], tmp_path: Path, change: dict[str, Any]) -> None:
    manifest = json.loads((artifacts["plain"] / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_missing_listing(artifacts: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifacts["plain"], tmp_path / "copy"))
    (copy / "01-functional" / "graph.json").unlink()
    with pytest.raises(CorruptError, match=r"graph\.json"):
        commands.compare_artifacts(artifacts["plain"], copy)
