"""A record of a plain module or an ONNX file is judged on the inputs that it was made with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import commands
from tests.onnx_models import onnx_text


def test_a_record_of_an_onnx_file_needs_no_inputs(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    text = "g (float[B, 4] x) => (float[B, 4] y) { t = Tanh (x) y = Exp (t) }"
    onnx.save(onnx_text(text), tmp_path / "one.onnx")
    commands.record_target(tmp_path / "one.onnx", tmp_path / "made_up")
    commands.record_target(tmp_path / "one.onnx", tmp_path / "given", inputs={"x": torch.randn(5, 4)})
    for record in ("made_up", "given"):
        result = glass.check(tmp_path / "one.onnx", candidate=tmp_path / record)
        assert result.ok and result.inputs[0].inputs[0].origin == "given"
    onnx.save(onnx_text(text.replace("Exp", "Sigmoid")), tmp_path / "other.onnx")
    assert not glass.check(tmp_path / "other.onnx", candidate=tmp_path / "given").ok


def test_a_record_of_a_module_is_judged_on_its_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    with glass.record(net, tmp_path / "run"), torch.no_grad():
        net(torch.randn(7, 4))
    assert glass.check(net, candidate=tmp_path / "run").ok
    with torch.no_grad():
        net[0].weight.mul_(1.01)
    assert not glass.check(net, candidate=tmp_path / "run").ok
