"""ONNX files as a user runs them: results are of that session, and what optimizations cost is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import UsageError
from glassengine.program.onnx import session

DRAW = np.random.default_rng(0).standard_normal
WEIGHTS = {name: DRAW(shape).astype(np.float32) for name, shape in {"w": (8, 8), "v": (8, 4)}.items()}


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.leaky_relu(x @ torch.from_numpy(WEIGHTS["w"]), 0.3)
        return wide @ torch.from_numpy(WEIGHTS["v"])


def saved(path: Path) -> Path:
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["wide"]),
        onnx.helper.make_node("LeakyRelu", ["wide"], ["act"], alpha=0.3),
        onnx.helper.make_node("MatMul", ["act", "v"], ["y"]),
    ]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "net",
        [value("x", onnx.TensorProto.FLOAT, [2, 8])],
        [value("y", onnx.TensorProto.FLOAT, [2, 4])],
        [onnx.numpy_helper.from_array(value, name) for name, value in WEIGHTS.items()],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9), path)
    return path


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that takes another activation, in place of a kernel that saturates on some processors only."""
    real = session.start

    def start(model: Any, options: Any, *more: Any) -> Any:
        level = options.graph_optimization_level
        is_candidate = isinstance(model, str) and not model.endswith("reference.onnx")
        if is_candidate and level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL:
            changed = onnx.load(model)
            for node in changed.graph.node:
                for entry in node.attribute:
                    entry.f = entry.f * 2 if entry.name == "alpha" else entry.f
            model = changed.SerializeToString()
        return real(model, options, *more)

    monkeypatch.setattr(session, "start", start)


def quantized(folder: Path) -> tuple[Path, Path]:
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            draw = np.random.default_rng(1).standard_normal
            self.given = iter([{"x": draw((2, 8)).astype(np.float32)} for _ in range(8)])

        def get_next(self) -> Any:
            return next(self.given, None)

    source, path = saved(folder / "reference.onnx"), folder / "int8.onnx"
    options = {"reduce_range": True, "op_types_to_quantize": ["MatMul"]}
    quantization.quantize_static(str(source), str(path), Reader(), **options)
    return source, path


def given(folder: Path) -> str:
    path = folder / "x.npz"
    np.savez(path, x=np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32))
    return str(path)


def test_f53_what_optimizations_cost_a_quantized_file_counts_and_is_named(spoiled: None, tmp_path: Path) -> None:
    source, path = quantized(tmp_path)
    options: dict[str, Any] = {"candidate": path, "inputs": given(tmp_path), "min_snr": 30.0}
    result = glass.check(source, **options)
    assert not result.ok and result.standing == "results differ"
    assert str(result.not_ok_because).count("ONNX Runtime's optimizations at level 'all' cost") == 1
    assert not glass.check(source, **{**options, "min_snr": None}).ok
    plain = glass.check(source, session_options="graph_optimization_level=basic", **options)
    assert plain.ok and not any("optimizations" in note for note in plain.notes), plain.not_ok_because
    (one,), (other,) = result.results, plain.results
    assert one.snr_db is not None and other.snr_db is not None and one.snr_db < 30 < other.snr_db


def test_f53_what_optimizations_do_to_a_file_of_floats_is_named(spoiled: None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"candidate": saved(tmp_path / "floats.onnx"), "inputs": given(tmp_path)}
    result = glass.check(Net(), **options)
    assert not result.ok and result.standing == "results differ"
    assert "ONNX Runtime's optimizations at level 'all' change output" in str(result.not_ok_because)
    assert glass.check(Net(), session_options={"graph_optimization_level": "extended"}, **options).ok


@pytest.mark.parametrize("form", ["text", "file", "mapping"])
def test_f53_session_options_are_texts_files_or_mappings(form: str, tmp_path: Path) -> None:
    source, path = quantized(tmp_path)
    wanted = {"graph_optimization_level": "basic", "intra_op_num_threads": 1, "session.set_denormal_as_zero": "1"}
    (tmp_path / "options.json").write_text(json.dumps(wanted))
    told: Any = {
        "text": [f"{name}={value}" for name, value in wanted.items()],
        "file": tmp_path / "options.json",
        "mapping": wanted,
    }[form]
    assert glass.check(source, candidate=path, session_options=told).ok


@pytest.mark.parametrize("told", ["graph_optimization_level=fast", "threads=2", "basic", "intra_op_num_threads=many"])
def test_f53_an_option_that_there_is_not_is_refused(told: str, tmp_path: Path) -> None:
    source, path = quantized(tmp_path)
    with pytest.raises(UsageError):
        glass.check(source, candidate=path, session_options=told)


def test_f53_session_options_are_for_an_onnx_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="for an ONNX file"):
        glass.check(
            torch.nn.Linear(2, 2), candidate=torch.nn.Linear(2, 2), session_options="graph_optimization_level=all"
        )
    source, path = quantized(tmp_path)
    options = ["--session-options", "graph_optimization_level=disable", "-q", "--no-progress"]
    assert main(["check", str(source), "--candidate", str(path), *options]) == 0
    assert "explained by the quantization" in capsys.readouterr().out
