"""What the dumper of SGLang writes: one `.pt` file per tensor, all that is known of it in its name.

`step=0___rank=0___dump_index=1___name=attn_out___layer_id=3.pt` is the site `attn_out.layer_id=3`; what was recorded of
modules without marks in the code (`non_intrusive__model.norm.output`) gets the site of the module. A name that a step
has several times is the first, second, ... call: `attn_out`, `attn_out@1`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError
from glassengine.recording.formats.torch_file import TorchFile
from glassengine.recording.layout.layout import Entry
from glassengine.results import Skipped
from glassengine.sites import ROOT, port_site, with_call

if TYPE_CHECKING:
    from torch import Tensor

_SEPARATOR = "___"
_STEPS = ("step", "forward_pass_id")
_INNER = re.compile(r"(?:(?P<path>.*)\.)?(?P<side>inputs|output)(?:\.(?P<key>[^.]+(?:\.[^.]+)?))?")
_HOOKED = "non_intrusive__"
# In every name, and no part of what the tensor is.
_NOT_A_NAME = {*_STEPS, "rank", "dump_index", "name", "pp_rank", "tp_rank", "cp_rank", "ep_rank", "etp_rank"}


class DumperFolder:
    """Tensors of a directory of dumped files, in the order they were dumped.

    Raises:
        CorruptError: A file is damaged or would run code.
    """

    complete = True

    def __init__(self, path: Path, files: list[tuple[Path, dict[str, str]]], skipped: list[Skipped]) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._files: dict[Entry, Path] = {}
        calls: Counter[tuple[str, int, int]] = Counter()
        entries: list[Entry] = []
        for file, tags in sorted(files, key=lambda item: (int(item[1].get("dump_index", 0)), item[0].name)):
            step, rank = int(next(tags[key] for key in _STEPS if key in tags)), int(tags["rank"])
            name = _site(tags)
            base, port = name.partition(":")[::2]
            site = with_call(base, calls[name, step, rank]) + (f":{port}" if port else "")
            calls[name, step, rank] += 1
            found = _value(file)
            if isinstance(found, str):
                skipped.append(Skipped(site, "both", found, step=step))
                continue
            entry = dataclasses.replace(found[1], site=site, step=step, rank=rank)
            self._files[entry] = file
            entries.append(entry)
        self.entries = tuple(sorted(entries, key=lambda entry: (entry.step, entry.rank)))
        self.skipped = tuple(skipped)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        found = _value(self._files[entry])
        if isinstance(found, str) or found[1].shape != entry.shape:
            raise CorruptError("a file changed while it was being read", got=str(self._files[entry]))
        return found[0].tensor(found[1])


def tags_of(path: Path) -> dict[str, str] | None:
    """Return what the name of a dumped file says; None when it is not the name of one."""
    if path.suffix != ".pt" or _SEPARATOR not in path.stem:
        return None
    tags = dict(part.split("=", 1) for part in path.stem.split(_SEPARATOR) if "=" in part)
    numbers = [tags.get("rank"), tags.get("dump_index", "0"), next((tags[key] for key in _STEPS if key in tags), None)]
    if "name" not in tags or not all(number is not None and re.fullmatch(r"\d{1,9}", number) for number in numbers):
        return None
    return tags


def open_dumped(path: Path) -> DumperFolder | None:
    """Open a directory of dumped files, or one of them; None when it is not one."""
    if path.is_file():
        tags = tags_of(path)
        return DumperFolder(path, [(path, tags)], []) if tags is not None else None
    files: list[tuple[Path, dict[str, str]]] = []
    skipped: list[Skipped] = []
    for item in sorted(path.iterdir()):
        tags = tags_of(item)
        if tags is None:
            skipped.append(Skipped(item.name, "both", "not a file of the dumper: step=...___rank=...___name=...pt"))
        elif item.is_symlink() or not item.is_file():
            skipped.append(Skipped(item.name, "both", "a link, which could leave the directory"))
        else:
            files.append((item, tags))
    return DumperFolder(path, files, skipped) if files else None


def _site(tags: dict[str, str]) -> str:
    name = tags["name"]
    others = [
        f".{key}={value}"
        for key, value in tags.items()
        if key not in _NOT_A_NAME and (key, value) != ("recompute_status", "disabled")
    ]
    if not name.startswith(_HOOKED):
        return name + "".join(others)
    # The path of the module says the layer already.
    found = _INNER.fullmatch(name.removeprefix(_HOOKED))
    if found is None:
        return name + "".join(others)
    port = ":in" if found["side"] == "inputs" else ":out"
    for key in (found["key"] or "").split("."):
        port += f"[{key}]" if key.isdecimal() else f".{key}" if key else ""
    return port_site(found["path"] or ROOT, port)


def _value(path: Path) -> tuple[TorchFile, Entry] | str:
    """Return the tensor of a dumped file, or why it is not given as one."""
    source = TorchFile(path)
    for entry in _candidates(source):
        return source, entry
    reasons = [item.reason for item in source.skipped if item.site in ("value", "tensor")]
    return reasons[0] if reasons else "not one tensor"


def _candidates(source: TorchFile) -> Iterator[Entry]:
    # Older dumpers saved the tensor alone; newer ones save it beside a dict of facts.
    yield from (entry for entry in source.entries if entry.site == "value")
    if len(source.entries) == 1 and source.entries[0].site == "tensor":
        yield source.entries[0]
