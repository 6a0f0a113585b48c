"""`.safetensors` files in a store: the header is read, and then the ranges of the tensors that are asked for."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from glassengine.errors import CorruptError
from glassengine.reading.documents import parsed
from glassengine.recording.formats.safetensors_file import SafetensorsFile
from glassengine.recording.layout.layout import Entry
from glassengine.stores import objects
from glassengine.stores.places import Remote
from glassengine.stores.ranges import read_range

if TYPE_CHECKING:
    from torch import Tensor

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format


class SafetensorsObject(SafetensorsFile):
    """Tensors of a `.safetensors` file in a store.

    Raises:
        UsageError: The store cannot be asked.
        CorruptError: The file is damaged.
    """

    def __init__(self, path: Remote) -> None:
        url = str(path)
        self._found = objects.require(url)
        size = int.from_bytes(objects.read(url, 0, min(8, self._found.size)), "little")
        if self._found.size < 8 or size > min(_MAX_HEADER_BYTES, self._found.size - 8):
            raise CorruptError("not a safetensors file", got=f"{url}: its header does not fit in it")
        header = objects.read(url, 0, 8 + size)
        # What the format demands of a header is checked by its own library, on a hollow file.
        with tempfile.NamedTemporaryFile(prefix="glassengine-", suffix=".safetensors") as file:
            file.write(header)
            file.truncate(self._found.size)
            file.flush()
            try:
                super().__init__(Path(file.name))
            except CorruptError as error:
                raise CorruptError(error.what, got=str(error.got).replace(file.name, url)) from error
        fields = parsed(header[8:], dict[str, dict[str, object]], url, what="the header", items=1 << 30)
        self._starts = {entry.site: 8 + size + _start(fields[entry.site], url) for entry in self.entries}
        self.path = path

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, in memory of their own.

        Raises:
            CorruptError: The file has changed since it was opened.
        """
        import torch

        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        data = read_range(self._found, self._starts[entry.site], entry.nbytes)
        # Nothing else says whether these are the bytes that the header was of.
        difference = self._found.change()
        if difference is not None:
            raise CorruptError("a file has changed since it was opened", got=f"{self._found.url}: {difference}")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(entry.shape)


def _start(field: dict[str, object], url: str) -> int:
    offsets = field.get("data_offsets")
    if not isinstance(offsets, list) or not isinstance(offsets[0], int):
        raise CorruptError("not a safetensors file", got=f"{url}: {json.dumps(offsets)[:100]}")
    return offsets[0]
