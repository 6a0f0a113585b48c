"""Operators of ONNX Runtime's own domain have references of their own, which make what the runtime makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import glassengine as glass
from glassengine.capture.observers import run_program
from glassengine.program.loading.stored import onnx_model, onnx_program
from glassengine.program.onnx.file import OnnxFile, read_onnx
from glassengine.program.onnx.function import Composite, is_of_runtime_alone
from tests.onnx_models import onnx_text

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs, outputs, name=outputs[0], domain="com.microsoft", **attributes)


def saved(path: Path, level: int = 0) -> Path:
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (24, 2, 16), dtype=np.uint8)
    weights: dict[str, Any] = {
        "table": random.integers(0, 256, (10, 24), dtype=np.uint8),
        "table_scales": random.random((10, 2)).astype(np.float32) * 0.1,
        "gain": random.random(48).astype(np.float32),
        "bias": random.random(48).astype(np.float32),
        "b": packed,
        "scales": random.random(48).astype(np.float32) * 0.1,
        "zeros": random.integers(0, 256, 24, dtype=np.uint8),
        "cos": np.cos(np.arange(16)[:, None] / np.array([1, 2, 4, 8])).astype(np.float32),
        "sin": np.sin(np.arange(16)[:, None] / np.array([1, 2, 4, 8])).astype(np.float32),
    }
    blocks = {"bits": 4, "block_size": 32, "K": 48, "N": 24}
    nodes = [
        node(
            "GatherBlockQuantized", ["table", "ids", "table_scales"], ["rows"], bits=4, block_size=32, quantize_axis=1
        ),
        node("SkipSimplifiedLayerNormalization", ["rows", "rows", "gain"], ["norm", "", "", "sum"], epsilon=1e-5),
        node("SkipLayerNormalization", ["norm", "sum", "gain", "bias"], ["norm2"], epsilon=1e-5),
        node("MatMulNBits", ["norm2", "b", "scales", "zeros"], ["wide"], accuracy_level=level, **blocks),
        node("RotaryEmbedding", ["wide", "positions", "cos", "sin"], ["turned"], num_heads=3, rotary_embedding_dim=0),
    ]
    integers = [onnx.helper.make_tensor_value_info(name, 7, ["batch", "new"]) for name in ("ids", "positions")]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        integers,
        [onnx.helper.make_tensor_value_info("turned", 1, ["batch", "new", 24])],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


INPUTS = {"ids": torch.tensor([[1, 5, 9], [2, 2, 0]]), "positions": torch.tensor([[0, 1, 2], [3, 4, 5]])}


def test_references_make_what_the_runtime_makes(tmp_path: Path) -> None:
    file = read_onnx(saved(tmp_path / "model.onnx"))
    program = onnx_program(file)
    assert not any(is_of_runtime_alone(one.target) for one in program.graph.nodes)
    expected = onnx_model(file, program).values(INPUTS)
    named = {site.node: site.name for site in program.sites if site.kind == "op"}
    found: dict[str, torch.Tensor] = {}
    run_program(program, INPUTS, lambda one, value: found.update({named[one.name]: value} if one.name in named else {}))
    assert {"rows", "norm", "sum", "norm2", "wide", "turned"} <= found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_a_product_that_rounds_its_activations_is_the_runtimes(tmp_path: Path) -> None:
    program = onnx_program(read_onnx(saved(tmp_path / "model.onnx", level=4)))
    assert sum(is_of_runtime_alone(one.target) for one in program.graph.nodes) == 1


def test_a_file_is_judged_by_them(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx")
    torch.save(INPUTS, tmp_path / "inputs.pt")
    found = glass.check(path, backend="onnxruntime", inputs=str(tmp_path / "inputs.pt"))
    assert found.ok and found.verdict == "rounding" and not found.origins
    assert max(pair.bound_ratio or 0.0 for pair in found.pairs) <= 1.0
    model = onnx.load(path)
    next(one for one in model.graph.node if one.op_type == "SkipLayerNormalization").attribute[0].f = 1e-2
    onnx.save(model, tmp_path / "changed.onnx")
    found = glass.check(path, candidate=tmp_path / "changed.onnx", inputs=str(tmp_path / "inputs.pt"))
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "norm2"


tabular_onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
GENERATOR = np.random.default_rng(0)
COEFFICIENTS = [float(value) for value in GENERATOR.standard_normal(12)]


def tabular_node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return tabular_onnx.helper.make_node(kind, inputs, outputs, domain="ai.onnx.ml", **attributes)


def model(nodes: list[Any], results: dict[str, Any]) -> Any:
    given = tabular_onnx.helper.make_tensor_value_info("x", 1, ["N", 4])
    outputs = [tabular_onnx.helper.make_value_info(name, kind) for name, kind in results.items()]
    graph = tabular_onnx.helper.make_graph(nodes, "g", [given], outputs)
    opsets = [tabular_onnx.helper.make_opsetid("", 17), tabular_onnx.helper.make_opsetid("ai.onnx.ml", 1)]
    return tabular_onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


FLOATS = tabular_onnx.helper.make_tensor_type_proto(1, ["N", 3])
LABELS = tabular_onnx.helper.make_tensor_type_proto(8, ["N"])
NUMBERS = tabular_onnx.helper.make_tensor_type_proto(7, ["N"])
DICTS = tabular_onnx.helper.make_sequence_type_proto(
    tabular_onnx.helper.make_map_type_proto(8, tabular_onnx.helper.make_tensor_type_proto(1, []))
)


def classifier(**labels: Any) -> list[Any]:
    options = {"coefficients": COEFFICIENTS, "intercepts": [0.1, -0.2, 0.3], "post_transform": "SOFTMAX", **labels}
    return [
        tabular_node("Scaler", ["x"], ["scaled"], offset=[0.1, 0.2, 0.3, 0.4], scale=[1.5, 0.5, 2.0, 1.0]),
        tabular_node("LinearClassifier", ["scaled"], ["label", "raw"], **options),
        tabular_node("Normalizer", ["raw"], ["probabilities"], norm="L1"),
    ]


def with_dicts() -> Any:
    names = ["red", "green", "blue"]
    zipped = tabular_node("ZipMap", ["probabilities"], ["dicts"], classlabels_strings=names)
    return model([*classifier(classlabels_strings=names), zipped], {"label": LABELS, "dicts": DICTS})


def with_numbers() -> Any:
    return model(classifier(classlabels_ints=[3, 5, 7]), {"label": NUMBERS, "probabilities": FLOATS})


def trees() -> Any:
    tree: dict[str, Any] = {
        "nodes_treeids": [0] * 5,
        "nodes_nodeids": list(range(5)),
        "nodes_featureids": [0, 1, 0, 0, 0],
        "nodes_values": [0.1, -0.3, 0.0, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 3, 0, 0, 0],
        "nodes_falsenodeids": [2, 4, 0, 0, 0],
    }
    leaves = {"treeids": [0] * 3, "nodeids": [2, 3, 4], "ids": [0] * 3, "weights": [0.7, -1.3, 2.1]}
    tree |= {f"target_{name}": value for name, value in leaves.items()}
    one = tabular_onnx.helper.make_tensor_type_proto(1, ["N", 1])
    return model([tabular_node("TreeEnsembleRegressor", ["x"], ["y"], n_targets=1, **tree)], {"y": one})


MAKERS: dict[str, Callable[[], Any]] = {"dicts": with_dicts, "numbers": with_numbers, "trees": trees}


def attribute(made: Any, kind: str, name: str) -> Any:
    found = next(one for one in made.graph.node if one.op_type == kind)
    return next(one for one in found.attribute if one.name == name)


@pytest.mark.parametrize("name", list(MAKERS))
def test_files_of_skl2onnx_are_judged(name: str, tmp_path: Path) -> None:
    tabular_onnx.save(MAKERS[name](), tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok and result.coverage == 1.0
    assert not any("alone says" in item.reason for item in result.skipped)
    names = {found.name for found in result.results}
    assert names == {"dicts": {"probabilities"}, "numbers": {"label", "probabilities"}, "trees": {"y"}}[name]


@pytest.mark.parametrize(
    ("name", "kind", "what", "place", "site"),
    [
        ("dicts", "Scaler", "scale", 1, "scaled"),
        ("numbers", "LinearClassifier", "coefficients", 5, "raw"),
        ("numbers", "LinearClassifier", "intercepts", 0, "raw"),
        ("trees", "TreeEnsembleRegressor", "nodes_values", 0, "y"),
        ("trees", "TreeEnsembleRegressor", "target_weights", 2, "y"),
    ],
)
def test_their_mistakes_are_found(name: str, kind: str, what: str, place: int, site: str, tmp_path: Path) -> None:
    made = MAKERS[name]()
    tabular_onnx.save(made, tmp_path / "one.onnx")
    attribute(made, kind, what).floats[place] += 0.4
    tabular_onnx.save(made, tmp_path / "other.onnx")
    result = glass.check(tmp_path / "one.onnx", candidate=tmp_path / "other.onnx")
    assert not result.ok and result.first_divergence is not None and result.first_divergence.site == site


def test_a_result_of_the_runtime_alone_is_told(tmp_path: Path) -> None:
    made = model([], {"y": tabular_onnx.helper.make_tensor_type_proto(1, ["N", 4])})
    made.graph.node.append(tabular_onnx.helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft", alpha=1.7))
    made.opset_import.append(tabular_onnx.helper.make_opsetid("com.microsoft", 1))
    tabular_onnx.save(made, tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok and ("y", True) in [(item.site, "alone says" in item.reason) for item in result.skipped]


definitions_onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

HEADS = "float[1, 2, 5, 8]"
ATTENTION = f"g ({HEADS} q, {HEADS} k, {HEADS} v) => ({HEADS} y) {{ y = Attention <is_causal = 1> (q, k, v) }}"
OTHERS = {
    "MeanVarianceNormalization": "g (float[2, 3, 4, 4] x) => (float[2, 3, 4, 4] y) "
    "{ y = MeanVarianceNormalization (x) }",
    "CenterCropPad": "g (float[6, 8] x) => (float[4, 10] y) { s = Constant <value_ints = [4, 10]> () "
    "y = CenterCropPad (x, s) }",
}


@pytest.mark.parametrize("operator", OTHERS)
def test_values_are_those_of_onnx_runtime(operator: str) -> None:
    model = onnx_text(OTHERS[operator])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    program = onnx_program(OnnxFile(Path("model.onnx"), model))
    assert any(isinstance(node.target, Composite) for node in program.graph.nodes)
    found = run_program(program, {"x": torch.from_numpy(x)})["y"]
    torch.testing.assert_close(found, torch.from_numpy(session.run(None, {"x": x})[0]), rtol=1e-5, atol=1e-6)


def test_attention_is_judged(tmp_path: Path) -> None:
    definitions_onnx.save(onnx_text(ATTENTION, opset=23), tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok
    assert all(pair.bound_ratio is not None for pair in result.pairs if pair.level == "source")
    definitions_onnx.save(
        onnx_text(ATTENTION.replace("is_causal = 1", "scale = 0.354"), opset=23), tmp_path / "other.onnx"
    )
    assert not glass.check(tmp_path / "one.onnx", candidate=tmp_path / "other.onnx").ok


def test_what_is_drawn_anew_is_not_judged(tmp_path: Path) -> None:
    text = "g (float[4, 8] x) => (float[4, 8] y) { r = RandomNormalLike (x) t = Tanh (r) y = Add (t, x) }"
    definitions_onnx.save(onnx_text(text), tmp_path / "noise.onnx")
    result = glass.check(tmp_path / "noise.onnx", backend="onnxruntime")
    assert not [pair for pair in result.pairs if pair.verdict in ("suspicious", "wrong")]


def test_dequantized_numbers_that_cancel(tmp_path: Path) -> None:
    """OpenVINO computes q scale - zero scale, which rounds where the two cancel."""
    pytest.importorskip("openvino")
    generator = np.random.default_rng(0)
    weights = {"table": generator.integers(0, 255, (40, 8)).astype(np.uint8)}
    weights |= {"scale": np.float32(0.0123), "zero": np.uint8(131)}
    text = "g (int64[6] ids) => (float[6, 8] y) { q = Gather (table, ids) y = DequantizeLinear (q, scale, zero) }"
    definitions_onnx.save(onnx_text(text, weights), tmp_path / "table.onnx")
    assert glass.check(tmp_path / "table.onnx", backend="openvino").ok
    definitions_onnx.save(onnx_text(text, {**weights, "zero": np.uint8(130)}), tmp_path / "other.onnx")
    engine = glass.build(tmp_path / "other.onnx", tmp_path / "engine", backend="openvino")
    assert not glass.check(tmp_path / "table.onnx", candidate=engine.directory).ok
