"""Recognizes candidates with quantized weights; the plugin `quantized` judges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glassengine.program import LoadedModel
from glassengine.program.loading.quantized import is_quantized
from glassengine.program.loading.quantized_grid import QuantizedModule, quantized_module
from glassengine.program.onnx.grids import is_quantized_graph


def is_quantized_candidate(baseline: Any, candidate: Any) -> bool:
    """Whether the candidate is a quantized checkpoint, and the baseline is none."""
    return isinstance(candidate, (str, Path)) and is_quantized(candidate) and not is_quantized(baseline)


def quantized_in_memory(baseline: LoadedModel, candidate: LoadedModel) -> QuantizedModule | None:
    """Return the quantized weights of a candidate; None where none is one of the unquantized baseline's."""
    if candidate.stored is not None or baseline.stored is not None:
        return None
    found = quantized_module(candidate.module)
    if found is None or quantized_module(baseline.module) is not None:
        return None
    known = {name: tensor.shape for name, tensor in baseline.module.named_parameters()}
    return found if any(known.get(name) == step.shape for name, step in found.steps.items()) else None


def is_quantized_file(model: LoadedModel) -> bool:
    """Whether a model is a quantized ONNX file."""
    return model.stored is not None and model.stored.onnx is not None and is_quantized_graph(model.stored.onnx.file)
