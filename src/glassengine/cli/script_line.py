"""What a command line that runs a script says, in the ways in which people write it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glassengine.errors import UsageError
from glassengine.reading.files import open_regular

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?(\.exe)?")
_ALONE = re.compile(r"-[bBdEiIOPqsSuvx]+")  # flags of Python without a value
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun")


@dataclass(frozen=True)
class ScriptLine:
    """A script, or with `is_module` a module, and its arguments."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool = False


def read_script_line(target: Sequence[str]) -> ScriptLine | None:
    """Return what `script.py ARGS`, `-m module ARGS` or either of them after `python` runs; None for anything else.

    Raises:
        UsageError: It is a script in a way that cannot be recorded; says which can.
    """
    first, *rest = target
    name = Path(first).name
    if _PYTHON.fullmatch(name) and rest:
        _require_this_python(first)
        return _of_python(rest)
    if name in _LAUNCHERS and rest:
        raise UsageError(
            "a launcher starts processes of its own, which record themselves",
            got=" ".join(target),
            hint=f"{first} ... -m glassengine record -o DIR -- script.py ARGS",
        )
    if first == "-m":
        if not rest:
            raise UsageError("no module is named", got="-m", hint="glass record -o DIR -- -m module ARGS...")
        return ScriptLine(rest[0], tuple(rest[1:]), is_module=True)
    if first.endswith(".py") or _is_script(Path(first)):
        return ScriptLine(first, tuple(rest))
    return None


def _of_python(words: Sequence[str]) -> ScriptLine:
    left = list(words)
    while left:
        word = left.pop(0)
        if word in _WITH_VALUE:
            left[:1] = []
        elif word == "-m" and left:
            return ScriptLine(left[0], tuple(left[1:]), is_module=True)
        elif not word.startswith("-"):
            return ScriptLine(word, tuple(left))
        elif not (_ALONE.fullmatch(word) or word.startswith(("-W", "-X"))):
            break
    raise UsageError(
        "only a script or a module is recorded", got=f"python {' '.join(words)}", hint="glass record -- script.py ARGS"
    )


def _require_this_python(named: str) -> None:
    found = shutil.which(named)
    here = Path(sys.executable)
    # A plain name is whichever comes first, with this one's packages or not; a path is meant.
    if "/" in named and (found is None or Path(found).parent.resolve() != here.parent.resolve()):
        raise UsageError(
            "a script runs in the Python that glass is installed in",
            got=named,
            expected=str(here),
            hint=f"{named} -m glassengine record -o DIR -- script.py, with glassengine installed there",
        )


def _is_script(path: Path) -> bool:
    """Whether a file without an ending of its own begins by naming Python."""
    if path.suffix or not path.is_file():
        return False
    with open_regular(path) as file:
        line = file.readline(200)
    return line.startswith(b"#!") and b"python" in line
