"""Flags of the reference documents, by the one table that says what they are called here.

A command that sets `CONTEXT_SETTINGS = foreign.CONTEXT_SETTINGS` accepts them wherever it has the flag of ours; the
help shows ours alone.
"""

from __future__ import annotations

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
    "output_dir": "output-dir",
    "profiling_verbosity": "profiling-verbosity",
    "random_seed": "seed",
    "repetition_penalty": "repetition-penalty",
    "tokenizer_dir": "tokenizer",
    "top_k": "top-k",
    "top_p": "top-p",
    "use_gpt_attention_plugin": "use-gpt-attention-plugin",
    "use_py_session": "use-py-session",
    "visualize_network": "visualize-network",
}


def ours(flag: str) -> str:
    """Return our spelling of a flag, given and returned without its dashes."""
    return SPELLINGS.get(flag, flag)


CONTEXT_SETTINGS: dict[str, Any] = {"token_normalize_func": ours}
