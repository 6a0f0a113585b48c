"""Programs of the corpus: causal language models of regular and of odd shapes, other architectures as plain modules.

All random and tiny but `llama-1024`; `bundled` names the trained model that comes with the repository.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine.judge.cases import module_cases
from glassengine.program import export_program, load_model
from glassengine.testing import models
from glassengine.testing.models import from_config
from tests.corpus.corpus import Bench, padded_case

Inputs = Sequence[Mapping[str, Any]]


def _token_steps(**more: Any) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    steps = []
    for _ in range(2):
        ids = torch.randint(3, 200, (2, 10), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        steps.append({"input_ids": ids, "attention_mask": mask, **more})
    return steps


def _image_steps(size: int) -> Inputs:
    generator = torch.Generator().manual_seed(4)
    return [{"pixel_values": torch.randn((2, 3, size, size), generator=generator)} for _ in range(2)]


def bert() -> nn.Module:
    """Return a BERT encoder."""
    config = {**models.ENCODER, "vocab_size": 256, "max_position_embeddings": 64}
    return from_config("BertModel", "BertConfig", config, add_pooling_layer=False)


def t5() -> nn.Module:
    """Return a T5, encoder and decoder: relative positions, no scale in attention, attention across."""
    sizes = {"d_model": 64, "d_kv": 20, "d_ff": 128, "num_layers": 1, "num_heads": 3, "vocab_size": 256}
    config = {**sizes, "decoder_start_token_id": 0, "use_cache": False}
    return from_config("T5ForConditionalGeneration", "T5Config", config)


def mamba() -> nn.Module:
    """Return a Mamba without a cache: a scan instead of attention."""
    config = {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "vocab_size": 256, "use_cache": False}
    return from_config("MambaModel", "MambaConfig", config)


def llama_1024() -> nn.Module:
    """Return a Llama of hidden size 1024, one layer."""
    return models.llama(
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=2048,
    )


_ODD = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "vocab_size": 77,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama_odd() -> nn.Module:
    """Return a Llama of odd sizes: one key head, biases, tied embeddings, stretched rotary positions."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    more = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": rope}
    return models.llama(**_ODD, **more)


def gemma2() -> nn.Module:
    """Return a Gemma 2: capped scores and logits, attention written out, a sliding window shorter than the prompt."""
    more = {"sliding_window": 6, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    return from_config("Gemma2ForCausalLM", "Gemma2Config", {**_ODD, **more})


def qwen3_moe() -> nn.Module:
    """Return a Qwen3 mixture of ten experts, eight per token."""
    experts = {"num_experts": 10, "num_experts_per_tok": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return from_config("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_ODD, **experts, "norm_topk_prob": True})


def deepseek() -> nn.Module:
    """Return a DeepSeek V3: compressed keys, groups of experts, tensors assembled in memory that was not written."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    more = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 3}
    config = {**_ODD, **ranks, **experts, **more}
    del config["head_dim"]
    return from_config("DeepseekV3ForCausalLM", "DeepseekV3Config", config)


def bloom() -> nn.Module:
    """Return a BLOOM: a slope of scores instead of positions, one product for query, key and value with a bias."""
    config = {"hidden_size": 48, "n_layer": 2, "n_head": 3, "vocab_size": 77}
    return from_config("BloomForCausalLM", "BloomConfig", config)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "bert": (bert, _token_steps),
    "vit": (models.vit, lambda: _image_steps(16)),
    "t5": (t5, lambda: [{**step, "decoder_input_ids": step["input_ids"][:, :5].clone()} for step in _token_steps()]),
    "mamba": (mamba, lambda: [{"input_ids": step["input_ids"]} for step in _token_steps()]),
    "resnet": (models.resnet, lambda: _image_steps(32)),
}
"""Name -> model and its inputs, one dict per step."""

CAUSAL_LMS: dict[str, Callable[[], nn.Module]] = {
    **models.CAUSAL_LMS,
    "llama-odd": llama_odd,
    "gemma2": gemma2,
    "qwen3-moe": qwen3_moe,
    "deepseek": deepseek,
    "bloom": bloom,
    "llama-1024": llama_1024,
}
BUNDLED = "bundled"
FAMILIES = (*CAUSAL_LMS, *MODULES, BUNDLED)


def make_bench(family: str, dtype: str, *, seed: int = 0, bundled: Path | None = None) -> Bench:
    """Return the program of a family with inputs.

    Args:
        family: One of `FAMILIES`.
        dtype: "float32", "bfloat16" or "float16".
        seed: Of the prompts.
        bundled: Directory of the trained model.
    """
    name = f"{family}/{dtype}"
    if family in MODULES:
        make, inputs = MODULES[family]
        parameter = getattr(torch, dtype)
        steps = [
            {key: value.to(parameter) if value.is_floating_point() else value for key, value in step.items()}
            for step in inputs()
        ]
        model = load_model(make(), dtype=dtype)
        return Bench(name, model, export_program(model, inputs=steps), module_cases(steps)[0])
    model = load_model(bundled if family == BUNDLED and bundled else CAUSAL_LMS[family](), dtype=dtype)
    vocabulary = int(model.metadata.get("vocab_size", models.VOCAB_SIZE))
    return Bench(name, model, export_program(model), padded_case(vocabulary, seed=seed))
