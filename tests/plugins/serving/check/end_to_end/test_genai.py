"""ONNX Runtime with a decoder beside the checkpoint: healthy folders raise no alarm, a planted mistake is named."""

from __future__ import annotations

import importlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from transformers import AutoModelForCausalLM, DynamicCache

import glassengine as glass
from glassengine.errors import BackendError
from glassengine.results import Comparison
from glassengine.testing import models
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai
from tests.plugins.serving.check.end_to_end.test_gguf import SCALES, SMALL

pytest.importorskip("onnxruntime_genai")
Plant = Callable[[onnx.ModelProto], None]


def made(family: str, folder: Path, precision: str = "fp32", module: Any = None) -> Path:
    torch.manual_seed(0)
    module = FAMILIES[family]().eval() if module is None else module
    save_checkpoint(module, folder / "checkpoint")
    build_genai(folder / "checkpoint", folder / "genai", precision)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama_int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return made("llama", tmp_path_factory.mktemp("llama-int4"), "int4", models.llama(num_key_value_heads=1).eval())


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
    names = [level.name for level in found.levels if level.name != "prompt"]  # some folders have a tokenizer
    assert names == ["weights", "program", "record", "record as deployed"]
    assert max(pair.bound_ratio or 0.0 for pair in found.pairs if pair.level != "weights") <= 1.0


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


@pytest.mark.slow
def test_a_folder_of_the_builder_is_healthy(llama: Path) -> None:
    require_healthy(check(llama))


def test_an_int4_folder_is_judged_op_by_op(llama_int4: Path) -> None:
    found = check(llama_int4)
    require_healthy(found)
    assert found.weights is not None and not found.weights.different
    # With one head of keys the program has fewer copies, and other numbers behind them.
    judged = {pair.site for pair in found.pairs if pair.level == "record"}
    assert {f"model.layers.{layer}.self_attn/view.6" for layer in (0, 1)} <= judged


def of_layer(kind: str) -> str:
    return f"/model/layers.1/{kind}"


@pytest.mark.parametrize(
    ("plant", "step", "site", "said"),
    [
        pytest.param(other_base, 0, "rotary", "freq_base is 20000", marks=pytest.mark.slow),
        (other_slot, 1, "layers.1.self_attn", ""),
        pytest.param(
            attribute(of_layer("post_attention"), "epsilon", 1e-3),
            0, "layers.1.post_attention_layernorm", "eps is 0.001", marks=pytest.mark.slow,
        ),
        pytest.param(
            attribute(of_layer("attn/GroupQuery"), "scale", 0.3),
            0, "layers.1.self_attn", "attention scale is 0.3", marks=pytest.mark.slow,
        ),
        pytest.param(
            attribute(of_layer("attn/GroupQuery"), "local_window_size", 4),
            0, "layers.1.self_attn", "window is 4", marks=pytest.mark.slow,
        ),
        pytest.param(
            attribute(of_layer("attn/GroupQuery"), "softcap", 1.0),
            0, "layers.1.self_attn", "soft cap of the attention is 1", marks=pytest.mark.slow,
        ),
    ],
    ids=["base", "slot", "eps", "scale", "window", "softcap"],
)  # fmt: skip
def test_settings_and_runtimes(plant: Plant, step: int, site: str, said: str, llama: Path, tmp_path: Path) -> None:
    found = planted(llama, tmp_path, plant, steps=step)
    first = found.first_divergence
    assert not found.ok and first is not None and first.level == "record"
    assert first.step == step and site in first.site
    assert said == "" or any(said in hint.text for hint in first.hints)


