"""JSON files of other tools, read within bounds: dumps of msprobe, results of Polygraphy.

Strings that are longer than a name can be (an array in base64) stay in the file, so that a document of many gigabytes
of arrays costs no more than its structure. Readers raise CorruptError for what is damaged.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import mmap
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError
from glassengine.reading.files import open_regular
from glassengine.reading.tensors import read_header, read_torch
from glassengine.recording.formats.files import (
    KINDS,
    ForeignTensors,
    array_of,
    native_name,
    torch_entry,
    why_not,
    why_not_a_file,
    why_not_a_tensor,
)
from glassengine.recording.layout.layout import Entry
from glassengine.sites import ROOT, port_site, with_call

if TYPE_CHECKING:
    from torch import Tensor


MAX_BYTES = 1 << 28
MAX_ITEMS = 4_000_000
_MAX_SHORT_BYTES = 1 << 15
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@dataclass(frozen=True)
class LongText:
    """A string that was left in the file: its first byte, without the quote, and its number of bytes as written."""

    offset: int
    num_bytes: int


class JsonFile:
    """A parsed JSON file.

    Attributes:
        path: The file.
        document: What it holds; one of more than 32 KiB is a `LongText`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._long: list[LongText] = []
        # A string of the document itself cannot be taken for the mark of one that was left out.
        self._mark = secrets.token_hex(16)
        skeleton = self._skeleton()
        if sum(skeleton.count(char) for char in (b",", b"[", b"{")) > MAX_ITEMS:
            raise CorruptError("a JSON file holds too many items", got=str(path), expected=f"at most {MAX_ITEMS:,}")
        try:
            self.document = self._restored(json.loads(skeleton))
        except (ValueError, RecursionError) as error:
            raise CorruptError("not a JSON file", got=f"{path}: {error}") from error

    def read(self, text: LongText, first: int = 0, num_bytes: int | None = None) -> bytes:
        """Return bytes of a string that was left in the file, as they are written there."""
        left = max(text.num_bytes - first, 0)
        with open_regular(self.path, inside=self.path.parent) as file:
            file.seek(text.offset + first)
            return file.read(left if num_bytes is None else min(num_bytes, left))

    def _skeleton(self) -> bytes:
        with open_regular(self.path, inside=self.path.parent) as file:
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptError("not a JSON file", got=f"{self.path}: it is empty") from error
        with mapped:
            pieces: list[bytes] = []
            kept, end, start = 0, 0, mapped.find(b'"')
            while start >= 0:
                found = _STRING.match(mapped, start)
                if found is None:
                    raise CorruptError("not a JSON file", got=f"{self.path}: a string has no end")
                if found.end() - start > _MAX_SHORT_BYTES:
                    pieces += [mapped[end:start], f'"{self._mark}{len(self._long)}"'.encode()]
                    kept += start - end
                    self._long.append(LongText(start + 1, found.end() - start - 2))
                    end = found.end()
                if kept + found.end() - end > MAX_BYTES:
                    break
                start = mapped.find(b'"', found.end())
            if kept + len(mapped) - end > MAX_BYTES:
                got = f"{self.path}: more than {MAX_BYTES >> 20} MiB beside long strings"
                raise CorruptError("a JSON file is too large to be read", got=got)
            return b"".join([*pieces, mapped[end:]])

    def _restored(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(self._restored(key)): self._restored(child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._restored(child) for child in value]
        if self._long and isinstance(value, str) and value.startswith(self._mark):
            return self._long[int(value.removeprefix(self._mark))]
        return value


INDEX = "dump.json"
_DATA = "dump_tensor_data"
_FOLDER = re.compile(r"(?P<kind>step|rank|proc)(?P<number>\d{0,12})")
_CALL = re.compile(r"(?:Module|Cell)(?:\.(?P<path>.+))?\.[^.]+\.(?P<way>forward|backward)\.(?P<call>\d{1,9})")
_GRADIENTS = re.compile(r"(?:Module|Cell)\.(?:(?P<path>.+)\.)?[^.]+\.parameters_grad(?:\.\d{1,9})?")
_PORTS = {
    ("forward", "input_args"): ":in",
    ("forward", "input_kwargs"): ":in",
    ("forward", "output"): ":out",
    # Backwards, what goes in are the gradients of the results.
    ("backward", "input"): ":grad_out",
    ("backward", "output"): ":grad_in",
}
_IN_NAMES = {"input_args": "input", "input_kwargs": "input"}
_MAX_DEPTH = 32


class ProbeDump(ForeignTensors):
    """Tensors of one or more `dump.json` of msprobe, with the task "tensor" one file each in `dump_tensor_data/`.

    Directories `step<i>/` and `rank<r>/` (`proc<pid>/` without ranks) say step and rank. Names of modules become site
    names: `Module.fc1.Linear.forward.0.output.0` is `fc1`, its input is `fc1:in[0]`; names of functions stay as they
    are. Entries without values (the task "statistics") are listed as skipped.
    """

    def __init__(self, path: Path, files: list[tuple[JsonFile, int, int]]) -> None:
        super().__init__(path)
        for file, step, rank in files:
            folder = file.path.parent / _DATA
            for site, described in _tensors(file.document):
                entry = _entry(folder, site, step, rank, described)
                self._add(site, entry, folder / str(described.get("data_name")), step=step)
        self._sort()

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        path = self._values[entry.place]
        source = KINDS[path.suffix.lower()](path)
        if len(source.entries) != 1 or source.entries[0].shape != entry.shape:
            raise CorruptError("a file changed while it was being read", got=str(path))
        return source.tensor(source.entries[0])


def is_probe_dump(document: Any) -> bool:
    """Return whether a JSON document is a `dump.json`."""
    return isinstance(document, dict) and isinstance(document.get("data"), dict) and "task" in document


def open_probe_dumps(path: Path) -> ProbeDump | None:
    """Open the dumps of a directory and of its directories of steps and ranks; None when there are none."""
    found = sorted(_listing(path, {}, 0), key=lambda item: (item[1].get("step", 0), item[1].get("rank", 0), item[0]))
    files: list[tuple[JsonFile, int, int]] = []
    for index, where in found:
        file = JsonFile(index)
        if is_probe_dump(file.document):
            step = where.get("step", 0)
            # Processes without a rank are counted, in the order of their names.
            unranked = sum(other == step for _, other, _ in files)
            files.append((file, step, where.get("rank", unranked)))
    return ProbeDump(path, files) if files else None


def _listing(path: Path, numbers: dict[str, int], depth: int) -> Iterator[tuple[Path, dict[str, int]]]:
    for item in sorted(path.iterdir()):
        found = _FOLDER.fullmatch(item.name)
        if item.is_symlink():
            continue
        if item.name == INDEX and item.is_file():
            yield item, numbers
        elif found is not None and item.is_dir() and depth < 3:
            number = {found["kind"]: int(found["number"])} if found["kind"] != "proc" and found["number"] else {}
            yield from _listing(item, {**numbers, **number}, depth + 1)


def _tensors(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (site, description) of every declared tensor in a dump."""
    for name, parts in document["data"].items():
        if not isinstance(parts, dict):
            raise CorruptError("a dump.json is damaged", got=f"{name[:200]!r} is not an object")
        gradients = _GRADIENTS.fullmatch(name)
        if gradients is not None:
            yield from _parameters(gradients["path"], ":grad", parts)
            continue
        call = _CALL.fullmatch(name)
        for part, value in parts.items():
            port = _PORTS.get((call["way"], part)) if call is not None else None
            if call is not None and part == "parameters" and isinstance(value, dict):
                yield from _parameters(call["path"], ":param", value)
            elif call is None or port is None:
                yield from _leaves("", f"{name}.{_IN_NAMES.get(part, part)}", value, dotted=True)
            else:
                where = with_call(call["path"] or ROOT, int(call["call"]))
                # A result that is not a tuple is written as a list of one.
                alone = part in ("output", "input") and port.endswith("out") and isinstance(value, list)
                yield from _leaves(where, port, value[0] if alone and len(value) == 1 else value, dotted=False)


def _parameters(path: str | None, port: str, parts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in parts.items():
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        yield from _leaves(f"{path}.{name}" if path else name, port, one, dotted=False)


def _leaves(where: str, port: str, value: Any, *, dotted: bool, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    if depth > _MAX_DEPTH:
        raise CorruptError("a dump.json nests too deeply", got=f"at {where[:200]!r}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            inner = f"{port}.{index}" if dotted else f"{port}[{index}]"
            yield from _leaves(where, inner, item, dotted=dotted, depth=depth + 1)
    elif isinstance(value, dict):
        if "type" in value and ("dtype" in value or "value" in value):
            if "dtype" in value and "shape" in value:
                yield port_site(where, port), value
            return
        for key, item in value.items():
            yield from _leaves(where, f"{port}.{key}", item, dotted=dotted, depth=depth + 1)


def _entry(folder: Path, site: str, step: int, rank: int, described: dict[str, Any]) -> Entry | str:
    """Return the entry of what a dump says of a tensor, or why it is not given as one."""
    name = described.get("data_name")
    if not isinstance(name, str):
        return "statistics only"
    reason = why_not_a_file(folder, name)
    if reason is not None:
        return reason
    path = folder / name
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        return "its file is of a kind that is not known"
    source = kind(path)
    if len(source.entries) != 1:
        reason = source.skipped[0].reason if source.skipped else "no tensor in it"
        return f"its file does not hold one tensor: {reason}"
    entry = replace(source.entries[0], site=site, step=step, rank=rank)
    shape = described.get("shape")
    if list(entry.shape) != shape:
        return f"its file holds {entry.describe()}, the dump says {str(shape)[:80]}"
    return entry


_CLASS = "polygraphy_class"
_OLD_CLASS = "__polygraphy_encoded_"
# Enough for any header that is read, and a multiple of four.
_HEAD_BYTES = 16_384


class RunResults(ForeignTensors):
    """Tensors of one file that Polygraphy saved: `RunResults` (`--save-outputs`), or feed dicts (`--save-inputs`).

    An iteration is a step. Where several runners are in one file, their names stand in front of the names of the
    outputs. Arrays are `.npy` files in base64; only their headers are read until one is asked for, and then only that.
    """

    _same_name = "two results have this name"

    def __init__(self, file: JsonFile) -> None:
        super().__init__(file.path)
        self._file = file
        for site, step, value in _values(file.document):
            self._add(site, self._entry(site, step, value), value, step=step)
        self._sort()

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, in memory of their own."""
        value = self._values[entry.place]
        try:
            if "tensor" in value:
                return self._torch(value["tensor"])
            data = self._bytes(value["array"])
            file = io.BytesIO(data)
            header = read_header(file)
            return array_of(header, bytearray(data[file.tell() :]))  # torch cannot hold memory that is read-only
        except ValueError as error:
            raise CorruptError("an array cannot be read", got=f"{entry.site!r} in {self.path}: {error}") from error

    def _entry(self, site: str, step: int, value: Any) -> Entry | str:
        """Return the entry of an encoded array, or why it is not given as a tensor."""
        try:
            if not isinstance(value, dict) or not any(isinstance(value.get(key), str | LongText) for key in _KEYS):
                return "not an array"
            if "tensor" in value:
                tensor = self._torch(value["tensor"])
                return why_not_a_tensor(tensor) or torch_entry(site, tensor, step)
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
            return Entry(site, step, 0, native_name(array_dtype), shape, nbytes=claimed)
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
