"""A configuration describes a model of any size; its checkpoint says how large one it can be.

transformers makes what the configuration describes before it looks for weights: it fills those that are missing, or of
another shape, with random numbers, in memory, and reports them afterwards. One kilobyte may ask for a terabyte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from glassengine.errors import CorruptError, GlassError
from glassengine.program.loading.checkpoint_files import num_tensors
from glassengine.reading.documents import objects_within
from glassengine.reading.files import shown

# Of modules without weights, as activations are; one takes 6 KB, so that these are 600 MB.
_MODULES = 100_000
_MODULES_PER_TENSOR = 8
# Of tables that are computed, and of parameters that a checkpoint may have in 2 bits and a model in 64.
_BYTES = 1 << 29
_BYTES_PER_BYTE = 32
_MAX_COUNT = 100_000
_COUNTED = ("layer", "num_labels")
"""What of a model configurations make lists of, by a part of the name, before there is a model."""


def require_countable(config: Any, where: str) -> None:
    """Refuse a configuration that counts its layers or labels in millions.

    Raises:
        CorruptError: It does.
    """
    for value in objects_within(config):
        for name, number in value.items():
            if isinstance(number, int) and number > _MAX_COUNT and any(part in name for part in _COUNTED):
                got = f"{shown(where)}: {shown(name)} of {number:,}"
                raise CorruptError("a configuration is out of proportion", got=got, expected=f"{_MAX_COUNT:,}")


@contextlib.contextmanager
def in_proportion(directory: Path, *, weights: bool) -> Iterator[None]:
    """Refuse a model that is made meanwhile and is out of proportion to the files of its checkpoint.

    Args:
        directory: With configuration and weights; for anything else only modules are counted.
        weights: Whether memory is taken for parameters.

    Raises:
        CorruptError: It is; from where the model is made.
    """
    has_bytes, has_tensors = 0, 0
    if directory.is_dir():
        has_bytes = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
        with contextlib.suppress(GlassError):  # which is raised when they are read
            has_tensors = num_tensors(directory)
    most_bytes = _BYTES + _BYTES_PER_BYTE * has_bytes if weights and directory.is_dir() else None
    most_modules = _MODULES + _MODULES_PER_TENSOR * has_tensors
    described = num_modules = 0

    def module_made(*_: Any) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > most_modules:
            raise _refusal(directory, f"more than {num_modules - 1:,} modules", f"{has_tensors:,} tensors")

    def tensor_made(module: nn.Module, name: str, tensor: Any) -> None:
        nonlocal described
        # Those that are loaded take the place of those that were described.
        if isinstance(tensor, Tensor) and tensor.is_meta and most_bytes is not None:
            described += tensor.nbytes
            if described > most_bytes:
                raise _refusal(directory, f"{described:,} bytes and more", f"{has_bytes:,} bytes")

    with (
        hooks.register_module_module_registration_hook(module_made),
        hooks.register_module_parameter_registration_hook(tensor_made),
        hooks.register_module_buffer_registration_hook(tensor_made),
    ):
        yield


def _refusal(directory: Path, described: str, there: str) -> CorruptError:
    return CorruptError(
        "a configuration is out of proportion to the weights of its checkpoint",
        got=f"{shown(directory)}: it describes {described}, and its files have {there}",
        expected="the configuration that the weights were saved with",
    )