@pytest.mark.parametrize(
    ("plant", "site"),
    [
        (swapped, "layers.1.mlp.gate_proj"),
        pytest.param(
            initializer("model.layers.1.attn.o_proj.MatMul.weight", lambda w: w.flip(0)),
            "layers.1.self_attn.o_proj", marks=pytest.mark.slow,
        ),
        pytest.param(
            initializer("model.layers.1.input_layernorm.weight", lambda w: w + 1),
            "layers.1.input_layernorm", marks=pytest.mark.slow,
        ),
        pytest.param(
            initializer("model.layers.0.attn.qkv_proj.MatMul.weight", lambda w: w.roll(64, 1)),
            "layers.0.self_attn.q_proj", marks=pytest.mark.slow,
        ),
    ],
    ids=["swapped", "flipped", "norm", "order"],
)  # fmt: skip
def test_weights(plant: Plant, site: str, llama: Path, tmp_path: Path) -> None:
    found = planted(llama, tmp_path, plant, steps=0)
    require_named(found, site)


def require_named(found: Comparison, site: str) -> None:
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.level == "weights" and site in found.first_divergence.site
    assert any(site in one.site and one.level == "record" for one in found.origins)


def one_block(name: str) -> Plant:
    """Double the first scale of a weight in blocks."""

    def double(scales: torch.Tensor) -> torch.Tensor:
        scales.view(-1)[0] *= 2
        return scales

    def plant(model: onnx.ModelProto) -> None:
        node = node_of(model, name)
        initializer(node.input[2], double)(model)

    return plant


def test_one_wrong_scale_of_a_block_is_named(llama_int4: Path, tmp_path: Path) -> None:
    found = planted(llama_int4, tmp_path, one_block("/model/layers.1/mlp/up_proj/MatMul"), steps=0)
    require_named(found, "layers.1.mlp.up_proj")


@pytest.mark.slow
def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    folder = made("qwen2", tmp_path / "qwen2")
    require_healthy(check(folder, steps=2))
    found = planted(folder, tmp_path, without_bias, steps=0)
    require_named(found, "layers.1.self_attn")
    assert "bias" in found.first_divergence.site  # type: ignore[union-attr]


def test_heads_that_do_not_fit_are_said(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="ONNX Runtime does not take") as caught:
        planted(llama, tmp_path, attribute(of_layer("attn/GroupQuery"), "kv_num_heads", 1), steps=0)
    assert "GroupQueryAttention" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_healthy_families(family: str, precision: str, tmp_path: Path) -> None:
    require_healthy(check(made(family, tmp_path, precision), steps=3))


CONFIGURED: dict[str, dict[str, Any]] = {
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4},
    "Granite": SCALES,
    "Olmo": {},
    "Phi": {"hidden_size": 128, "num_attention_heads": 2, "partial_rotary_factor": 0.5},
    "Nemotron": {"hidden_size": 128, "num_attention_heads": 2, "partial_rotary_factor": 0.5},
}


def configured(name: str, folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, "max_position_embeddings": 128, **CONFIGURED[name]})
    return made(name, folder, module=getattr(transformers, f"{name}ForCausalLM")(config).eval())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Granite"])
