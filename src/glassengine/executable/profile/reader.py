"""Read profiles that were taken: what `glass profile DIR` shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from glassengine.errors import CorruptError, UsageError
from glassengine.executable.profile.profile import SUMMARY
from glassengine.executable.profile.trace import SCHEMA_VERSION
from glassengine.reading.copies import here
from glassengine.reading.documents import Size, parsed
from glassengine.reading.files import read_bytes
from glassengine.writing.checksums import document_checksum

# Version from which on a profile has a checksum.
_FIRST_SEALED = 2
_MAX_BYTES = 128 << 20
# Two levels for each span within another.
_MAX_DEPTH = 400


class _Kind(msgspec.Struct):
    count: Size
    total_us: float


class _Path(msgspec.Struct):
    calls: Size
    own_us: float


class _Flame(msgspec.Struct):
    count: Size
    total_us: float
    own_us: float
    children: dict[str, _Flame]


class _Profile(msgspec.Struct):
    """The content of `profile.json`, see `profile_trace.summarize`."""

    format: Literal["glass-profile"]
    schema_version: int
    wall_us: float
    num_steps: Size
    kinds: dict[str, _Kind]
    paths: dict[str, _Path]
    flame: dict[str, _Flame]
    steps_us: list[float]
    checksum: str | None = None


@dataclass(frozen=True)
class StoredProfile:
    """A profile on disk.

    Attributes:
        directory: That holds it.
        data: Of its `profile.json`; times in microseconds, see `profile_trace.summarize`.
    """

    directory: Path
    data: dict[str, Any]


def read_profiles(
    directory: str | Path, *, against: str | Path | None = None
) -> tuple[StoredProfile, StoredProfile | None]:
    """Return a profile and the one it is compared with.

    Args:
        directory: A profile, or a directory of profiles, of which the newest is meant.
        against: The other one, named in the same way; None: the one before, if there is any.

    Raises:
        UsageError: No profile exists.
        CorruptError: A profile is damaged or of a newer schema.
    """
    given = here(directory)
    path = _newest(given)
    if against is not None:
        other = here(against)
        return _read(path, inside=given), _read(_newest(other), inside=other)
    numbered = _profiles(path.parent) if re.fullmatch(r"profile-\d+", path.name) else []
    before = [other for other in numbered if other.name < path.name]
    return _read(path, inside=given), _read(before[-1], inside=path.parent) if before else None


def _newest(directory: Path) -> Path:
    if (directory / SUMMARY).is_file():
        return directory
    found = _profiles(directory) if directory.is_dir() else []
    if not found:
        raise UsageError(
            "no profile found", got=str(directory), expected=f"profile-NNNNNN/{SUMMARY}", hint="glass run --profile DIR"
        )
    return found[-1]


def _profiles(directory: Path) -> list[Path]:
    found = (path for path in directory.iterdir() if re.fullmatch(r"profile-\d+", path.name))
    return sorted(path for path in found if (path / SUMMARY).is_file())


def _read(directory: Path, *, inside: Path) -> StoredProfile:
    """Read a profile below `inside`, which the user named; a link instead of a profile leads out of it."""
    path = directory / SUMMARY
    raw = read_bytes(path, most=_MAX_BYTES, inside=inside)
    parsed(raw, _Profile, path, what="the profile", version=SCHEMA_VERSION, depth=_MAX_DEPTH)
    data = parsed(raw, dict[str, Any], path, what="the profile", depth=_MAX_DEPTH)
    found = data.pop("checksum", None)
    if (found is not None or data["schema_version"] >= _FIRST_SEALED) and found != document_checksum(data):
        hint = "take the profile again, or copy it again from where it was taken"
        raise CorruptError("the profile is not what was written", got=f"{path}: another checksum", hint=hint)
    return StoredProfile(directory, data)
