"""Exports are what other programs read: each is opened by the real package where that is installed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine import report
from glassengine.cli.documents import json_text
from glassengine.errors import UsageError
from glassengine.report.exported import (
    COLORS,
    SIZE,
    model_explorer,
    perfetto,
    worst_of,
    write_card,
    write_onnx,
    write_tensorboard,
)
from glassengine.results import Comparison
from glassengine.results.notebook import _SCALE, color_of, worst_rows
from tests.report.made_results import comparison, figures


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


image = pytest.importorskip("PIL.Image")


def test_the_picture_has_the_size_of_a_link_and_the_color_of_the_verdict(tmp_path: Path) -> None:
    result = comparison()
    (tmp_path / "answer.json").write_text(json.dumps(result.to_dict()))
    written = write_card(tmp_path / "answer.json", tmp_path / "card.png")
    assert written.ok is result.ok and written.num_files == 1
    with image.open(tmp_path / "card.png") as picture:
        assert picture.size == SIZE
        assert len(picture.convert("RGB").crop((60, 40, 1140, 400)).getcolors(1 << 16)) > 2, "the words are drawn"


def verdicts(result: Comparison) -> list[list[tuple[str, str]]]:
    return [[(name, "" if pair is None else pair.verdict) for name, pair in row] for row in worst_rows(result)]


def test_errors_of_60_and_of_40_decibels_have_their_own_colors() -> None:
    pair = dataclasses.replace(comparison().pairs[0], verdict="wrong", noise_ratio=None)
    sizes = [figures(10 ** (-decibels / 20)) for decibels in (61, 41, 21)]
    colors = [color_of(dataclasses.replace(pair, figures=size)) for size in sizes]
    colors += [color_of(dataclasses.replace(pair, figures=None)), color_of(dataclasses.replace(pair, noise_ratio=50.0))]
    assert len(set(colors[:4])) == 4 and colors[4] == colors[0]
    css = (Path(report.__file__).parent / "html" / "page" / "page.css").read_text()
    assert all(f"--s{place}: light-dark({color}" in css for place, color in enumerate(_SCALE, 1))


def test_the_map_has_the_worst_verdict_of_each_module() -> None:
    pair = comparison().pairs[0]
    made = [("layers.0/mul.0", "identical"), ("layers.0/add.0", "wrong"), ("layers.1/add.0", "rounding")]
    pairs = [dataclasses.replace(pair, site=site, verdict=verdict, step=0, level="x") for site, verdict in made]
    later = dataclasses.replace(pairs[0], step=3)
    other = dataclasses.replace(pairs[2], level="y", verdict="wrong")
    result = dataclasses.replace(comparison(), pairs=(*pairs, later, other), first_divergence=None)
    rows = verdicts(result)
    # Of the second module nothing was compared in the later step: it is not shown as right.
    assert rows == [[("layers.0", "wrong"), ("layers.1", "rounding")], [("layers.0", "identical"), ("layers.1", "")]]
    assert worst_rows(dataclasses.replace(result, pairs=())) == []


def test_the_map_is_that_of_the_level_that_went_wrong() -> None:
    result = comparison()
    pair, first = result.pairs[0], result.first_divergence
    assert first is not None
    right = [dataclasses.replace(pair, site=f"{name}/add.0", verdict="identical", level="program") for name in "abc"]
    wrong = dataclasses.replace(pair, site="a/add.0", verdict="wrong", level="candidate")
    found = dataclasses.replace(first, level="candidate")
    result = dataclasses.replace(result, pairs=(*right, wrong), first_divergence=found)
    assert verdicts(result) == [[("a", "wrong")]]


def test_a_card_replaces_only_a_card(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text(json.dumps(comparison().to_dict()))
    for _ in range(2):
        write_card(tmp_path / "answer.json", tmp_path / "new" / "card.png")
    (tmp_path / "photo.png").write_bytes(b"mine")
    with pytest.raises(UsageError, match="replaces only a card"):
        write_card(tmp_path / "answer.json", tmp_path / "photo.png")
    assert (tmp_path / "photo.png").read_bytes() == b"mine"


def test_another_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError):
        write_card(tmp_path / "other.json", tmp_path / "card.png")
    assert not (tmp_path / "card.png").exists()
