"""llama.cpp beside the checkpoint: healthy files raise no alarm, a planted mistake is named at its op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.plugins.serving.ggml.write import file_tensors, write_gguf
from glassengine.results import Comparison
from glassengine.testing import models
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from tests.plugins.serving.ggml.test_backend import gemma2


def made(family: str, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    module: Any = FAMILIES[family]().eval()
    if family == "gemma3":
        module.config.query_pre_attn_scalar = 16  # llama.cpp scales by the width of a head
    save_checkpoint(module, folder)
    return module


def check(family: str, tmp_path: Path, steps: int = 1, kind: str = "F32", **settings: Any) -> Comparison:
    module = made(family, tmp_path / "checkpoint")
    write_gguf(module, tmp_path / "model.gguf", kind=kind, **settings)
    return glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=steps)


def require_healthy(found: Comparison) -> None:
    assert found.ok and found.verdict == "rounding" and not found.origins, found.not_ok_because
    assert found.coverage == 1.0
    assert [level.name for level in found.levels] == ["weights", "program", "record", "record as deployed"]
    bound = max(pair.bound_ratio or 0.0 for pair in found.pairs if pair.level == "record")
    assert bound <= 1.0


def test_a_quantized_file_is_judged_op_by_op(tmp_path: Path) -> None:
    found = check("llama", tmp_path, kind="Q8_0")
    require_healthy(found)
    assert found.weights is not None and not found.weights.different
    assert any("float16" in note for note in found.notes)


def test_another_base_is_named_with_the_number(tmp_path: Path) -> None:
    found = check("llama", tmp_path, steps=0, rope_freq_base=500000.0)
    first = found.first_divergence
    assert not found.ok and first is not None
    assert first.level == "record" and first.step == 0 and "rope.0" in (first.candidate_site or "")
    assert first.hints[0].text.startswith("freq_base is 500000 in Qcur-0/rope.0")
    assert all(
        "rotary" in o.site or "self_attn/add" in o.site or "rope" in (o.candidate_site or "") for o in found.origins
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_healthy_files(family: str, kind: str, tmp_path: Path) -> None:
    require_healthy(check(family, tmp_path, steps=3, kind=kind))


@pytest.mark.slow
def test_one_head_of_keys(tmp_path: Path) -> None:
    """The program has fewer copies there, and other numbers: the attention's result is what its projection is given."""
    torch.manual_seed(0)
    module = models.llama(num_key_value_heads=1, num_hidden_layers=1)
    save_checkpoint(module, tmp_path / "checkpoint")
    write_gguf(module, tmp_path / "model.gguf", kind="F32")
    require_healthy(glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "mixtral", "gpt2"])
def test_healthy_files_of_other_families(family: str, tmp_path: Path) -> None:
    require_healthy(check(family, tmp_path, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "settings", "site"),
    [
        ("gelu_pytorch_tanh", {}, ""),
        ("gelu_pytorch_tanh", {"attention_layer_norm_epsilon": 1e-3}, "embeddings.LayerNorm/layer_norm.0"),
    ],
)
def test_an_encoder_is_run_in_one_step(act: str, settings: dict[str, float], site: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain: Any = FAMILIES["bert"]()
    plain.config.hidden_act = act
    module = type(plain)(plain.config).eval()
    save_checkpoint(module, tmp_path / "checkpoint")
    write_gguf(module, tmp_path / "model.gguf", **settings)
    found = glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf")
    first = found.first_divergence
    assert found.coverage > 0.9 and found.ok is not bool(site), (found.not_ok_because, found.coverage)
    assert (first is None) is not bool(site) and (first is None or (first.step, first.site) == (0, site))


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SCALES = {"embedding_multiplier": 2.0, "residual_multiplier": 0.3, "logits_scaling": 3.0, "attention_multiplier": 0.2}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
CONFIGURED: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "half of each head rotated": ("Phi3", {"rope_parameters": HALF}),
    "a shared expert": ("Qwen2Moe", EXPERTS),
    "granite": ("Granite", SCALES),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "stablelm": ("StableLm", {}),
}
"""Name -> class of transformers, and what differs in its configuration."""


def configured(name: str, folder: Path, **more: Any) -> Any:
    import transformers

    base, changes = CONFIGURED[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{base}Config")(**{**SMALL, **changes, **more})
    module = getattr(transformers, f"{base}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_checkpoint(module, folder)
    return module


def test_a_bias_is_part_of_its_product(tmp_path: Path) -> None:
    module = configured("biases", tmp_path / "checkpoint", num_hidden_layers=1)
    write_gguf(module, tmp_path / "model.gguf")
    require_healthy(glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=0))
    # Planted: another bias at a product whose name llama.cpp gives to the sum.
    found = dict(file_tensors(module, "llama"))
    other = {"blk.0.attn_output.bias": found["blk.0.ffn_down.bias"]}
    write_gguf(module, tmp_path / "model.gguf", changed=other)
    wrong = glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=0)
    assert [(one.level, one.site) for one in wrong.origins if one.level != "record as deployed"] == [
        ("weights", "model.layers.0.self_attn.o_proj.bias:param"),
        ("record", "model.layers.0.self_attn.o_proj/linear.0"),
    ]


