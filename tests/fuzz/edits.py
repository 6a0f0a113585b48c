"""Edits of the files of a folder: each is plain JSON, so that what finds something can be kept and read by people.

    {"op": "json", "file": F, "path": [...], "how": "set", "raw": TEXT}  also "delete", "twice" (the key), "rename"
    {"op": "bytes", "file": F, "at": N, "delete": N, "insert": HEX}
    {"op": "header", ...}    as "json", of the header of a safetensors file, whose length is made right
    {"op": "member", "file": F, "member": M, "edit": {...}}    of one member of a zip archive, whose CRC is made right
    {"op": "proto", "file": F, "path": [...], "how": "varint" | "bytes" | "delete" | "twice", "value": ...}
    {"op": "fs", "file": F, "how": ...}     something else in the place of a file
    {"op": "checksums"}    the checksums of JSON documents are made right again

`F` may be a glob: the first of its files. `apply` does what they say, `Maker` makes them up by chance.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import protobuf

Edit = dict[str, Any]

OUTSIDE = "outside"
"""A folder beside the one that is read: whatever opens a file there has left its directory."""

PLACES = (
    "zero", "fifo", "directory", "missing", "unreadable", "empty", "sparse", "loop", "dangling", "link_out",
    "directory_out", "hard_link",
)  # fmt: skip

_LARGEST = 1 << 26
"""A file beyond that is one of `_put`, and stays as it is."""

_DAMAGED = (ValueError, RuntimeError, IndexError, EOFError, zipfile.BadZipFile, zlib.error)
"""What a file that was changed before raises when it is taken apart."""
_GLOB = set("*?[")
_MARK = "\ue000place\ue000"


def unfolded(raw: Any) -> str:
    """Return a text that is kept short: a list is [text, how often, text after it]."""
    return raw if isinstance(raw, str) else raw[0] * raw[1] + (raw[2] if len(raw) > 2 else "")


def apply(folder: Path, edits: list[Edit]) -> None:
    """Change the files of `folder`; what an edit no longer finds stays as it is."""
    before: dict[str, str] = {}
    if any(edit["op"] == "checksums" for edit in edits):
        before = {path.relative_to(folder).as_posix(): _sha256(path) for path in _files(folder)}
    for edit in edits:
        if edit["op"] == "checksums":
            _correct_checksums(folder, before)
            continue
        path = folder / edit["file"]
        if _GLOB & set(edit["file"]) and not os.path.lexists(path):
            path = next(iter(sorted(folder.glob(edit["file"]))), path)
        if edit["op"] == "fs":
            _put(folder, path, edit["how"])
        elif path.is_file() and not path.is_symlink() and path.stat().st_size < _LARGEST:
            path.write_bytes(changed(path.read_bytes(), edit))


def changed(data: bytes, edit: Edit) -> bytes:
    """Return what an edit makes of a file; the file itself where an earlier edit has left something else there."""
    with contextlib.suppress(_LostError, TypeError, ValueError, LookupError):
        return _OPS[edit["op"]](data, edit)
    return data


class _LostError(Exception):
    """The place of an edit is gone."""


def _files(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path for path in found if path.stat().st_size < _LARGEST and os.access(path, os.R_OK)]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _put(folder: Path, path: Path, how: str) -> None:
    outside = folder.parent / OUTSIDE
    outside.mkdir(exist_ok=True)
    target = outside / path.name
    if how in ("link_out", "hard_link") and path.is_file():
        target.write_bytes(path.read_bytes())
    if (
        how == "directory_out"
        and folder not in (path.parent, path.parent.parent)
        and path.parent.is_dir()
        and not path.parent.is_symlink()
    ):
        moved = outside / path.parent.name
        if not moved.exists():
            path.parent.rename(moved)
            for file in _files(moved):  # they count as read from now on only
                os.utime(file, ns=(file.stat().st_mtime_ns,) * 2)
            path.parent.symlink_to(moved)
        return
    if how == "unreadable":
        path.chmod(0) if path.is_file() else None
        return
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        if how == "zero":
            path.symlink_to("/dev/zero")
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "directory":
            path.mkdir()
        elif how == "empty":
            path.touch()
        elif how == "sparse":
            path.touch()
            os.truncate(path, 1 << 40)
        elif how == "loop":
            path.symlink_to(path.name)
        elif how == "dangling":
            path.symlink_to("nowhere/at-all")
        elif how == "link_out":
            path.symlink_to(target)
        elif how == "hard_link":
            path.hardlink_to(target)


def _bytes(data: bytes, edit: Edit) -> bytes:
    at = edit["at"]
    return data[:at] + bytes.fromhex(unfolded(edit["insert"])) + data[at + edit["delete"] :]


def _json(data: bytes, edit: Edit) -> bytes:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise _LostError from None
    path, how = edit["path"], edit["how"]
    raw = unfolded(edit.get("raw", "null"))
    if not path:
        return raw.encode("utf-8", "surrogatepass")
    holder = document
    for key in path[:-1]:
        holder = _child(holder, key)
    _child(holder, path[-1])
    last = path[-1]
    if how == "delete":
        del holder[last]
    elif how == "twice" and isinstance(holder, dict):
        holder[_MARK] = holder[last]
        raw = json.dumps(last)
    elif how == "twice":
        holder.insert(last, holder[last])
    elif how == "rename":
        holder[_MARK] = holder.pop(last)
    else:
        holder[last] = _MARK
    text = json.dumps(document, ensure_ascii=True)
    return text.replace(json.dumps(_MARK), raw, 1).encode("utf-8", "surrogatepass")


def _child(holder: Any, key: Any) -> Any:
    if not isinstance(holder, dict | list):
        raise _LostError
    try:
        return holder[key]
    except (KeyError, IndexError, TypeError):
        raise _LostError from None


def _header(data: bytes, edit: Edit) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = _json(data[8 : 8 + length], edit)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _member(data: bytes, edit: Edit) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {item.filename: archive.read(item) for item in archive.infolist()}
    except Exception:
        raise _LostError from None
    inner, name = edit["edit"], edit["member"]
    if name not in members:
        raise _LostError
    how = zipfile.ZIP_STORED
    if inner["op"] == "drop":
        del members[name]
    elif inner["op"] == "bomb":
        members[name], how = b"\0" * inner["bytes"], zipfile.ZIP_DEFLATED
    elif inner["op"] == "name":
        members[inner["name"]] = members.pop(name)
    else:
        members[name] = _OPS[inner["op"]](members[name], inner)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive, warnings.catch_warnings(action="ignore"):
        for each, content in members.items():
            archive.writestr(each, content)
    return file.getvalue()


def _proto(data: bytes, edit: Edit) -> bytes:
    try:
        return protobuf.changed(data, edit["path"], edit["how"], edit.get("value"))
    except (ValueError, IndexError):
        raise _LostError from None


_OPS: dict[str, Callable[[bytes, Edit], bytes]] = {
    "bytes": _bytes,
    "json": _json,
    "header": _header,
    "member": _member,
    "proto": _proto,
}


def _correct_checksums(folder: Path, before: dict[str, str]) -> None:
    """Put the present SHA-256 and size of every changed file in place of the old ones, and documents' own checksums."""
    documents = [path for path in _files(folder) if path.suffix == ".json" and path.stat().st_size < 1 << 22]
    changed = {
        before[path.relative_to(folder).as_posix()]: path
        for path in _files(folder)
        if path.stat().st_size < _LARGEST
        and before.get(path.relative_to(folder).as_posix()) not in (None, _sha256(path))
    }
    for document in documents:
        try:
            value = json.loads(document.read_bytes())
            corrected = _corrected(value, changed)
            if isinstance(corrected, dict) and "checksum" in corrected:
                # A seal is made with a key of the user's, which nobody else has.
                rest = {key: item for key, item in corrected.items() if key not in ("checksum", "seal")}
                own = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
                corrected = {**corrected, "checksum": own}
            if corrected != value:
                document.write_text(json.dumps(corrected))
        except (ValueError, RecursionError, OSError):
            continue


