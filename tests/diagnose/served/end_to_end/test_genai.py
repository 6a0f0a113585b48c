"""ONNX Runtime with a decoder beside the checkpoint: healthy folders raise no alarm, a planted mistake is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import glassengine as glass
from glassengine.results import Comparison
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai

pytest.importorskip("onnxruntime_genai")
Plant = Callable[[onnx.ModelProto], None]


def made(family: str, folder: Path, precision: str = "fp32", *options: str) -> Path:
    torch.manual_seed(0)
    module: Any = FAMILIES[family]().eval()
    save_checkpoint(module, folder / "checkpoint")
    build_genai(folder / "checkpoint", folder / "genai", precision, *options)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama_int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("llama-int4"), "int4")


def check(folder: Path, steps: int = 1, **options: Any) -> Comparison:
    return glass.check(folder / "checkpoint", candidate=f"genai:{folder}/genai", steps=steps, **options)


def planted(folder: Path, tmp_path: Path, plant: Plant, steps: int = 1) -> Comparison:
    target = tmp_path / "genai"
    target.mkdir()
    shutil.copy(folder / "genai" / "genai_config.json", target)
    model = onnx.load(folder / "genai" / "model.onnx")
    plant(model)
    onnx.save(model, target / "model.onnx")
    return glass.check(folder / "checkpoint", candidate=f"genai:{target}", steps=steps)


def require_healthy(found: Comparison) -> None:
    assert found.ok and found.verdict == "rounding" and not found.origins, found.not_ok_because
    assert found.coverage == 1.0
    assert [rung.name for rung in found.rungs] == ["weights", "program", "record", "record as deployed"]
    assert max(pair.bound_ratio or 0.0 for pair in found.pairs if pair.rung != "weights") <= 1.0


def node_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name.startswith(name))


def attribute(name: str, key: str, value: Any) -> Plant:
    def plant(model: onnx.ModelProto) -> None:
        node = node_of(model, name)
        kept = [one for one in node.attribute if one.name != key]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(key, value)])

    return plant


def initializer(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(model: onnx.ModelProto) -> None:
        proto = next(one for one in model.graph.initializer if one.name.startswith(name))
        value = torch.from_numpy(numpy_helper.to_array(proto).copy())
        proto.CopyFrom(numpy_helper.from_array(change(value).contiguous().numpy(), proto.name))

    return plant


def swapped(model: onnx.ModelProto) -> None:
    gate, up = (node_of(model, f"/model/layers.1/mlp/{name}_proj/MatMul") for name in ("gate", "up"))
    gate.input[1], up.input[1] = up.input[1], gate.input[1]


def other_base(model: onnx.ModelProto) -> None:
    for name, function in (("cos_cache", torch.cos), ("sin_cache", torch.sin)):
        proto = next(one for one in model.graph.initializer if one.name == name)
        positions, pairs = proto.dims
        angles = torch.arange(positions)[:, None] * 20000.0 ** (-torch.arange(pairs) / pairs)
        proto.CopyFrom(numpy_helper.from_array(function(angles.double()).float().numpy(), name))


def other_slot(model: onnx.ModelProto) -> None:
    """Let layer 1 read its keys one place on."""
    graph, name = model.graph, "past_key_values.1.key"
    numbers = {"zero": 0, "one": 1, "end": 1 << 40, "axis": 2}
    graph.initializer.extend(helper.make_tensor(key, onnx.TensorProto.INT64, [1], [n]) for key, n in numbers.items())
    nodes = [
        helper.make_node("Slice", [name, "one", "end", "axis"], ["slot_rest"]),
        helper.make_node("Slice", [name, "zero", "one", "axis"], ["slot_first"]),
        helper.make_node("Concat", ["slot_rest", "slot_first"], ["slot_turned"], axis=2),
    ]
    reader = next(node for node in graph.node if name in node.input)
    reader.input[list(reader.input).index(name)] = "slot_turned"
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])


def without_bias(model: onnx.ModelProto) -> None:
    add = node_of(model, "/model/layers.1/attn/qkv_proj/Add")
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == add.output[0]:
                node.input[at] = add.input[0]
    model.graph.node.remove(add)


def test_a_folder_of_the_builder_is_healthy(llama: Path) -> None:
    require_healthy(check(llama))


def test_an_int4_folder_is_judged_op_by_op(llama_int4: Path) -> None:
    found = check(llama_int4)
    require_healthy(found)
    assert found.weights is not None and not found.weights.different


@pytest.mark.parametrize(
    ("plant", "step", "site", "said"),
    [
        (
            attribute("/model/layers.1/post_attention", "epsilon", 1e-3),
            0,
            "layers.1.post_attention_layernorm",
            "eps is",
        ),
        (attribute("/model/layers.1/attn/GroupQuery", "scale", 0.3), 0, "layers.1.self_attn", "attention scale is 0.3"),
        (other_base, 0, "rotary", "freq_base is 20000"),
        (attribute("/model/layers.1/attn/GroupQuery", "local_window_size", 4), 0, "layers.1.self_attn", "window is 4"),
        (other_slot, 1, "layers.1.self_attn", ""),
    ],
    ids=["eps", "scale", "base", "window", "slot"],
)
def test_settings_and_runtimes(plant: Plant, step: int, site: str, said: str, llama: Path, tmp_path: Path) -> None:
    found = planted(llama, tmp_path, plant, steps=step)
    first = found.first_divergence
    assert not found.ok and first is not None and first.rung == "record"
    assert first.step == step and site in first.site
    assert said == "" or any(said in hint.text for hint in first.hints)


@pytest.mark.parametrize(
    ("plant", "site"),
    [
        (swapped, "layers.1.mlp.gate_proj"),
        (initializer("model.layers.1.attn.o_proj.MatMul.weight", lambda w: w.flip(0)), "layers.1.self_attn.o_proj"),
        (initializer("model.layers.1.input_layernorm.weight", lambda w: w + 1), "layers.1.input_layernorm"),
    ],
    ids=["swapped", "flipped", "norm"],
)
def test_weights(plant: Plant, site: str, llama: Path, tmp_path: Path) -> None:
    found = planted(llama, tmp_path, plant, steps=0)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.rung == "weights" and site in found.first_divergence.site
    assert any(site in one.site and one.rung == "record" for one in found.origins)
