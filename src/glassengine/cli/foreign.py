"""Flags of the reference documents, by the one table that says what they are called here.

A command that sets `CONTEXT_SETTINGS = foreign.CONTEXT_SETTINGS` accepts them wherever it has the flag of ours; the
help shows ours alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Spelling in TensorRT-LLM's and Ditto's documents and scripts -> ours, without dashes.
SPELLINGS = {
    "add_output": "add-output",
    "checkpoint_dir": "model-dir",
    "debug_mode": "debug-mode",
    "engine_dir": "engine-dir",
    "input_file": "input-file",
    "input_text": "input-text",
    "max-output-len": "max-new-tokens",
    "max_batch_size": "max-batch-size",
    "max_new_tokens": "max-new-tokens",
    "max_output_len": "max-new-tokens",
    "max_seq_len": "max-seq-len",
    "model_dir": "model-dir",
    "output-dir": "output",
    "output_dir": "output",
    "pp-size": "pipeline-parallel",
    "pp_size": "pipeline-parallel",
    "profiling_verbosity": "profiling-verbosity",
    "random_seed": "seed",
    "repetition_penalty": "repetition-penalty",
    "storage-type": "dtype",
    "storage_type": "dtype",
    "tensor-parallelism": "tensor-parallel",
    "tokenizer_dir": "tokenizer",
    "top_k": "top-k",
    "top_p": "top-p",
    "tp-size": "tensor-parallel",
    "tp_size": "tensor-parallel",
    "use_gpt_attention_plugin": "use-gpt-attention-plugin",
    "use_py_session": "use-py-session",
    "visualize_network": "visualize-network",
}

_RANKS = (
    "ranks are counted by layer shares and by stages",
    "when building: glass build MODEL --tensor-parallel N --pipeline-parallel M",
)
_ADAPTERS = ("adapters are not chosen at run time", "merge one when building: glass build MODEL --adapter DIR")
_PLUGINS = ("no plugins exist: attention is an op of every program", "remove the flag")
_BEAMS = ("tokens are chosen greedily or by sampling, not by a search", "remove the flag, or --do-sample")

# Flags of those tools that mean nothing here -> why, and what there is instead. Without dashes, in either spelling.
ABSENT: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("cp-size", "world-size", "gpus-per-node", "workers", "auto-parallel"), _RANKS),
    **dict.fromkeys(("tp-size", "pp-size", "tensor-parallelism"), _RANKS),  # where no engine is built
    **dict.fromkeys(("peft-ids", "lora-dir", "lora-task-uids", "lora-ckpt-source", "hf-lora-dir"), _ADAPTERS),
    **dict.fromkeys(("gpt-attention-plugin", "gemm-plugin", "use-gemm-plugin", "use-layernorm-plugin"), _PLUGINS),
    **dict.fromkeys(("num-beams", "beam-width", "max-beam-width"), _BEAMS),
    "max-num-tokens": ("the tokens of a step are not limited", "--max-batch-size and --max-seq-len limit an engine"),
    "max-input-len": ("prompts have no limit of their own", "--max-seq-len limits prompt and generated tokens"),
}


def absent(flag: str) -> tuple[str, str] | None:
    """Return why there is no such flag and what there is instead, of one that users of other tools know."""
    return ABSENT.get(flag.lstrip("-").replace("_", "-"))


def ours(flag: str) -> str:
    """Return our spelling of a flag, given and returned without its dashes."""
    return SPELLINGS.get(flag, flag)


def renamed(spellings: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a command whose flags had other names before; names are given without dashes."""
    return {"token_normalize_func": lambda flag: spellings.get(flag, flag)}


CONTEXT_SETTINGS: dict[str, Any] = renamed(SPELLINGS)
