"""Exports are what other programs read: each is opened by the real package where that is installed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.cli.documents import json_text
from glassengine.errors import UsageError
from glassengine.report.exported import (
    COLORS,
    model_explorer,
    perfetto,
    worst_of,
    write_onnx,
    write_tensorboard,
)
from glassengine.results import Comparison


def test_the_worst_of_each_site_counts(wrong: Comparison) -> None:
    worst = worst_of(wrong)
    assert {name: pair.verdict for name, pair in worst.items() if name == "./silu.0"} == {"./silu.0": "wrong"}
    assert list(worst) == list(dict.fromkeys(pair.site for pair in wrong.pairs))


def written(document: Any) -> Any:
    return json.loads(json_text(document))


def test_node_data_of_model_explorer(wrong: Comparison) -> None:
    """The format, as `model_explorer.node_data_builder` declares it."""
    data = written(model_explorer(wrong, {"./silu.0": ["silu", "silu_1"]}))
    (graph,) = data.values()
    assert graph["results"]["silu"] == graph["results"]["silu_1"]
    assert graph["results"]["silu"]["bgColor"] == COLORS["wrong"] and graph["results"]["silu"]["value"] > 1e3
    assert all(isinstance(node["value"], float) for node in graph["results"].values())


def test_a_trace_for_perfetto(wrong: Comparison) -> None:
    """The JSON format of Chrome's traces: complete events that nest on their row, names of rows, counters."""
    trace = written(perfetto(wrong))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(wrong.pairs) and "wrong: ./silu.0" in {event["name"] for event in slices}
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    for row in {(event["pid"], event["tid"]) for event in slices}:
        assert row in named
        starts = [event["ts"] for event in slices if (event["pid"], event["tid"]) == row]
        assert starts == [1000 * place for place in range(len(starts))]
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M", "C"}
    assert all(event["dur"] == 1000 and isinstance(event["args"]["error/floor"], float) for event in slices)


def test_events_for_tensorboard(wrong: Comparison, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_tensorboard(wrong, tmp_path)
    read = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in read.Scalars("glass/ok")] == [0.0]
    counted = {tag: read.Scalars(tag)[0].value for tag in read.Tags()["scalars"] if tag.startswith("candidate/")}
    assert counted["candidate/wrong"] == sum(p.level == "candidate" and p.verdict == "wrong" for p in wrong.pairs)
    (largest,) = read.Scalars("candidate/largest error over floor")
    assert largest.value == pytest.approx(max(p.noise_ratio or 0 for p in wrong.pairs if p.level == "candidate"))


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    onnx = pytest.importorskip("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    weight = helper.make_tensor("w", kinds.FLOAT, [4], torch.arange(4.0).numpy().tobytes(), raw=True)
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["scaled"], name="scale"),
        helper.make_node("Relu", ["scaled"], ["y"], name="act"),
    ]
    sides = [helper.make_tensor_value_info(name, kinds.FLOAT, [2, 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:], [weight])
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_an_onnx_file_with_verdicts(onnx_file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    torch.save({"scaled": torch.ones(2, 4), "y": torch.ones(2, 4)}, tmp_path / "one.pt")
    torch.save({"scaled": torch.ones(2, 4), "y": torch.zeros(2, 4)}, tmp_path / "two.pt")
    result = glass.compare(tmp_path / "one.pt", tmp_path / "two.pt")
    target = tmp_path / "out.onnx"
    assert write_onnx(result, onnx_file, target) == 2
    onnx.checker.check_model(target, full_check=True)
    read = onnx.load(target)
    verdicts = {node.name: {p.key: p.value for p in node.metadata_props}["glass.verdict"] for node in read.graph.node}
    assert verdicts == {"scale": "identical", "act": "wrong"}
    assert {prop.key: prop.value for prop in read.metadata_props}["glass.ok"] == "False"
    assert read.graph.initializer == onnx.load(onnx_file).graph.initializer
    with pytest.raises(UsageError, match="not replaced"):
        write_onnx(result, onnx_file, target)
    with pytest.raises(UsageError, match="not replaced"):
        write_onnx(result, target, target, overwrite=True)
    # A second time, over the first.
    write_onnx(result, onnx_file, target, overwrite=True)
    unknown = dataclasses.replace(result, pairs=result.pairs[:0])
    with pytest.raises(UsageError, match="no tensor of the result is in this file"):
        write_onnx(unknown, onnx_file, tmp_path / "other.onnx")
    with pytest.raises(UsageError, match="not an ONNX model"):
        write_onnx(result, tmp_path / "one.pt", tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_weights_beside_a_file_are_not_lost(onnx_file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/model.onnx"
    model = onnx.load(onnx_file)
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="weights.bin")
    torch.save({"y": torch.ones(2, 4)}, tmp_path / "one.pt")
    result = glass.compare(tmp_path / "one.pt", tmp_path / "one.pt")
    with pytest.raises(UsageError, match="weights of this file lie beside it"):
        write_onnx(result, path, tmp_path / "out.onnx")
    assert write_onnx(result, path, tmp_path / "in/out.onnx") == 1
    onnx.checker.check_model(tmp_path / "in/out.onnx")
