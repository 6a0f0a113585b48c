"""The tensors of a checkpoint, by module: what a quantized weight is put together from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import CorruptError, UsageError
from glassengine.program.quantized.grid import Grid

Read = Iterator[tuple[str, Tensor | Grid]]


@dataclass(frozen=True)
class Parts:
    """What a format is given to read.

    Attributes:
        tensors: Name -> tensor of all files.
        settings: `quantization_config` of config.json.
        metadata: Strings of the headers of the safetensors files.
    """

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    metadata: Mapping[str, str]

    def of(self, module: str, *names: str) -> tuple[Tensor, ...]:
        """Return tensors of one module by their own names.

        Raises:
            CorruptError: One is missing.
        """
        missing = [name for name in names if f"{module}.{name}" not in self.tensors]
        if missing:
            raise CorruptError(f"the quantized weight of {module} lacks {', '.join(missing)}")
        return tuple(self.tensors[f"{module}.{name}"] for name in names)

    def maybe(self, module: str, name: str) -> Tensor | None:
        """Return a tensor of one module, or None."""
        return self.tensors.get(f"{module}.{name}")


def modules_with(parts: Parts, suffix: str) -> list[str]:
    """Return the modules that have a tensor of this name."""
    return [name.removesuffix(f".{suffix}") for name in parts.tensors if name.endswith(f".{suffix}")]


def rest(parts: Parts, used: set[str]) -> Read:
    """Yield the tensors that no quantized weight is made of."""
    for name, tensor in parts.tensors.items():
        if name not in used:
            yield name, tensor


def require(condition: bool, what: str, got: Any, expected: str) -> None:
    """Refuse a variant of a format that is not read.

    Raises:
        UsageError: `condition` does not hold.
    """
    if not condition:
        raise UsageError(f"{what} is not read", got=str(got), expected=expected, hint=ELSEWHERE)


def check_indices(indices: Tensor, number: int, what: str) -> Tensor:
    """Return `indices` as int64.

    Raises:
        CorruptError: One is outside of 0 to `number` - 1.
    """
    wide = indices.to(torch.int64)
    if wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < number:
        raise CorruptError(f"{what} names a group that is not there", expected=f"0 to {number - 1}")
    return wide


ELSEWHERE = "dequantize it with its own package, call save_pretrained, and use that directory"
