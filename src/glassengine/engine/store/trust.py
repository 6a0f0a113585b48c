"""Origin of an engine's native code: proof that this user built it here, by a private key.

A build writes an HMAC of the manifest's checksum, which covers the checksums of all files, with a key that lies in the
user's configuration directory and never leaves it. Owners and times of files prove nothing: an archive that the user
unpacks is his, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Set
from pathlib import Path

from glassengine import environment
from glassengine.errors import GlassError, UsageError
from glassengine.reading.files import open_regular, read_open, shown

logger = logging.getLogger("glassengine")

KEY_FILE = "engine-key"
_KEY_BYTES = 32
_PURPOSE = b"glassengine engine 1\n"


def seal(checksum: str) -> str | None:
    """Return the proof that this user built the engine whose manifest has this checksum; None without a key."""
    try:
        key = _key() or _new_key()
    except OSError as error:
        logger.warning("the engine cannot be marked as built here, and will ask for --trust-engine: %s", error)
        return None
    return None if key is None else _mac(key, checksum)


def is_ours(checksum: str, proof: str | None) -> bool:
    """Say whether `proof` is what `seal` gave for this checksum, here and to this user."""
    try:
        key = None if proof is None else _key()
    except OSError:
        return False
    return key is not None and hmac.compare_digest(_mac(key, checksum).encode(), str(proof).encode())


def require_trust(name: str, backend: str, folder: Path, listed: Set[Path], *, ours: bool, trust: bool) -> None:
    """Refuse native code of an engine that was built elsewhere, unless the user says that he trusts it.

    Args:
        name: Of the engine.
        backend: Which would load it.
        folder: Where what would be loaded lies.
        listed: The files that the manifest lists: one that was added is not of the user who built the rest.
        ours: Whether this user built the engine here, and nothing was changed since.
        trust: What the user says.

    Raises:
        UsageError: Says what would run.
    """
    there = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if trust or (ours and there <= listed):
        return
    files = sorted(path.relative_to(folder.parent).as_posix() for path in there)
    shortened = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    raise UsageError(
        f"the engine {name!r} brings native code that you did not build on this machine",
        got=shown(f"{shortened}: back-end {backend} loads it into this process, with your permissions"),
        expected="an engine that you built here, or one whose builder you trust",
        hint="--trust-engine (trust=True) if you trust it, or build it here",
    )


def _mac(key: bytes, checksum: str) -> str:
    return hmac.new(key, _PURPOSE + checksum.encode(), hashlib.sha256).hexdigest()


def _place() -> Path:
    return environment.config_dir() / KEY_FILE


def _key() -> bytes | None:
    """Return the user's key; None where there is none, or where others could know or have written it."""
    path = _place()
    if not os.path.lexists(path):
        return None
    try:
        with open_regular(path, inside=path.parent) as file:
            status = os.fstat(file.fileno())
            data = read_open(file, path, most=_KEY_BYTES)
    except GlassError as error:
        logger.warning("the key for engines is not used: %s", error.got)
        return None
    is_own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if len(data) != _KEY_BYTES or not is_own or (os.name == "posix" and status.st_mode & 0o077):
        logger.warning("the key for engines is not used: %s must be yours alone (chmod 600), of 32 bytes", path)
        return None
    return data


def _new_key() -> bytes | None:
    """Make a key; of two processes that do so at once the second takes the first one's."""
    path = _place()
    if os.path.lexists(path):  # one that is not used
        return None
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{KEY_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
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
    return _key()
