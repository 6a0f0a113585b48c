"""Load what a user calls --inputs: a factory, or a file of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from glassengine.errors import UnknownNameError, UsageError
from glassengine.program.factory import call_factory, is_factory


def load_inputs(spec: str) -> list[dict[str, Any]]:
    """Load keyword arguments, one dict per step.

    Args:
        spec: `file.py:factory` that returns a dict or a list of dicts, or a file: .pt, .safetensors, .npz, .json.

    Raises:
        UsageError: No such file, an unknown ending, or something else than dicts of tensors and plain values.
    """
    if is_factory(spec):
        return _steps(call_factory(spec), spec)
    path = Path(spec)
    if not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*") if p.is_file()] if path.parent.is_dir() else []
        raise UnknownNameError("inputs file", spec, siblings, hint="--inputs FILE, or --inputs file.py:factory")
    try:
        return _steps(_read(path), spec)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{path} cannot be read", got=f"{type(error).__name__}: {error}") from error


def _read(path: Path) -> Any:
    if path.suffix in (".pt", ".pth"):
        return torch.load(path, map_location="cpu", weights_only=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".npz":
        import numpy as np

        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(archive[name]) for name in archive.files}
    if path.suffix == ".json":
        return json.loads(path.read_text(), object_hook=_tensors)
    raise UsageError(f"{path} has an unknown ending", got=path.suffix, expected=".pt, .safetensors, .npz, .json")


def _tensors(data: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.tensor(value) if isinstance(value, list) else value for key, value in data.items()}


def _steps(data: Any, spec: str) -> list[dict[str, Any]]:
    steps = list(data) if isinstance(data, (list, tuple)) else [data]
    if not steps or not all(isinstance(step, Mapping) for step in steps):
        kinds = ", ".join(sorted({type(step).__name__ for step in steps})) or "nothing"
        raise UsageError(
            f"{spec} does not hold inputs", got=kinds, expected="a dict of keyword arguments, or a list of them"
        )
    return [dict(step) for step in steps]