def _corrected(value: Any, changed: dict[str, Path]) -> Any:
    if isinstance(value, list):
        return [_corrected(item, changed) for item in value]
    if not isinstance(value, dict):
        return value
    path = changed.get(str(value.get("sha256")))
    if path is not None:
        sizes = {key: path.stat().st_size for key in ("size", "bytes") if key in value}
        return {**value, "sha256": _sha256(path), **sizes}
    return {key: _corrected(item, changed) for key, item in value.items()}


_NUMBERS = [
    0, 1, 2, 3, 7, 64, 65, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -1, -2, -(2**63),
]  # fmt: skip
_RAW: list[Any] = [
    *map(str, _NUMBERS), ["9", 5000], ["-9", 1, "9" * 4400], "NaN", "Infinity", "-Infinity", "1e999", "0.5",
    ["9", 4300],
    "-0.0", "null", "true", "false", '""', "[]", "{}", "[[]]", "[null]", '{"": {}}', '"\\ud800"', '"\\u0000"',
    '"\\u202e\\u0085\\u001b[2J"', '"a\\nb"', '"../../outside/x"', '"/etc/passwd"', '"/dev/zero"', '"."', '".."',
    ['"', 1, "x" * 70_000 + '"'], ["[", 100_000, ""], ['{"a":', 100_000, ""], ["[", 500, "]" * 500], '"float32"',
    '"Float32"', '"torch.float64"', '"cpu"', '"cuda:99"', '"evil.py:factory"', '"os:system"', '"(2, 3)"', "[-1]",
    "[4294967296, 4294967296]", "[9223372036854775807]", ["[1", 70, ",1" * 70 + "]"], "[1, 2.5]", '["a", 1]', "1e308",
    '"1"', '"0"', '"s0"', '"{{ 7 * 7 }}"', '"%s%n"', '"eager"', '"inductor"', '"no such thing"',
]  # fmt: skip
_INSERTS: list[Any] = [
    "00", "ff", "ffffffff", "ffffffffffffff7f", "0000000000000080", ["00", 5000], ["ff", 40], ["5b", 3000], "ed a0 80",
    "4e614e", "eb81aa", "e280ae", "1b5b324a", "c285", ["41", 70_000],
]  # fmt: skip


