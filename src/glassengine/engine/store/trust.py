"""Origin of an engine's native code: proof that this user built it here, by a private key.

A build writes an HMAC of the manifest's checksum, which covers the checksums of all files, with a key that lies in the
user's configuration directory and never leaves it. Owners and times of files prove nothing: an archive that the user
unpacks is his, too.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Set
from pathlib import Path

from glassengine.errors import UsageError
from glassengine.reading.files import shown, user_key

logger = logging.getLogger("glassengine")

KEY_FILE = "engine-key"
_PURPOSE = b"glassengine engine 1\n"


def seal(checksum: str) -> str | None:
    """Return the proof that this user built the engine whose manifest has this checksum; None without a key."""
    try:
        key = user_key(KEY_FILE, make=True)
    except OSError as error:
        logger.warning("the engine cannot be marked as built here, and will ask for --trust-engine: %s", error)
        return None
    return None if key is None else _mac(key, checksum)


def is_ours(checksum: str, proof: str | None) -> bool:
    """Say whether `proof` is what `seal` gave for this checksum, here and to this user."""
    try:
        key = None if proof is None else user_key(KEY_FILE)
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
