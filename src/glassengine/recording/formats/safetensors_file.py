"""`.safetensors` files, mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from glassengine.errors import CorruptError
from glassengine.reading.arrays import shape_from
from glassengine.reading.tensors import open_safetensors
from glassengine.recording.layout.description import PAD_PREFIX
from glassengine.recording.layout.layout import STORED, Entry, num_bytes
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {one.code: dtype for dtype, one in STORED.items() if one.parts == 1}


class SafetensorsFile:
    """Tensors of a `.safetensors` file; its metadata are the file's `__metadata__`.

    Raises:
        CorruptError: The file is damaged.
    """

    complete = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_safetensors(path)
            self.metadata: dict[str, Any] = dict(self._file.metadata() or {})
            entries: list[Entry] = []
            skipped: list[Skipped] = []
            for name in self._file.offset_keys():
                found = self._file.get_slice(name)
                code, shape = found.get_dtype(), shape_from(found.get_shape())
                if name.startswith(PAD_PREFIX):
                    skipped.append(Skipped(name, "both", "alignment padding of a recording", step=0))
                elif code not in _NAMES:
                    skipped.append(Skipped(name, "both", f"no arithmetic for {code}", step=0))
                else:
                    nbytes = num_bytes(_NAMES[code], shape)
                    entries.append(Entry(name, 0, 0, _NAMES[code], shape, nbytes=nbytes))
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptError("not a safetensors file", got=f"{path}: {error}") from error
        self.entries = tuple(entries)
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        tensor: Tensor = self._file.get_tensor(entry.site)
        return tensor
