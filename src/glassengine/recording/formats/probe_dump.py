"""What msprobe dumps: `dump.json`, and with the task "tensor" one file per tensor in `dump_tensor_data/`.

Directories `step<i>/` and `rank<r>/` (`proc<pid>/` without ranks) say step and rank. Names of modules become site
names: `Module.fc1.Linear.forward.0.output.0` is `fc1`, its input is `fc1:in[0]`; names of functions stay as they are.
Entries without values (the task "statistics") are listed as skipped.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError
from glassengine.recording.formats.files import KINDS, why_not_a_file
from glassengine.recording.formats.json_file import JsonFile
from glassengine.recording.layout.layout import Entry
from glassengine.results import Skipped
from glassengine.sites import ROOT, port_site, with_call

if TYPE_CHECKING:
    from torch import Tensor

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


class ProbeDump:
    """Tensors of one or more `dump.json`.

    Raises:
        CorruptError: A `dump.json` is damaged, or a file of values.
    """

    complete = True

    def __init__(self, path: Path, files: list[tuple[JsonFile, int, int]]) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._files: dict[Entry, Path] = {}
        taken: set[tuple[str, int, int]] = set()
        entries: list[Entry] = []
        skipped: list[Skipped] = []
        for file, step, rank in files:
            for site, described in _tensors(file.document):
                entry = _entry(file.path.parent / _DATA, site, step, rank, described)
                if (site, step, rank) in taken:
                    entry = "two tensors have this name"
                if isinstance(entry, str):
                    skipped.append(Skipped(site, "both", entry, step=step))
                    continue
                taken.add((site, step, rank))
                self._files[entry] = file.path.parent / _DATA / described["data_name"]
                entries.append(entry)
        self.entries = tuple(sorted(entries, key=lambda entry: (entry.step, entry.rank)))
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped.

        Raises:
            CorruptError: The file is damaged.
        """
        path = self._files[entry]
        source = KINDS[path.suffix.lower()](path)
        if len(source.entries) != 1 or source.entries[0].shape != entry.shape:
            raise CorruptError("a file changed while it was being read", got=str(path))
        return source.tensor(source.entries[0])


def is_dump(document: Any) -> bool:
    """Return whether a JSON document is a `dump.json`."""
    return isinstance(document, dict) and isinstance(document.get("data"), dict) and "task" in document


def open_dump(file: JsonFile) -> ProbeDump:
    """Open one `dump.json`, as step 0 and rank 0."""
    return ProbeDump(file.path, [(file, 0, 0)])


def open_dumps(path: Path) -> ProbeDump | None:
    """Open the dumps of a directory and of its directories of steps and ranks; None when there are none."""
    found = sorted(_listing(path, {}, 0), key=lambda item: (item[1].get("step", 0), item[1].get("rank", 0), item[0]))
    files: list[tuple[JsonFile, int, int]] = []
    for index, where in found:
        file = JsonFile(index)
        if is_dump(file.document):
            step = where.get("step", 0)
            # Processes without a rank are counted, in the order of their names.
            unranked = sum(other == step for _, other, _ in files)
            files.append((file, step, where.get("rank", unranked)))
    return ProbeDump(path, files) if files else None


def _listing(path: Path, where: dict[str, int], depth: int) -> Iterator[tuple[Path, dict[str, int]]]:
    for item in sorted(path.iterdir()):
        found = _FOLDER.fullmatch(item.name)
        if item.is_symlink():
            continue
        if item.name == INDEX and item.is_file():
            yield item, where
        elif found is not None and item.is_dir() and depth < 3:
            number = {found["kind"]: int(found["number"])} if found["kind"] != "proc" and found["number"] else {}
            yield from _listing(item, {**where, **number}, depth + 1)


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
    entry = dataclasses.replace(source.entries[0], site=site, step=step, rank=rank)
    shape = described.get("shape")
    if list(entry.shape) != shape:
        return f"its file holds {entry.describe()}, the dump says {str(shape)[:80]}"
    return entry
