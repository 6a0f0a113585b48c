"""One protocol over everything that holds named tensors: recordings and foreign files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from glassengine.errors import UsageError, nearest
from glassengine.recording.formats.numpy_file import NumpyFile
from glassengine.recording.formats.safetensors_file import SafetensorsFile
from glassengine.recording.formats.torch_file import TorchFile
from glassengine.recording.layout import MANIFEST, Entry
from glassengine.recording.reader import Recording
from glassengine.results import Skipped


class TensorSource(Protocol):
    """Named tensors that can be read one at a time.

    In a foreign file every tensor has step 0, rank 0 and its key as site.
    """

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def metadata(self) -> dict[str, Any]:
        """What is known about it; empty in most foreign files."""

    @property
    def complete(self) -> bool:
        """Whether everything that was meant to be in it is."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors in recorded order."""

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What is in it and is not given as a tensor, with the reason; `side` is "both" until a side is known."""

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""


_FORMATS: dict[str, type[TorchFile] | type[SafetensorsFile] | type[NumpyFile]] = {
    ".pt": TorchFile,
    ".pth": TorchFile,
    ".safetensors": SafetensorsFile,
    ".npz": NumpyFile,
}


def open_source(path: str | Path) -> TensorSource:
    """Open a recording directory, `.pt`, `.pth`, `.safetensors` or `.npz`.

    Raises:
        UsageError: It does not exist or is of no known kind.
        CorruptError: It is damaged, would run code, or is written by a newer version.
    """
    source = Path(path)
    if not source.exists():
        there = [item.name for item in source.parent.iterdir()] if source.parent.is_dir() else []
        close = nearest(source.name, there)
        raise UsageError("there is no such file", got=str(source), expected=close or None)
    if source.is_dir():
        if not (source / MANIFEST).exists():
            raise UsageError("not a recording", got=str(source), expected=f"a directory that holds {MANIFEST}")
        return Recording.open(source)
    kind = _FORMATS.get(source.suffix.lower())
    if kind is None:
        raise UsageError(
            "the kind of file is not known", got=str(source), expected=["a recording directory", *_FORMATS]
        )
    return kind(source)
