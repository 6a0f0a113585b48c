"""What Polygraphy saves as JSON: `RunResults` (`--save-outputs`) and lists of feed dicts (`--save-inputs`).

An iteration is a step. Where several runners are in one file, their names stand in front of the names of the outputs.
Arrays are `.npy` files in base64; only their headers are read until one is asked for, and then only that one.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glassengine.errors import CorruptError
from glassengine.reading.arrays import read_header
from glassengine.reading.tensors import read_torch
from glassengine.recording.formats.json_file import JsonFile, LongText
from glassengine.recording.formats.npy_file import why_not
from glassengine.recording.formats.torch_file import why_not_a_tensor
from glassengine.recording.layout.layout import Entry
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor

_CLASS = "polygraphy_class"
_OLD_CLASS = "__polygraphy_encoded_"
# Enough for any header that is read, and a multiple of four.
_HEAD_BYTES = 16_384


class RunResults:
    """Tensors of one file that Polygraphy saved.

    Raises:
        CorruptError: The structure is not that of results.
    """

    complete = True

    def __init__(self, file: JsonFile) -> None:
        self.path: Path = file.path
        self.metadata: dict[str, Any] = {}
        self._file = file
        self._values: dict[Entry, Any] = {}
        entries: list[Entry] = []
        skipped: list[Skipped] = []
        taken: set[tuple[str, int]] = set()
        for site, step, value in _values(file.document):
            found = "two results have this name" if (site, step) in taken else self._entry(site, step, value)
            if isinstance(found, str):
                skipped.append(Skipped(site, "both", found, step=step))
                continue
            taken.add((site, step))
            self._values[found] = value
            entries.append(found)
        self.entries = tuple(sorted(entries, key=lambda entry: entry.step))
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, in memory of their own.

        Raises:
            CorruptError: They are damaged.
        """
        import torch

        value = self._values[entry]
        try:
            if "tensor" in value:
                return self._torch(value["tensor"])
            data = self._bytes(value["array"])
            file = io.BytesIO(data)
            shape, fortran, dtype = read_header(file)
            # Writable memory: torch cannot hold any other.
            array = np.frombuffer(bytearray(data[file.tell() :]), dtype).reshape(shape, order="F" if fortran else "C")
        except ValueError as error:
            raise CorruptError("an array cannot be read", got=f"{entry.site!r} in {self.path}: {error}") from error
        return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))

    def _entry(self, site: str, step: int, value: Any) -> Entry | str:
        """Return the entry of an encoded array, or why it is not given as a tensor."""
        try:
            if not isinstance(value, dict) or not any(isinstance(value.get(key), str | LongText) for key in _KEYS):
                return "not an array"
            if "tensor" in value:
                tensor = self._torch(value["tensor"])
                reason = why_not_a_tensor(tensor)
                dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
                return reason or Entry(site, step, 0, dtype, tuple(tensor.shape), nbytes=tensor.nbytes)
            text = value["array"]
            file = io.BytesIO(self._bytes(text, _HEAD_BYTES))
            shape, _, array_dtype = read_header(file)
            reason = why_not(array_dtype)
            if reason is not None:
                return reason
            claimed = math.prod(shape) * array_dtype.itemsize
            size = text.num_bytes if isinstance(text, LongText) else len(text)
            padding = (self._file.read(text, size - 2) if isinstance(text, LongText) else text[-2:].encode()).count(
                b"="
            )
            there = size // 4 * 3 - padding - file.tell()
            if claimed != there:
                return f"the header claims {claimed} bytes, the file has {there}"
            return Entry(site, step, 0, array_dtype.newbyteorder("=").name, shape, nbytes=claimed)
        except (ValueError, CorruptError) as error:
            return f"it cannot be read: {str(error)[:200]}"

    def _bytes(self, text: str | LongText, num_bytes: int | None = None) -> bytes:
        written = self._file.read(text, 0, num_bytes) if isinstance(text, LongText) else text.encode()[:num_bytes]
        try:
            return base64.b64decode(written.replace(b"\\/", b"/"), validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error

    def _torch(self, text: str | LongText) -> Tensor:
        loaded: Tensor = read_torch(io.BytesIO(self._bytes(text)), name=str(self.path))
        return loaded


_KEYS = ("array", "tensor")


def is_run_results(document: Any) -> bool:
    """Return whether a JSON document is what Polygraphy saves: results of runners, or a list of feed dicts."""
    if isinstance(document, dict):
        return document.get(_CLASS) == "RunResults" or f"{_OLD_CLASS}RunResults" in document
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(feed, dict) for feed in document)
        and any(
            isinstance(value, dict) and not {_CLASS, f"{_OLD_CLASS}ndarray"}.isdisjoint(value)
            for feed in document
            for value in feed.values()
        )
    )


def _values(document: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield (site, step, encoded array)."""
    if isinstance(document, list):
        for step, feed in enumerate(document):
            for name, value in feed.items():
                yield name, step, value
        return
    try:
        runners = [(str(name), iterations) for name, iterations in document["lst"]]
        for index, (runner, iterations) in enumerate(runners):
            again = sum(other == runner for other, _ in runners[:index])
            prefix = f"{runner}@{again}." if again else f"{runner}." if len(runners) > 1 else ""
            for step, iteration in enumerate(iterations):
                for name, value in iteration["outputs"].items():
                    lazy = isinstance(value, dict) and "values" in value
                    yield f"{prefix}{name}", step, value["values"] if lazy else value
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError("the results of Polygraphy are damaged", got=repr(error)[:300]) from error
