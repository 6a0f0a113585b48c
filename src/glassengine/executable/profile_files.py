"""Read profiles that were taken: what `glass profile DIR` shows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassengine.errors import CorruptError, UsageError
from glassengine.executable.profile import SUMMARY
from glassengine.executable.profile_trace import FORMAT, SCHEMA_VERSION

_MAX_BYTES = 256 << 20
_KEYS = {"wall_us", "num_steps", "kinds", "paths", "flame", "steps_us"}


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
        UsageError: There is no profile.
        CorruptError: A profile is damaged or of a newer schema.
    """
    path = _newest(Path(directory))
    if against is not None:
        return _read(path), _read(_newest(Path(against)))
    numbered = _profiles(path.parent) if re.fullmatch(r"profile-\d+", path.name) else []
    before = [other for other in numbered if other.name < path.name]
    return _read(path), _read(before[-1]) if before else None


def _newest(directory: Path) -> Path:
    if (directory / SUMMARY).is_file():
        return directory
    found = _profiles(directory) if directory.is_dir() else []
    if not found:
        raise UsageError(
            "there is no profile",
            got=str(directory),
            expected=f"profile-NNNNNN/{SUMMARY}",
            hint="glass run --profile DIR",
        )
    return found[-1]


def _profiles(directory: Path) -> list[Path]:
    found = (path for path in directory.iterdir() if re.fullmatch(r"profile-\d+", path.name))
    return sorted(path for path in found if (path / SUMMARY).is_file())


def _read(directory: Path) -> StoredProfile:
    path = directory / SUMMARY
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CorruptError("the profile is too large to be one", got=f"{path.stat().st_size} bytes in {path}")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptError("the profile cannot be read", got=f"{path}: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.keys() < _KEYS:
        raise CorruptError("not a profile", got=str(path), expected=f"format {FORMAT!r}")
    if data["schema_version"] > SCHEMA_VERSION:
        raise CorruptError("the profile is of a newer version", got=f"schema {data['schema_version']}")
    if not _is_well_formed(data):
        raise CorruptError("the profile is damaged", got=str(path))
    return StoredProfile(directory, data)


def _is_well_formed(data: dict[str, Any]) -> bool:
    try:
        numbers = [data["wall_us"], data["num_steps"], *data["steps_us"]]
        numbers += [entry[key] for entry in data["kinds"].values() for key in ("count", "total_us")]
        numbers += [entry[key] for entry in data["paths"].values() for key in ("calls", "own_us")]
        levels = [data["flame"]]
        while levels:
            for entry in levels.pop().values():
                numbers += [entry[key] for key in ("count", "total_us", "own_us")]
                levels.append(entry["children"])
    except (AttributeError, KeyError, TypeError):
        return False
    return all(isinstance(number, int | float) for number in numbers)
