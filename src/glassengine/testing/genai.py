"""Folders as the model builder of onnxruntime-genai makes them, of checkpoints on this machine."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from pathlib import Path
from typing import Any


def build_genai(checkpoint: Path, folder: Path, precision: str = "fp32", *options: str) -> Path:
    """Build a folder of onnxruntime-genai for the processor, without the network; return it.

    The builder prints what it does, and warns of versions of other packages: both are left out.

    Args:
        checkpoint: Directory of a model of transformers with its tokenizer.
        folder: Where `model.onnx` and `genai_config.json` are written.
        precision: "fp32" or "int4".
        options: Extra options of the builder, `NAME=VALUE`.

    Raises:
        KeyError: The builder does not know the configurations of this transformers, as those of Gemma 3.
    """
    builder = importlib.import_module("onnxruntime_genai.models.builder")
    where: Any = ("", str(checkpoint), str(folder), precision, "cpu", str(folder / "cache"))
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder.create_model(*where, **builder.parse_extra_options(*where, list(options)))
    return folder
