"""Starts processes, and nothing else of this package does.

What lies in the working directory may be of others: the root that `glass mcp` reads, downloaded files. Python looks
there first for the modules of `python -m` and `python -c`, so a `json.py` in it would run. A process of ours finds
modules where this one does, and never in the working directory by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine import environment

_MOST_WORDS = 400


def python(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in this interpreter."""
    return [sys.executable, "-P", "-m", module, *words]


def surroundings(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return variables, those of now by default, and PYTHONPATH: modules are looked for where this process does.

    Python by itself looks in the working directory, too: for `python -m`, at a prompt, and for an empty entry of
    PYTHONPATH. A child does only where PYTHONPATH names it, or where this package lies in it.
    """
    known = environment.everything() if variables is None else dict(variables)
    named = [str(Path(entry).absolute()) for entry in known.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_home = _is_here(Path(__file__).parent.parent)
    own = [str(Path(entry).absolute()) for entry in sys.path if is_home or not _is_here(entry)]
    return known | {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*named, *own]))}


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does; without `env` in `surroundings()`."""
    return subprocess.run(command, env=surroundings() if env is None else env, **options)  # noqa: S603


def run_silently(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Run a command without its input and outputs; return its exit status and the last line of its standard error."""
    with tempfile.TemporaryFile() as errors:
        done = run(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        errors.seek(max(0, errors.tell() - _MOST_WORDS))
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def start(command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Do what `subprocess.Popen` does; without `env` in `surroundings()`."""
    return subprocess.Popen(command, env=surroundings() if env is None else env, **options)  # noqa: S603


def _is_here(directory: str | Path) -> bool:
    try:
        return Path(directory).samefile(os.curdir)
    except OSError:
        return False
