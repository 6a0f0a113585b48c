"""`.pt` and `.pth` files, mapped into memory, with `weights_only=True`: reading one never runs code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError
from glassengine.reading.tensors import read_torch
from glassengine.recording.layout.layout import STORED, Entry
from glassengine.results import Skipped
from glassengine.writing.files import open_for_torch

if TYPE_CHECKING:
    from torch import Tensor

# A small file can name one list many times over; these bound what it unfolds to.
_MAX_DEPTH = 64
_MAX_LEAVES = 400_000
_MAX_EXPANDED_BYTES = 1 << 34


class TorchFile:
    """Tensors of a `.pt` file; nested dicts, lists and tuples are flattened to dotted names.

    Raises:
        CorruptError: The file is damaged, would run code, or cannot be mapped.
    """

    complete = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        entries: list[Entry] = []
        skipped: list[Skipped] = []
        for name, leaf in _leaves("", read_torch(path), 0, [0]):
            value = of_number(leaf)
            reason = "two entries have this name" if name in self._tensors else why_not_a_tensor(value)
            if reason is not None:
                skipped.append(Skipped(name, "both", reason, step=0))
                continue
            self._tensors[name] = value
            dtype = str(value.dtype).removeprefix("torch.")
            nbytes = value.numel() * value.element_size()
            entries.append(Entry(name, 0, 0, dtype, tuple(value.shape), nbytes=nbytes))
        self.entries = tuple(entries)
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        return self._tensors[entry.site]


def save_pt(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a `.pt` file of a plain dict.

    Raises:
        OSError: It cannot be written, for want of room, say.
    """
    import torch

    with open_for_torch(path) as file:
        torch.save(dict(tensors), file)


def _leaves(name: str, value: Any, depth: int, count: list[int]) -> Iterator[tuple[str, Any]]:
    count[0] += 1
    if count[0] > _MAX_LEAVES or depth > _MAX_DEPTH:
        raise CorruptError("the file nests too deeply or holds too much", got=f"at {name[:200]!r}")
    children: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    else:
        yield name or "tensor", value
        return
    for key, child in children:
        yield from _leaves(f"{name}.{key}" if name else str(key), child, depth + 1, count)


def of_number(value: Any) -> Any:
    """Return a number as a tensor without dimensions, of float32 where that holds it: `item()` of such a tensor."""
    import torch

    if isinstance(value, float):
        found = torch.tensor(value, dtype=torch.float32)
        is_held = found.item() == value or math.isnan(value)
        return found if is_held else torch.tensor(value, dtype=torch.float64)
    is_whole = isinstance(value, int) and (value.bit_length() < 64)
    return torch.tensor(value) if is_whole or isinstance(value, complex) else value


def why_not_a_tensor(value: Any) -> str | None:
    """Return why `value` is not given as a tensor, or None."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"not a tensor: {type(value).__name__}"
    if value.is_quantized or value.is_meta or value.layout != torch.strided:
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
        return f"not a dense tensor: {kind}"
    if value.nbytes > max(value.untyped_storage().nbytes(), _MAX_EXPANDED_BYTES):
        return f"{value.untyped_storage().nbytes()} bytes that are expanded to {value.nbytes}"
    if str(value.dtype).removeprefix("torch.") not in STORED:
        return f"no arithmetic for {value.dtype}"
    return None