@functools.lru_cache(512)
def content(path: Path) -> bytes:
    """Return what is in a file that nobody changes."""
    return path.read_bytes()


class Maker:
    """Makes edits up."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def edits(self, folder: Path, files: list[str], *, places: bool = True) -> list[Edit]:
        """Return some edits of `files` of a folder as it is."""
        contents = {file: content(folder / file) for file in files}
        chance = self._chance
        found = []
        for _ in range(chance.choice([1, 1, 1, 1, 2, 3])):
            file = chance.choice(files)
            if places and chance.random() < 0.06:
                found.append({"op": "fs", "file": file, "how": chance.choice(PLACES)})
                continue
            found.append({"file": file, **self.edit(file, contents[file])})
        if any(b"sha256" in data or b"checksum" in data for data in contents.values()) and chance.random() < 0.6:
            found.append({"op": "checksums"})
        return found

    def edit(self, name: str, data: bytes) -> Edit:
        """Return an edit of one file, most often one that keeps its structure."""
        chance = self._chance
        if chance.random() < 0.85:
            with contextlib.suppress(*_DAMAGED):
                if name.endswith(".json"):
                    return self._json("json", json.loads(data))
                if name.endswith(".safetensors"):
                    length = int.from_bytes(data[:8], "little")
                    return self._json("header", json.loads(data[8 : 8 + length]))
                if data[:2] == b"PK":
                    return self._member(data)
                if name.endswith(".onnx"):
                    return self._proto(data)
        return self._bytes(data)

    def _bytes(self, data: bytes) -> Edit:
        chance = self._chance
        size = len(data)
        # Headers and the ends of archives hold more than what lies between them.
        at = chance.choice(
            [chance.randrange(size + 1), chance.randrange(min(size, 256) + 1), max(0, size - chance.randrange(200))]
        )
        way = chance.random()
        if way < 0.4:
            return {"op": "bytes", "at": at, "delete": 1, "insert": f"{chance.randrange(256):02x}"}
        if way < 0.55:
            number = chance.choice(_NUMBERS) & (2**64 - 1)
            width = chance.choice([1, 2, 4, 8])
            return {"op": "bytes", "at": at, "delete": width, "insert": number.to_bytes(8, "little")[:width].hex()}
        if way < 0.7:
            return {"op": "bytes", "at": at, "delete": chance.choice([1, 8, 100, size]), "insert": ""}
        if way < 0.8:
            piece = data[(place := chance.randrange(size + 1)) : place + chance.randrange(64)]
            return {"op": "bytes", "at": at, "delete": 0, "insert": piece.hex()}
        return {"op": "bytes", "at": at, "delete": chance.choice([0, 1, 8]), "insert": chance.choice(_INSERTS)}

    def _json(self, op: str, document: Any) -> Edit:
        chance = self._chance
        path: list[Any] = []
        value = document
        while isinstance(value, dict | list) and value and (not path or chance.random() < 0.85):
            key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
            path.append(key)
            value = value[key]
        way = chance.random()
        if way < 0.12 and path:
            return {"op": op, "path": path, "how": "delete"}
        if way < 0.17 and path:
            return {"op": op, "path": path, "how": "twice"}
        raw = chance.choice(_RAW)
        if way < 0.2 and path and isinstance(path[-1], str):
            return {"op": op, "path": path, "how": "rename", "raw": raw if str(raw)[0] == '"' else '"x"'}
        if isinstance(value, int) and not isinstance(value, bool) and way < 0.5:
            raw = str(chance.choice([value + 1, value - 1, value * 64, -value, *_NUMBERS]))
        elif isinstance(value, str) and value and way < 0.4:
            place = chance.randrange(len(value) + 1)
            word = chance.choice(["\0", "/", "../", "\u202e", "9", "]", ")", "(", "*", "\x1b[2J", "{{", ":", "=", "%"])
            raw = json.dumps(value[:place] + word + value[place + chance.choice([0, 1]) :])
        return {"op": op, "path": path, "how": "set", "raw": raw}

    def _member(self, data: bytes) -> Edit:
        chance = self._chance
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            member = chance.choice(archive.namelist())
            content = archive.read(member)
        way = chance.random()
        inner: Edit
        if way < 0.04:
            inner = {"op": "drop"}
        elif way < 0.07:
            inner = {"op": "bomb", "bytes": chance.choice([1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 26])}
        elif way < 0.1:
            inner = {"op": "name", "name": chance.choice(["../../x", "/x", "a\0b", "x" * 3000, member + "/"])}
        else:
            inner = self.edit(member, content)
        return {"op": "member", "member": member, "edit": inner}

    def _proto(self, data: bytes) -> Edit:
        path, wire = protobuf.some_field(data, self._chance)
        chance = self._chance
        way = chance.random()
        if way < 0.15:
            return {"op": "proto", "path": path, "how": "delete"}
        if way < 0.25:
            return {"op": "proto", "path": path, "how": "twice"}
        if wire == 0 or way < 0.35:
            return {"op": "proto", "path": path, "how": "varint", "value": chance.choice(_NUMBERS) & (2**64 - 1)}
        value = chance.choice(["", "00", "ff", "61", "6261", ["41", 5000], "ffffffffffffff7f", "0a0a0a0a", "2e2e2f78"])
        return {"op": "proto", "path": path, "how": "bytes", "value": value}
