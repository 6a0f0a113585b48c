"""The directories that `glass mcp` was started with, and nothing else: what a client names is looked for below them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glassengine.errors import GlassError, UsageError
from glassengine.reading.documents import read_document
from glassengine.reading.files import shown

_URL = re.compile(r"[A-Za-z][\w+.-]*:/|//")
_FACTORY = re.compile(r"(?P<file>[^:]+\.py):(?P<function>[A-Za-z_]\w*)")
_PREFIX = "gguf:"
_MOST_ENTRIES = 200_000
_MOST_BYTES = 64 << 20

# File -> where it may name another directory.
_REFERENCES = {"engine.json": ("model", "directory"), "adapter_config.json": ("base_model_name_or_path",)}


class Roots:
    """Turns names that a client gives into paths that may be read.

    Args:
        roots: Directories.
        run_code: Whether `file.py:factory` below them may be run.

    Raises:
        UsageError: One is not a directory.
    """

    def __init__(self, roots: Sequence[str | Path], *, run_code: bool) -> None:
        self.run_code = run_code
        self.directories: list[Path] = []
        for root in roots:
            path = Path(root)
            if not path.is_dir():
                raise UsageError("not a directory to serve", got=shown(path), expected="directories: glass mcp ROOT...")
            self.directories.append(path.resolve())

    def path(self, name: str) -> str:
        """Return the absolute path of a file or directory below the roots, without links.

        Raises:
            UsageError: It is outside of them, a URL, not there, neither a file nor a directory, or a directory with
                something in it that leads outside.
        """
        found = self._checked(name)
        mode = found.stat().st_mode
        if stat.S_ISDIR(mode):
            self._require_closed(found)
        elif not stat.S_ISREG(mode):
            raise self._refused(name, "neither a file nor a directory")
        return str(found)

    def target(self, name: str) -> str:
        """Return a model, or inputs: as `path`, also `gguf:FILE`, and `file.py:factory` where code may be run.

        Raises:
            UsageError: As for `path`; or it is code, and code may not be run.
        """
        if name.startswith(_PREFIX):
            return _PREFIX + self.path(name.removeprefix(_PREFIX))
        found = _FACTORY.fullmatch(name)
        if found is None:
            return self.path(name)
        path = self.path(found["file"])
        if not self.run_code:
            raise UsageError(
                "this server runs no code of files",
                got=shown(name),
                expected="a checkpoint directory, an ONNX file, a .pt2 program, an engine, a recording or a dump",
                hint="the person who starts it may allow factories below the roots: glass mcp ROOT --run-code",
            )
        return f"{path}:{found['function']}"

    def _checked(self, name: str) -> Path:
        if not name or "\0" in name or name.startswith("~") or _URL.match(name):
            raise self._refused(name, "a URL, or a name that cannot be a path" if name else "an empty name")
        given = Path(name)
        if ".." in given.parts:
            raise self._refused(name, "a path with ..")
        for root in self.directories:
            try:
                found = (root / given).resolve(strict=True)
            except (OSError, RuntimeError, ValueError):
                continue
            if self._contains(found):
                return found
            raise self._refused(name, "outside of the roots, or a link that leads there")
        raise self._refused(name, "not there")

    def _contains(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self.directories)

    def _require_closed(self, directory: Path) -> None:
        """Refuse a directory in which a link, or a file that names another directory, leads outside."""
        for number, entry in enumerate(_walk(directory)):
            if number >= _MOST_ENTRIES:
                raise self._refused(str(directory), f"more than {_MOST_ENTRIES:,} files in it")
            if entry.is_symlink() and not self._contains(Path(entry.path).resolve()):
                raise self._refused(entry.path, "a link that leads out of the roots")
            if entry.name in _REFERENCES and not entry.is_symlink():
                self._require_own_reference(Path(entry.path), _REFERENCES[entry.name])

    def _require_own_reference(self, file: Path, keys: Sequence[str]) -> None:
        try:
            value: Any = read_document(file, dict[str, Any], most=_MOST_BYTES, inside=file.parent, nonfinite=True)
        except GlassError as error:
            raise self._refused(str(file), error.got or error.what) from error
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, str):
            return
        places = [Path(value), file.parent / value, *(root / value for root in self.directories)]
        there = [place.resolve() for place in places if place.exists()]
        # A base that is not here would be looked for on the hub.
        must_exist = len(keys) == 1
        if (must_exist and not there) or not all(map(self._contains, there)):
            raise self._refused(str(file), f"it names {shown(value)}, which is not below the roots")

    def _refused(self, name: str, why: str) -> UsageError:
        return UsageError(
            "a path is refused",
            got=f"{shown(name)}: {why}",
            expected=f"a path below {', '.join(map(shown, self.directories))}",
        )


def _walk(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a directory, links not followed."""
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
