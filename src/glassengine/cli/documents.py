"""`--json [FILE]`, the same on every command: where the document goes, also that of an error, and how it is written.

`--json` alone is stdout. A file stands after an equals sign (`--json=FILE`), or as the next word where that cannot be
meant for the command itself: it ends in `.json`, is a device (`/dev/null`), or is `-` for stdout.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine.cli.options import settings
from glassengine.errors import UsageError
from glassengine.reading.files import open_regular
from glassengine.stores import objects
from glassengine.stores.places import RemotePath, place, remote
from glassengine.writing import aside

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_FILE = re.compile(r"-|/dev/.*|.*\.json", re.DOTALL)
_BEGINNINGS = (
    b'{\n  "schema_version": ',
    b'{\n  "$schema": ',
    b'{\n  "otherData": {\n    "written_by": "Glass Engine"',
    b"---\nname: glassengine\n",
    b'{\n  "main": {\n    "name": "error / noise floor"',
)
"""How documents of ours begin, schemas and logs of findings, and what is exported."""
_NOT_WRITTEN = {
    "--json": "the JSON document cannot be written",
    "--sarif": "the SARIF log cannot be written",
    "--output": "the output cannot be written",
}
_OR_STDOUT = {"--json": ", --json=- for stdout"}


def spelled_out(words: Sequence[str]) -> list[str]:
    """Return a command line in which each `--json` is followed by `=` and its file, `-` where none is given."""
    found: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left]
        if word == "--json":
            word = f"--json={left.pop(0) if left and _FILE.fullmatch(left[0]) else '-'}"
        found.append(word)
    return found


def destination_of(words: Sequence[str]) -> str | None:
    """Return where a command line that is spelled out wants its document; None where it wants none."""
    own = words[: words.index("--")] if "--" in words else words
    return next((word.partition("=")[2] for word in reversed(own) if word.startswith("--json=")), None)


def require_place(destination: str, flag: str = "--json") -> None:
    """Refuse, before any work is done, a file that is no place for the document.

    Args:
        destination: The file, or "-" for stdout.
        flag: What it was named with.

    Raises:
        UsageError: It is on another machine, in a directory that is missing or cannot be written, a directory itself,
            or it exists and something else wrote it.
    """
    if destination == "-":
        return
    target = place(destination)
    if isinstance(target, RemotePath):
        _require_own(target, destination, flag)
        return
    folder = target.resolve().parent
    if target.is_dir() or not (target.exists() or os.access(folder, os.W_OK)):
        missing = "cannot be written" if folder.is_dir() else "does not exist"
        why = "a directory" if target.is_dir() else f"the directory {folder} {missing}"
        raise UsageError(
            _NOT_WRITTEN[flag],
            got=f"{destination}: {why}",
            expected="a file in a directory that exists",
            hint=f"{flag}=FILE for another file{_OR_STDOUT.get(flag, '')}",
        )
    _require_own(target, destination, flag)


def _require_own(target: Path, destination: str, flag: str) -> None:
    if not target.is_file():
        return
    with open_regular(target) as file:
        beginning = file.read(max(map(len, _BEGINNINGS)))
    if beginning and not beginning.startswith(_BEGINNINGS):
        raise UsageError(
            f"{flag} replaces only what glass itself wrote",
            got=f"{destination}, another file",
            hint=f"{flag}=FILE for a new file{_OR_STDOUT.get(flag, '')}; remove the file to replace it",
        )


def answer(document: Callable[[], Mapping[str, Any]], show: Callable[[], None]) -> None:
    """Write the document of a command where `--json` asks for it, and show the result unless stdout has that."""
    if settings.json is not None:
        write_json(document(), settings.json)
    if settings.json != "-":
        show()


def write_json(document: Mapping[str, Any], destination: str) -> None:
    """Write one JSON document to the file `destination`, or to stdout when that is "-".

    It begins with "schema_version"; with `--metrics` it has the key "metrics".

    The document is always valid JSON: non-finite numbers become text as in `Result.to_dict`, and characters that a
    terminal would obey stand as escapes.

    Raises:
        UsageError: As of `require_place`.
    """
    from glassengine.results.comparison import SCHEMA_VERSION

    if settings.metrics:
        import glassengine as glass

        document = {**document, "metrics": glass.metrics.current().to_dict()}
    write_text(json_pieces({"schema_version": SCHEMA_VERSION, **document}), destination)


def write_text(pieces: Iterable[str], destination: str, flag: str = "--json") -> None:
    """Write a text to the file `destination`, whole or not at all, or to stdout when that is "-".

    Raises:
        UsageError: As of `require_place`.
    """
    if destination == "-":
        (settings.stdout or sys.stdout).writelines(pieces)
        return
    require_place(destination, flag)
    if (there := remote(destination)) is not None:
        objects.write("".join(pieces).encode("utf-8"), str(there))
        return
    target = place(destination).resolve()
    # What is no plain file (a pipe, a terminal), or in a directory of others, is written where it is.
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        with target.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
        return
    try:
        with aside(target) as path, path.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise OSError(error.errno, error.strerror, destination) from error


def json_text(document: Any) -> str:
    """Return a document as JSON that every reader takes and that can be shown."""
    return "".join(json_pieces(document))


def json_pieces(document: Any) -> Iterator[str]:
    """Yield the pieces of a document as JSON; of the sequences in it that are lazy one item at a time."""
    from glassengine.results.base import is_lazy, plain

    if not isinstance(document, Mapping) or not any(map(is_lazy, document.values())):
        yield _encoded(document) + "\n"
        return
    before = "{"
    for name, value in document.items():
        yield f"{before}\n  {_encoded(name)}: "
        before = ","
        if not is_lazy(value) or not len(value):
            yield _encoded(plain(value) if is_lazy(value) else value).replace("\n", "\n  ")
            continue
        inner = "["
        for item in value:
            yield f"{inner}\n    " + _encoded(plain(item)).replace("\n", "\n    ")
            inner = ","
        yield "\n  ]"
    yield "\n}\n"


def _encoded(document: Any) -> str:
    try:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        from glassengine.results.base import plain

        text = json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)
    if not text.isascii():
        # They stand in strings only, where JSON has another way to write them.
        text = _NOT_ASCII.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)
    return text.replace("\x7f", "\\u007f")
