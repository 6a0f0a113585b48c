"""Secrets of this user: keys in files of the configuration directory that only their owner reads."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from glassengine import environment
from glassengine.errors import GlassError
from glassengine.reading.files import open_regular, read_open

logger = logging.getLogger("glassengine")

_KEY_BYTES = 32


def user_key(name: str, *, make: bool = False) -> bytes | None:
    """Return a key of 32 bytes; None if there is none, or if others could know or have written it.

    Args:
        name: File of the configuration directory.
        make: Whether a key that does not exist is made.

    Raises:
        OSError: The key cannot be made or read.
    """
    path = environment.config_dir() / name
    if not os.path.lexists(path):
        if not make:
            return None
        _make(path)
    try:
        with open_regular(path, inside=path.parent) as file:
            status = os.fstat(file.fileno())
            data = read_open(file, path, most=_KEY_BYTES)
    except GlassError as error:
        logger.warning("the key %s is not used: %s", name, error.got)
        return None
    is_own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if len(data) != _KEY_BYTES or not is_own or (os.name == "posix" and status.st_mode & 0o077):
        logger.warning("the key %s is not used: it must be yours alone (chmod 600), of 32 bytes: %s", name, path)
        return None
    return data


def _make(path: Path) -> None:
    """Make a key; of two processes that do so at once the second one uses the key of the first."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
