"""LSTM, GRU, RNN and Scan: values as ONNX Runtime has them, and judged by what rounding does to their cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.capture.observers import run_program
from glassengine.program.loading.stored import onnx_program
from glassengine.program.onnx.file import OnnxFile
from glassengine.program.onnx.function import Composite
from tests.onnx_models import onnx_text

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

STEPS, BATCH, WIDTH, SIZE = 7, 3, 4, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FORMS: list[dict[str, Any]] = [
    {},
    {"direction": "reverse", "lengths": True},
    {"direction": "bidirectional"},
    {"direction": "bidirectional", "lengths": True, "plain": True},
    {"clip": 0.5},
]


def recurrence(kind: str, *, lengths: bool = False, plain: bool = False, peephole: bool = False, **options: Any) -> Any:
    generator = np.random.default_rng(0)
    directions = 2 if options.get("direction") == "bidirectional" else 1

    def made(*shape: int) -> Any:
        return generator.standard_normal(shape).astype(np.float32)

    gates = GATES[kind] * SIZE
    weights = {"w": made(directions, gates, WIDTH), "r": made(directions, gates, SIZE)}
    weights |= {} if plain else {"b": made(directions, 2 * gates), "h": made(directions, BATCH, SIZE)}
    weights |= {"l": np.array([7, 3, 5], np.int32)} if lengths else {}
    weights |= {"c": made(directions, BATCH, SIZE)} if kind == "LSTM" and not plain else {}
    weights |= {"p": made(directions, 3 * SIZE)} if peephole else {}
    names = ["x", "w", "r", "b", "l", "h", *(["c", "p"] if kind == "LSTM" else [])]
    read = [name if name == "x" or name in weights else "" for name in names]
    while not read[-1]:
        read.pop()
    made_of = ["y", "last", *(["cell"] if kind == "LSTM" else [])]
    node = onnx.helper.make_node(kind, read, made_of, hidden_size=SIZE, **options)
    ends = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", (STEPS, BATCH, WIDTH)),)]
    results = [onnx.helper.make_tensor_value_info(name, 1, None) for name in made_of]
    held = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = onnx.helper.make_graph([node], "g", ends, results, held)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def agrees(model: Any, feeds: dict[str, Any]) -> None:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    program = onnx_program(OnnxFile(Path("model.onnx"), model))
    assert any(isinstance(node.target, Composite) for node in program.graph.nodes)
    found = run_program(program, {name: torch.from_numpy(value) for name, value in feeds.items()})
    for output, value in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        torch.testing.assert_close(found[output.name], torch.from_numpy(value), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_are_those_of_onnx_runtime(kind: str, form: dict[str, Any]) -> None:
    x = np.random.default_rng(1).standard_normal((STEPS, BATCH, WIDTH)).astype(np.float32)
    agrees(recurrence(kind, **form), {"x": x})


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("LSTM", {"peephole": True}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"activations": ["HardSigmoid", "Relu", "Softsign"], "activation_alpha": [0.3]}),
        ("GRU", {"linear_before_reset": 1}),
    ],
)
def test_forms_that_are_rare(kind: str, form: dict[str, Any]) -> None:
    x = np.random.default_rng(1).standard_normal((STEPS, BATCH, WIDTH)).astype(np.float32)
    agrees(recurrence(kind, **form), {"x": x})


SCAN = """g (float[4] start, float[6, 4] x) => (float[4] last, float[6, 4] all) {
    last, all = Scan <num_scan_inputs = 1, scan_input_directions = [1], body = body (float[4] s, float[4] e)
        => (float[4] next, float[4] out) { t = Add (s, e) next = Tanh (t) out = Identity (next) }> (start, x) }"""


def test_a_scan() -> None:
    generator = np.random.default_rng(1)
    feeds = {"start": generator.standard_normal(4), "x": generator.standard_normal((6, 4))}
    agrees(onnx_text(SCAN), {name: value.astype(np.float32) for name, value in feeds.items()})


@pytest.mark.parametrize(
    "kind", [kind if kind == "LSTM" else pytest.param(kind, marks=pytest.mark.slow) for kind in GATES]
)
def test_recurrences_are_judged(tmp_path: Path, kind: str) -> None:
    model = recurrence(kind)
    onnx.save(model, tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok and result.coverage == 1.0
    tensor = next(one for one in model.graph.initializer if one.name == "r")
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[0, 0, 0] *= 1.001
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, "r"))
    onnx.save(model, tmp_path / "other.onnx")
    engine = glass.build(tmp_path / "other.onnx", tmp_path / "engine")
    assert not glass.check(tmp_path / "one.onnx", candidate=engine.directory).ok
