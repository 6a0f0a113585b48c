"""Where results are written: directories and files of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from glassengine.errors import UsageError

# Two letters at least: one is a drive of Windows. A path keeps one of the two slashes.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def local(path: str | Path) -> Path:
    """Return the path of what is to be written.

    Raises:
        UsageError: It is the address of something that is no file here, as `s3://bucket/run`. A directory that is
            called so is `./s3:/...`, as a string.
    """
    found = _URL.fullmatch(str(path))
    if found is None:
        return Path(path)
    scheme, rest = found.groups()
    shown = f"{scheme}://{rest.lstrip('/')}" if scheme != "file" else f"file:///{rest.lstrip('/')}"
    raise UsageError(
        "only files of this machine are written",
        got=shown,
        expected="a path",
        hint=f"/{rest.lstrip('/')}" if scheme == "file" else "write to a directory here, and copy or mount it",
    )
