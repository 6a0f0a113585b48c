"""What a caller gives as inputs, before cases are made of it: a name, keyword arguments of each step, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine.program import load_inputs
from glassengine.program.inputs.given import steps_of

Inputs = str | Sequence[Mapping[str, Any]] | None
"""What `--inputs` names: a text file of prompts, keyword arguments of each step, or nothing."""

OF_TOKENS = ("input_ids", "attention_mask")


def as_inputs(inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> Inputs:
    """Return what a caller gave as `--inputs` names it, or one dict a step; raises `UsageError` for anything else."""
    if inputs is None or isinstance(inputs, str | Path):
        return None if inputs is None else str(inputs)
    return steps_of(inputs, "inputs")


def read_inputs(inputs: Inputs) -> Inputs:
    """Return the tensors that `inputs` names, or itself where it is a text file, None or tensors already."""
    return load_inputs(inputs) if isinstance(inputs, str) and Path(inputs).suffix != ".txt" else inputs


def beside_tokens(inputs: Inputs) -> list[str]:
    """Return the keyword arguments that a decode loop does not use: images, embeddings, explicit positions."""
    if inputs is None or isinstance(inputs, str):
        return []
    return list(dict.fromkeys(key for step in inputs for key in step if key not in OF_TOKENS))


def in_one_forward(inputs: Inputs) -> Inputs:
    """Return the inputs of a causal LM for forwards that nothing follows: no cache comes out of them."""
    return inputs if inputs is None or isinstance(inputs, str) else [{"use_cache": False, **step} for step in inputs]
