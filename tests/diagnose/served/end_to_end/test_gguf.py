"""llama.cpp beside the checkpoint: healthy files raise no alarm, a planted mistake is named at its op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.results import Comparison
from glassengine.serving.ggml.write import write_gguf
from glassengine.testing import models
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint


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
    assert [rung.name for rung in found.rungs] == ["weights", "program", "record", "record as deployed"]
    bound = max(pair.bound_ratio or 0.0 for pair in found.pairs if pair.rung == "record")
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
    assert first.rung == "record" and first.step == 0 and "rope.0" in (first.candidate_site or "")
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


def gemma2(folder: Path) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 16, "sliding_window": 4}
    torch.manual_seed(0)
    module = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, max_position_embeddings=64)).eval()
    save_checkpoint(module, folder)
    return module


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
    module = gemma2(tmp_path / "checkpoint")
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
    assert not found.ok and found.first_divergence is not None and found.first_divergence.rung == "record"
    assert any(said in hint.text for hint in found.first_divergence.hints)
