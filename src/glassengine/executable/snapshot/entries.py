"""Inputs and outputs of a snapshot on their way to its files: an entry for each, whether or not it has values there."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from glassengine.executable.snapshot import layout
from glassengine.executable.snapshot.layout import Entry, plain_entry
from glassengine.executable.snapshot.tensors import file_key, obstacle, write_tensors
from glassengine.executable.snapshot.weights import Home, Place, SharedWeights
from glassengine.recording.layout.statistics import summarize
from glassengine.recording.layout.values import bytes_of, dtype_name

_WEIGHT_KINDS = ("parameter", "buffer", "constant")


class EntryWriter:
    """Writes values, and knows which weights are in files already.

    Args:
        redact: Write no values; entries have statistics and hashes instead.
    """

    def __init__(self, redact: bool) -> None:
        self._redact = redact
        self._weights = SharedWeights()

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor are probably in a file already."""
        return self._weights.is_known(tensor)

    def write(
        self, home: Home, file: str, values: Mapping[str, tuple[str, Any]], *, constant: Container[str] = ()
    ) -> list[Entry]:
        """Write the values that can be written.

        Args:
            home: Of the snapshot.
            file: For all values but weights, which have files of their own.
            values: Name -> (kind, value).
            constant: Names of tensors that never change.

        Returns:
            An entry for each value, in their order.

        Raises:
            OSError: A file cannot be written.
        """
        assert home.path is not None
        found: dict[str, Entry] = {}
        tensors: dict[str, Tensor] = {}
        for name, (kind, value) in values.items():
            problem = obstacle(value)
            if not isinstance(value, Tensor):
                found[name] = plain_entry(name, kind, value)
                if self._redact and isinstance(value, (float, str)):
                    found[name] = dataclasses.replace(found[name], value=None, left_out="redacted")
                continue
            found[name] = _tensor_entry(name, kind, value)
            if problem is not None:
                found[name] = dataclasses.replace(found[name], left_out=problem)
            elif self._redact:
                found[name] = _redacted(found[name], value)
            else:
                tensors[name] = value
        weights = {name for name in tensors if values[name][0] in _WEIGHT_KINDS}
        places = self._weights.place(home, tensors, weights, constant) if file == layout.INPUTS else {}
        rest = {name: tensor for name, tensor in tensors.items() if name not in places}
        if rest:
            checksums = write_tensors(home.path / file, {file_key(name): tensor for name, tensor in rest.items()})
            places |= {name: Place(file, file_key(name), checksums[file_key(name)]) for name in rest}
        for name, place in places.items():
            found[name] = dataclasses.replace(found[name], file=place.file, key=place.key, crc32=place.crc32)
        return list(found.values())


def _tensor_entry(name: str, kind: str, tensor: Tensor) -> Entry:
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    return Entry(name, kind, dtype_name(tensor.dtype), tuple(tensor.shape), stride, str(tensor.device))


def _redacted(entry: Entry, tensor: Tensor) -> Entry:
    digest = hashlib.sha256(bytes_of(tensor.detach())).hexdigest()
    return dataclasses.replace(entry, sha256=digest, statistics=summarize(tensor.detach()).to_dict())
