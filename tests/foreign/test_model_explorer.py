"""The real package of Model Explorer takes the node data that are written for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main


@pytest.mark.slow
def test_node_data_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = pytest.importorskip("model_explorer.node_data_builder", reason="ai-edge-model-explorer is not installed")
    dacite = pytest.importorskip("dacite")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
    other = torch.nn.Sequential(model[0], torch.nn.Tanh()).eval()
    torch.save({"input": torch.randn(3, 4)}, "x.pt")
    glass.build(model, "engine", inputs={"input": torch.randn(3, 4)}, backend="eager")
    result = glass.check(model, candidate=other, inputs="x.pt")
    Path("r.json").write_text(json.dumps({"schema_version": 1, **result.to_dict()}))
    assert main(["export", "r.json", "--to", "model-explorer", "--names", "engine", "-o", "nodes.json"]) == 0
    (data,) = json.loads(Path("nodes.json").read_text()).values()
    read = dacite.from_dict(builder.GraphNodeData, data, dacite.Config(check_types=True, strict=True))
    again = json.loads(builder.ModelNodeData({"main": read}).to_json_string())["main"]["results"]
    assert again.keys() == data["results"].keys() and {"relu", "linear"} <= again.keys()