def test_healthy_families_with_scores_of_their_own(name: str, tmp_path: Path) -> None:
    """The scores are scaled or capped behind the head; the gains of Gemma have a 1 added."""
    require_healthy(check(configured(name, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "node", "site"),
    [("Granite", "/lm_head/Mul", "./div.0"), ("Gemma2", "/lm_head/softcap/Div", "./div.0")],
)
def test_another_scale_of_the_scores_is_named(name: str, node: str, site: str, tmp_path: Path) -> None:
    def plant(model: onnx.ModelProto) -> None:
        one = node_of(model, node)
        model.graph.initializer.append(helper.make_tensor("other_scale", onnx.TensorProto.FLOAT, [], [2.5]))
        one.input[1] = "other_scale"

    found = planted(configured(name, tmp_path / "right"), tmp_path, plant, steps=0)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.site == site, found.first_divergence


@pytest.mark.slow
def test_a_norm_of_another_kind_is_named(tmp_path: Path) -> None:
    """The builder of onnxruntime-genai 0.18 writes norms without a mean for OLMo's, which have one."""
    found = check(configured("Olmo", tmp_path), steps=0)
    first = found.first_divergence
    assert not found.ok and first is not None and first.site == "model.layers.0.input_layernorm/layer_norm.0", first


@pytest.mark.slow
def test_a_window_that_the_builder_leaves_out_is_named(tmp_path: Path) -> None:
    """The builder of onnxruntime-genai 0.18 writes Mistral without its window."""
    folder = made("mistral", tmp_path / "mistral")
    found = check(folder, steps=0)
    first = found.first_divergence
    assert not found.ok and first is not None and first.site.startswith("model.layers.0.self_attn/")
    assert any("window is -1" in hint.text for hint in first.hints)

    def with_window(model: onnx.ModelProto) -> None:
        for layer in (0, 1):
            attribute(f"/model/layers.{layer}/attn/GroupQuery", "local_window_size", 8)(model)

    require_healthy(planted(folder, tmp_path, with_window))


@pytest.mark.slow
def test_caches_with_a_window_are_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3: norms with 1, two bases, a cache that moves with its window."""
    builder: Any = importlib.import_module("onnxruntime_genai.models.builder")
    load = builder.AutoConfig.from_pretrained

    def with_one_base(*args: Any, **options: Any) -> Any:
        config = load(*args, **options)  # the builder knows configurations of transformers 4
        config.rope_local_base_freq = config.rope_parameters["sliding_attention"]["rope_theta"]
        config.rope_parameters = dict(config.rope_parameters["full_attention"])
        return config

    monkeypatch.setattr(builder, "AutoConfig", SimpleNamespace(from_pretrained=with_one_base))
    require_healthy(check(made("gemma3", tmp_path), steps=3))


class Exported(torch.nn.Module):
    """A language model with its cache as flat arguments, as exporters want it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.model = module.model
        self.lm_head = module.lm_head

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> tuple[Any, ...]:
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        states = self.model(**given, past_key_values=cache, use_cache=True).last_hidden_state
        return (self.lm_head(states), *(part for layer in cache.layers for part in (layer.keys, layer.values)))


def exported(folder: Path, dynamo: bool) -> None:
    module: Any = AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", attn_implementation="sdpa" if dynamo else "eager"
    ).eval()
    config, layers = module.config, range(module.config.num_hidden_layers)
    kinds = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]
    size = (1, config.num_key_value_heads, 5, config.head_dim)
    tokens = (torch.randint(0, 200, (1, 3)), torch.ones(1, 8, dtype=torch.int64), torch.arange(5, 8)[None])
    names = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{kind}" for kind in kinds)]
    free = [1, 1, 1, *(2 for _ in kinds)]
    options: dict[str, Any] = {"dynamic_axes": {n: {at: f"{n}_size"} for n, at in zip(names, free, strict=True)}}
    if dynamo:
        past = tuple({2: torch.export.Dim.DYNAMIC} for _ in kinds)
        options = {"dynamic_shapes": (*({1: torch.export.Dim.DYNAMIC} for _ in range(3)), past)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Exported(module),
            (*tokens, *(torch.randn(size) for _ in kinds)),
            str(folder / "model.onnx"),
            input_names=names,
            output_names=["logits", *(f"present.{kind}" for kind in kinds)],
            opset_version=18,
            dynamo=dynamo,
            **options,
        )


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
def test_exports_of_torch_are_judged_as_they_are(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_checkpoint(FAMILIES["llama"]().eval(), tmp_path / "checkpoint")
    exported(tmp_path, dynamo)
    require_healthy(glass.check(tmp_path / "checkpoint", candidate=str(tmp_path / "model.onnx"), steps=2))
    model = onnx.load(tmp_path / "model.onnx")
    products = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights_of(model)]
    products[4].input[1], products[5].input[1] = products[5].input[1], products[4].input[1]
    onnx.save(model, tmp_path / "changed.onnx")
    found = glass.check(tmp_path / "checkpoint", candidate=str(tmp_path / "changed.onnx"), steps=0)
    require_named(found, "layers.0.mlp.gate_proj")


def weights_of(model: onnx.ModelProto) -> set[str]:
    return {one.name for one in model.graph.initializer}
