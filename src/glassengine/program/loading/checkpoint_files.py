"""The files of a checkpoint: its weights, read as tensors and nothing else, and the class that takes them.

A causal language model of a known configuration goes through transformers' own automatic class, which also serves
checkpoints that come with code. Everything else is what `architectures` of its configuration names.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import read_document
from glassengine.reading.files import shown
from glassengine.reading.tensors import check_unfolded, open_safetensors, read_safetensors, read_torch

_MAX_INDEX_BYTES = 64 << 20


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def weight_files(spec: str, revision: str = "main") -> list[Path]:
    """Return the files with the weights of a checkpoint.

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
        # Files of the hub's cache are links.
        found = read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path, old=True)
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise CorruptError(f"{path} does not hold tensors by name", got=type(found).__name__)
        check_unfolded(found, str(path))
        tensors |= found
    return tensors


def read_headers(files: Sequence[Path]) -> dict[str, str]:
    """Return the metadata of the safetensors among `files`."""
    metadata: dict[str, str] = {}
    for path in files:
        if path.suffix == ".safetensors":
            with open_safetensors(path) as file:
                metadata |= file.metadata() or {}
    return metadata


def num_tensors(directory: Path) -> int:
    """Return how many tensors the checkpoint in a directory names; 0 if only the weights have that.

    Raises:
        UsageError: A file cannot be read.
        CorruptError: The same; it is damaged.
    """
    first = next((directory / name for name in _NAMES if (directory / name).is_file()), None)
    if first is not None and first.suffix == ".json":
        return len(read_document(first, _Index, most=_MAX_INDEX_BYTES, nonfinite=True).weight_map)
    if first is not None and first.suffix == ".safetensors":
        with open_safetensors(first) as file:
            return len(file.keys())
    return 0


def require_plain_files(directory: Path) -> None:
    """Refuse a checkpoint with a pipe or a device among its files, before a library waits for it for ever.

    Raises:
        UsageError: There is one. A link to a plain file is one, as in the hub's cache.
        CorruptError: Its index names files elsewhere, which a library would read.
    """
    first = next((name for name in _NAMES if (directory / name).is_file()), "")
    if first.endswith(".json"):
        _shard_names(directory / first)
    for path in sorted(directory.iterdir()):
        if not path.is_dir() and path.exists():
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                raise UsageError(
                    f"{shown(directory)} is not a checkpoint",
                    got=f"{shown(path.name)} is not a plain file",
                    expected="a directory of plain files, or links to them",
                )


def _find(spec: str, name: str, revision: str) -> Path | None:
    directory = Path(spec).expanduser()
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(spec, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _shard_names(index: Path) -> list[str]:
    names = sorted(set(read_document(index, _Index, most=_MAX_INDEX_BYTES, nonfinite=True).weight_map.values()))
    for name in names:
        if not name or "\0" in name or Path(name).name != name or "\\" in name:
            raise CorruptError(f"{index} names a file outside of its directory", got=shown(name))
    return names


def _shards(spec: str, index: Path, revision: str) -> list[Path]:
    paths = []
    for name in _shard_names(index):
        path = _find(spec, name, revision)
        if path is None:
            raise CorruptError(f"{index} names a file that is not there", got=name)
        paths.append(path)
    return paths


def model_class_of(config: Any, *, is_sentence_encoder: bool = False) -> Any:
    """Return the class to load with.

    Args:
        config: Configuration of the checkpoint.
        is_sentence_encoder: Whether the checkpoint is one of sentence-transformers, which uses the base model without
            a head, independent of the class it was saved from.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if is_sentence_encoder:
        return transformers.AutoModel
    remote = getattr(config, "auto_map", None) or {}
    named = (getattr(config, "architectures", None) or [""])[0]
    causal = CAUSAL.get(config.model_type, ())
    is_causal = named in causal if isinstance(causal, (list, tuple)) else named == causal
    if "AutoModelForCausalLM" in remote or is_causal or (not named and causal):
        return transformers.AutoModelForCausalLM
    automatic = next((name for name in remote if name.startswith("AutoModel")), "AutoModel")
    own = None if automatic in remote else getattr(transformers, named, None)
    return own if isinstance(own, type) and issubclass(own, nn.Module) else getattr(transformers, automatic)


def without_weights(model_class: Any, config: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Return a model of `model_class` on the meta device; `options` as for `from_pretrained`."""
    make = getattr(model_class, "from_config", None)
    if make is None:
        # A plain class has this counterpart, which the automatic ones end in as well; it runs no code of a checkpoint.
        options.pop("trust_remote_code", None)
        make = model_class._from_config
    with torch.device("meta"):
        module: nn.Module = make(config, dtype=dtype, **options)
    return module
