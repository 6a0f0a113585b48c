"""A mixture of quantized experts in ONNX Runtime: a right folder raises no alarm, planted mistakes are named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import glassengine as glass
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai
from tests.plugins.serving.check.end_to_end.test_genai import planted

pytest.importorskip("onnxruntime_genai")
pytestmark = pytest.mark.slow

ROTARY = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1024, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    rotary = {**ROTARY, "truncate": False, "original_max_position_embeddings": 4096}
    more = {"sliding_window": 8, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1}
    module = GptOssForCausalLM(GptOssConfig(**sizes, **heads, **more, eos_token_id=2, rope_parameters=rotary)).eval()
    for parameter in module.parameters():
        if parameter.dim() <= 2 and not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.05)
    return module


@pytest.fixture(scope="module", params=["fp32", "int4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a small gpt-oss; its experts come as floats, where the builder wants those of MXFP4."""
    target = tmp_path_factory.mktemp(request.param)
    module = gpt_oss()
    save_checkpoint(module, target / "checkpoint")

    def experts(_: Any, layer: int, decode: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        own = module.model.layers[layer].mlp.experts
        return own.gate_up_proj.detach().transpose(-1, -2), own.down_proj.detach().transpose(-1, -2)

    model = importlib.import_module("onnxruntime_genai.models.builder").GPTOSSModel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load_mxfp4_experts", experts)
        build_genai(target / "checkpoint", target / "genai", request.param)
    return target


def test_a_right_one_raises_no_alarm(folder: Path) -> None:
    found = glass.check(folder / "checkpoint", candidate=f"genai:{folder}/genai", steps=1)
    assert found.ok and found.verdict == "rounding" and not found.origins, found.not_ok_because
    assert found.coverage == 1.0
    assert max(pair.bound_ratio or 0.0 for pair in found.pairs if pair.level != "weights") <= 1.0


def attribute(key: str, value: Any) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type in ("MoE", "QMoE") and "layers.1" in node.name)
        kept = [one for one in node.attribute if one.name != key]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(key, value)])

    return plant


def exchanged(model: onnx.ModelProto) -> None:
    """Exchange two experts' weights."""
    for tensor in model.graph.initializer:
        if "layers.1.moe.experts.down_proj" in tensor.name and "bias" not in tensor.name:
            values = numpy_helper.to_array(tensor)[[1, 0, 2, 3]]
            tensor.CopyFrom(numpy_helper.from_array(values.copy(), tensor.name))


@pytest.mark.parametrize(
    ("name", "plant", "site"),
    [
        ("another slope of the gates", attribute("activation_alpha", 1.0), "model.layers.1.mlp"),
        ("one expert instead of two", attribute("k", 1), "model.layers.1.mlp"),
        ("no 1 added to what is gated", attribute("activation_beta", 0.0), "model.layers.1.mlp"),
        ("two experts exchanged", exchanged, "model.layers.1.mlp.experts.down_proj:param"),
    ],
)
def test_mistakes_are_named(name: str, plant: Any, site: str, folder: Path, tmp_path: Path) -> None:
    found = planted(folder, tmp_path, plant, steps=0)
    first = found.first_divergence
    assert not found.ok and first is not None and first.step == 0 and first.site.startswith(site), (name, first)
