"""llama.cpp as a back-end: the engine generates what transformers does, and what it cannot be built of is refused."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.errors import BackendError, GlassError, UnknownNameError
from glassengine.plugins.serving.ggml.backend import LlamaRun
from glassengine.plugins.serving.ggml.write import write_gguf
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint

MODEL = Path(__file__).parents[4] / "examples" / "tiny-llama"
PROMPTS = [[1, 495, 407, 983, 283, 91, 311], [1, 35]]


def made(family: str) -> Any:
    torch.manual_seed(0)
    if family == "gemma2":
        return gemma2(vocab_size=128)
    module: Any = FAMILIES[family]().eval()
    if family.startswith("gemma"):
        module.config.query_pre_attn_scalar = module.config.head_dim
        module = type(module)(module.config).eval()
    return module


def gemma2(vocab_size: int) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 16, "sliding_window": 4}
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, vocab_size=vocab_size, max_position_embeddings=64)).eval()


def tokens_of(module: Any, prompts: list[list[int]], number: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        made = module.generate(**given, max_new_tokens=number, min_new_tokens=number)
        found.append(made[0, len(prompt) :].tolist())
    return found


def test_tokens_are_those_of_transformers_in_a_batch_of_two_lengths_and_in_pieces(tmp_path: Path) -> None:
    module = made("llama")
    prompts = [[5, 6, 7, 8, 9], [3, 4]]
    expected = tokens_of(module, prompts, 6)
    engine = glass.build(module, tmp_path / "engine", backend="gguf", max_seq_len=32)
    assert engine.manifest.kv == "own" and not engine.manifest.caches
    told: dict[str, Any] = {"input_ids": prompts, "max_new_tokens": 6, "do_sample": False}
    assert list(map(list, engine.generate(**told).token_ids)) == expected
    assert list(map(list, engine.generate(**told, prefill_chunk=3).token_ids)) == expected


@pytest.mark.slow
def test_tokens_of_the_bundled_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = tokens_of(AutoModelForCausalLM.from_pretrained(MODEL), PROMPTS, 12)
    engine = glass.build(MODEL, tmp_path / "engine", backend="gguf")
    assert list(map(list, engine.generate(input_ids=PROMPTS, max_new_tokens=12, do_sample=False).token_ids)) == expected


def step(ids: list[list[int]], past: int, length: int = 16) -> dict[str, torch.Tensor]:
    """Return the inputs of a step; 0 is padding."""
    tokens = torch.tensor(ids)
    slots = torch.arange(past, past + tokens.shape[1])
    mask = torch.ones((len(ids), length), dtype=torch.int64)
    mask[:, slots] = (tokens != 0).long()
    real = ((tokens != 0).cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": real + past, "cache_position": slots}


def test_sessions_and_rows_do_not_disturb_each_other(tmp_path: Path) -> None:
    write_gguf(made("llama"), tmp_path / "model.gguf")
    file = LlamaRun(tmp_path / "model.gguf")
    first, end_first = file.open(2, 16)
    second, end_second = file.open(1, 16)
    both = first(step([[5, 6, 7], [0, 9, 8]], 0))["logits"]
    alone = second(step([[9, 8]], 0))["logits"]
    assert torch.allclose(both[1, 1:], alone[0], atol=1e-5) and not both[1, 0].any()
    following = {**step([[3], [4]], 3), "position_ids": torch.tensor([[3], [2]])}
    assert torch.allclose(first(following)["logits"][0], second_of(file, [5, 6, 7], 3), atol=1e-5)
    again = second(step([[9, 8]], 0))["logits"]
    assert torch.equal(again, alone)  # position 0 begins anew
    with pytest.raises(GlassError, match="sessions"):
        file(step([[1]], 0))
    end_first()
    end_second()


def second_of(file: LlamaRun, prompt: list[int], token: int) -> torch.Tensor:
    run, end = file.open(1, 16)
    run(step([prompt], 0))
    found = run(step([[token]], len(prompt)))["logits"][0]
    end()
    return found


def test_a_process_that_fails_is_an_error_with_words(tmp_path: Path) -> None:
    write_gguf(made("llama"), tmp_path / "model.gguf")
    file = LlamaRun(tmp_path / "model.gguf")
    run, end = file.open(1, 16)
    run(step([[1, 2]], 0))
    with pytest.raises(BackendError, match=r"llama\.cpp failed") as raised:
        run(step([[3]], 7))
    assert "consecutive" in (raised.value.got or "")
    end()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BackendError, match=r"llama\.cpp failed"):
        file.open(1, 4)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("mamba", {}, "kind of model that is written as GGUF"),
        ("llama", {"quantize": "Q9_0"}, "type of a GGUF file"),
        ("llama", {"add_output": "lm_head"}, "not its graph"),
        ("llama", {"backend": "eager", "quantize": "Q8_0"}, "rounds no matrices"),
        ("llama", {"dtype": "float64"}, "cannot run float64"),
    ],
)
def test_unsupported_models_are_refused_before_the_export(
    family: str, options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("glassengine.engine.build.build"), "export_programs", None)
    with pytest.raises(GlassError, match=said):
        glass.build(made(family), tmp_path / "engine", **{"backend": "gguf", **options})
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("hidden_act", "gelu", "hidden_act gelu"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 10000.0}, "rope_type of all layers llama3"),
        ("sliding_window", 8, "sliding_window 8"),
    ],
)
def test_settings_that_llama_cpp_has_not_are_refused(setting: str, value: Any, said: str, tmp_path: Path) -> None:
    module = made("llama")
    setattr(module.config, setting, value)
    with pytest.raises(GlassError) as raised:
        glass.build(module, tmp_path / "engine", backend="gguf", max_seq_len=32)
    assert raised.value.got == said


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(BackendError) as raised:
        glass.build(made("llama"), tmp_path / "engine", backend="gguf")
    assert "glassengine[gguf]" in (raised.value.hint or "")


@pytest.mark.slow
def test_a_check_judges_the_file_that_it_would_build(tmp_path: Path) -> None:
    save_checkpoint(made("llama"), tmp_path / "checkpoint")
    found = glass.check(tmp_path / "checkpoint", backend="gguf", steps=0)
    assert found.ok and [level.name for level in found.levels][:1] == ["weights"] and found.coverage == 1.0
    with pytest.raises(UnknownNameError):
        glass.check(tmp_path / "checkpoint", backend="gguf", quantize="Q9_0")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "gpt2"])
def test_tokens_of_other_families(family: str, tmp_path: Path) -> None:
    module = made(family)
    prompts = [[5, 6, 7, 8, 9], [3, 4]]
    engine = glass.build(module, tmp_path / "engine", backend="gguf", max_seq_len=32)
    found = engine.generate(input_ids=prompts, max_new_tokens=6, do_sample=False)
    assert list(map(list, found.token_ids)) == tokens_of(module, prompts, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_an_engine_of_rounded_matrices_is_judged(kind: str, tmp_path: Path) -> None:
    glass.build(MODEL, tmp_path / "engine", backend="gguf", quantize=kind)
    found = glass.check(MODEL, candidate=tmp_path / "engine", steps=1)
    assert found.ok and not found.origins
