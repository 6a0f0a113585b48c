"""The folders of inputs: as they should be, kept in memory, and changed ones, written where a reader finds them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edits import Edit, apply

MADE = ".made"
"""Stands beside the files: what is newer was changed."""
_LONG_AGO = (10**9, 10**9)


@dataclass
class Input:
    """One changed folder and what reads it: everything that is needed to see it again."""

    kind: str
    line: int
    edits: list[Edit]
    problem: str = ""
    why: str = ""

    def to_json(self) -> str:
        return json.dumps(vars(self), ensure_ascii=True)


class Template:
    """The files of one kind as they should be."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.rglob("*"))
        self._folders = [path.relative_to(folder).as_posix() for path in paths if path.is_dir()]
        self._files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}
        self._modes = {path.relative_to(folder).as_posix(): path.stat().st_mode for path in paths if path.is_file()}

    def write(self, around: Path, edits: list[Edit]) -> Path:
        """Write the files below an empty folder, changed; return the folder that is read."""
        inside = around / "inside"
        inside.mkdir()
        for name in self._folders:
            os.mkdir(f"{inside}/{name}")  # noqa: PTH102
        for name, data in {**self._files, MADE: b""}.items():
            mode = stat.S_IMODE(self._modes.get(name, 0o600))
            descriptor = os.open(f"{inside}/{name}", os.O_WRONLY | os.O_CREAT, mode)
            os.write(descriptor, data)
            os.utime(descriptor, _LONG_AGO)
            os.close(descriptor)
        apply(inside, edits)
        for path in (around / "outside").rglob("*") if (around / "outside").is_dir() else ():
            if path.is_file() and not path.is_symlink():
                os.utime(path, _LONG_AGO)
        return inside


def remove(folder: Path | str) -> None:
    """Remove a folder whatever became of the permissions in it."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    remove(entry.path)
                else:
                    os.unlink(entry.path)  # noqa: PTH108
        os.rmdir(folder)  # noqa: PTH106
    except PermissionError:
        os.chmod(folder, 0o700)  # noqa: PTH101
        shutil.rmtree(folder)


def silent(kind: Any, given: Input, folder: Path, output: str, expected: Callable[[], str]) -> str:
    """Return what is wrong with a success: another answer though a checksum covers it, or a link that led out."""
    places = {edit["file"]: edit["how"] for edit in given.edits if edit["op"] == "fs"}
    read = {file for file, how in places.items() if how in ("link_out", "directory_out")}
    if kind.owned and any(path.is_symlink() or path.parent.is_symlink() for file in read for path in folder.glob(file)):
        outside = folder.parent / "outside"
        used = [path for path in outside.rglob("*") if path.is_file() and path.stat().st_atime > _LONG_AGO[0] + 1]
        if used:
            return f"a link out of the directory was followed: {[path.name for path in used]}"
    if any(edit["op"] == "checksums" for edit in given.edits):
        return ""
    files = {edit["file"] for edit in given.edits if edit["op"] != "fs"}
    if not files or not kind.proven:
        return ""
    covered = {path.relative_to(folder).as_posix() for glob in kind.proven for path in folder.glob(glob)}
    if files <= covered and timeless(output) != timeless(expected()):
        return f"a wrong value in silence: {sorted(files)}"
    return ""


_TIMES = re.compile(
    r"\d+(\.\d+)? (ms|s|us)\b|\"\w*(_s|_ms|time|seconds|seed)\": [\d.e+-]+|case-\w+|0x[0-9a-f]{6,}|\S*/case\S*"
)


def timeless(output: str) -> str:
    """Return what a command printed without what differs from one run to the next."""
    return _TIMES.sub("", output)
