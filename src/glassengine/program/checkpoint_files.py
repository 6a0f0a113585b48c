"""The files with the weights of a checkpoint or an adapter, read as tensors and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from glassengine.errors import CorruptError, UsageError

_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def weight_files(spec: str, revision: str = "main") -> list[Path]:
    """Return the files with the weights of a checkpoint.

    Args:
        spec: Hugging Face directory or id.
        revision: Of a hub id.

    Raises:
        UsageError: There are none.
        CorruptError: The index names files outside of the directory, or that are not there.
    """
    for name in _NAMES:
        path = _find(spec, name, revision)
        if path is not None:
            return _shards(spec, path, revision) if path.suffix == ".json" else [path]
    raise UsageError(f"{spec} has no weights", expected=f"one of {', '.join(_NAMES)}")


def read_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the tensors of safetensors or PyTorch files by name; nothing in them is run.

    Raises:
        CorruptError: A file cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                found = load_file(path)
            else:
                found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptError(f"{path} cannot be read", got=f"{type(error).__name__}: {error}") from error
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise CorruptError(f"{path} does not hold tensors by name", got=type(found).__name__)
        tensors |= found
    return tensors


def read_headers(files: Sequence[Path]) -> dict[str, str]:
    """Return the metadata of the safetensors among `files`."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found |= file.metadata() or {}
    return found


def _find(spec: str, name: str, revision: str) -> Path | None:
    directory = Path(spec).expanduser()
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(spec, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _shards(spec: str, index: Path, revision: str) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{index} cannot be read", got=f"{type(error).__name__}: {error}") from error
    paths = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise CorruptError(f"{index} names a file outside of its directory", got=str(name))
        path = _find(spec, name, revision)
        if path is None:
            raise CorruptError(f"{index} names a file that is not there", got=name)
        paths.append(path)
    return paths
