"""What skl2onnx writes: scalers, linear models and trees have a reference of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glassengine as glass

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
GENERATOR = np.random.default_rng(0)
COEFFICIENTS = [float(value) for value in GENERATOR.standard_normal(12)]


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs, outputs, domain="ai.onnx.ml", **attributes)


def model(nodes: list[Any], results: dict[str, Any]) -> Any:
    given = onnx.helper.make_tensor_value_info("x", 1, ["N", 4])
    outputs = [onnx.helper.make_value_info(name, kind) for name, kind in results.items()]
    graph = onnx.helper.make_graph(nodes, "g", [given], outputs)
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.ml", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


FLOATS = onnx.helper.make_tensor_type_proto(1, ["N", 3])
LABELS = onnx.helper.make_tensor_type_proto(8, ["N"])
NUMBERS = onnx.helper.make_tensor_type_proto(7, ["N"])
DICTS = onnx.helper.make_sequence_type_proto(
    onnx.helper.make_map_type_proto(8, onnx.helper.make_tensor_type_proto(1, []))
)


def classifier(**labels: Any) -> list[Any]:
    options = {"coefficients": COEFFICIENTS, "intercepts": [0.1, -0.2, 0.3], "post_transform": "SOFTMAX", **labels}
    return [
        node("Scaler", ["x"], ["scaled"], offset=[0.1, 0.2, 0.3, 0.4], scale=[1.5, 0.5, 2.0, 1.0]),
        node("LinearClassifier", ["scaled"], ["label", "raw"], **options),
        node("Normalizer", ["raw"], ["probabilities"], norm="L1"),
    ]


def with_dicts() -> Any:
    names = ["red", "green", "blue"]
    zipped = node("ZipMap", ["probabilities"], ["dicts"], classlabels_strings=names)
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
    one = onnx.helper.make_tensor_type_proto(1, ["N", 1])
    return model([node("TreeEnsembleRegressor", ["x"], ["y"], n_targets=1, **tree)], {"y": one})


MAKERS: dict[str, Callable[[], Any]] = {"dicts": with_dicts, "numbers": with_numbers, "trees": trees}


def attribute(made: Any, kind: str, name: str) -> Any:
    found = next(one for one in made.graph.node if one.op_type == kind)
    return next(one for one in found.attribute if one.name == name)


@pytest.mark.parametrize("name", list(MAKERS))
def test_files_of_skl2onnx_are_judged(name: str, tmp_path: Path) -> None:
    onnx.save(MAKERS[name](), tmp_path / "one.onnx")
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
    onnx.save(made, tmp_path / "one.onnx")
    attribute(made, kind, what).floats[place] += 0.4
    onnx.save(made, tmp_path / "other.onnx")
    result = glass.check(tmp_path / "one.onnx", candidate=tmp_path / "other.onnx")
    assert not result.ok and result.first_divergence is not None and result.first_divergence.site == site


def test_a_result_of_the_runtime_alone_is_told(tmp_path: Path) -> None:
    made = model([], {"y": onnx.helper.make_tensor_type_proto(1, ["N", 4])})
    made.graph.node.append(onnx.helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft", alpha=1.7))
    made.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(made, tmp_path / "one.onnx")
    result = glass.check(tmp_path / "one.onnx", backend="onnxruntime")
    assert result.ok and ("y", True) in [(item.site, "alone says" in item.reason) for item in result.skipped]