def test_heads_of_another_size_are_named(tmp_path: Path) -> None:
    """What llama.cpp computes does not have the sizes that the tables expect, and is wrong."""
    module = configured("biases", tmp_path / "checkpoint", num_hidden_layers=1, attention_bias=False, mlp_bias=False)
    heads = {"attention_head_count": 8, "attention_head_count_kv": 4}
    widths = dict.fromkeys(("attention_key_length", "attention_value_length", "rope_dimension_count"), 8)
    write_gguf(module, tmp_path / "model.gguf", **heads, **widths)
    found = glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=0)
    first = found.first_divergence
    assert not found.ok and first is not None and first.site.startswith("model.layers.0.self_attn/"), first
    assert "llama.rope.dimension_count is 8, in the checkpoint 16" in [hint.text for hint in first.hints]
    assert "llama.attention.head_count is 8, in the checkpoint 4" in found.notes


@pytest.mark.slow
@pytest.mark.parametrize("factors", [None, 4.0])
def test_factors_of_llama_3_are_named(factors: float | None, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {**rope, "original_max_position_embeddings": 32}
    module = configured("biases", tmp_path / "checkpoint", max_position_embeddings=256, rope_parameters=scaled)
    changed = {} if factors is None else {"rope_freqs.weight": torch.full((8,), factors)}
    write_gguf(module, tmp_path / "model.gguf", changed=changed)
    found = glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=0)
    first = found.first_divergence
    assert not found.ok and first is not None and first.site.startswith("model.layers.0.self_attn/add."), first
    text = f"the largest number of rope_freqs.weight is {factors or 1.0:g}, in the checkpoint 8"
    assert text in [hint.text for hint in first.hints]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURED)
def test_healthy_files_of_other_configurations(name: str, tmp_path: Path) -> None:
    write_gguf(configured(name, tmp_path / "checkpoint"), tmp_path / "model.gguf")
    require_healthy(glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting", "site"),
    [
        ("granite", {"attention_scale": 0.25}, "model.layers.0.self_attn/"),
        ("granite", {"residual_scale": 0.25}, "model.layers.0/"),
        ("granite", {"logit_scale": 2.0}, "./div.0"),
        ("granite", {"embedding_scale": 1.0}, "model/mul.0"),
        ("half of each head rotated", {"rope_dimension_count": 16}, "model.layers.0.self_attn/"),
        ("stablelm", {"attention_layer_norm_epsilon": 1e-3}, "model.layers.0.input_layernorm/layer_norm.0"),
        ("a shared expert", {"expert_used_count": 1}, "model.layers.0.mlp"),
    ],
)
def test_settings_of_other_configurations(name: str, setting: dict[str, Any], site: str, tmp_path: Path) -> None:
    write_gguf(configured(name, tmp_path / "checkpoint"), tmp_path / "model.gguf", **setting)
    found = glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=0)
    first = found.first_divergence
    assert not found.ok and first is not None and (first.level, first.step) == ("record", 0)
    assert first.site.startswith(site), first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "site"),
    [
        ({}, ""),
        ({"attn_logit_softcapping": 0.5}, "model.layers.0.self_attn/"),
        ({"final_logit_softcapping": 0.5}, "./mul.0"),
        ({"attention_sliding_window": 2}, "model/sub.0"),  # of the mask
    ],
    ids=["healthy", "attention soft cap", "final soft cap", "window"],
)
def test_gemma2(setting: dict[str, Any], site: str, tmp_path: Path) -> None:
    module = gemma2(vocab_size=300)
    save_checkpoint(module, tmp_path / "checkpoint")
    write_gguf(module, tmp_path / "model.gguf", **setting)
    found = glass.check(tmp_path / "checkpoint", candidate=f"gguf:{tmp_path}/model.gguf", steps=1)
    if not setting:
        require_healthy(found)
    else:
        first = found.first_divergence
        assert not found.ok and first is not None and first.step == 0 and first.site.startswith(site)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "setting", "said"),
    [
        ("llama", {"attention_layer_norm_rms_epsilon": 1e-3}, "eps is 0.001"),
        ("qwen3", {"attention_layer_norm_rms_epsilon": 1e-3}, "eps is 0.001"),
        ("qwen3", {"rope_freq_base": 20000.0}, "freq_base is 20000"),
        ("gemma3", {"rope_freq_base": 20000.0}, "freq_base is 20000"),
        ("phi3", {"rope_freq_base": 500000.0}, "freq_base is 500000"),
    ],
)
def test_settings(family: str, setting: dict[str, float], said: str, tmp_path: Path) -> None:
    found = check(family, tmp_path, **setting)
    assert not found.ok and found.first_divergence is not None and found.first_divergence.level == "record"
    assert any(said in hint.text for hint in found.first_divergence.hints)
