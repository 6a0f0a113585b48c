"""The noise floor of a recording: what rounding alone does to each of its tensors, kept beside them.

    noise_floor.safetensors   "whole", "power": float64 [N], mean squares of the noise and of the tensor itself
                              "slices": float64, for each tensor, axis and index the mean square of the noise
                              metadata: schema version, checksum of the index, how it was measured, and for each of the
                              N tensors [site, step, rank, start of its slices, shape]

An infinite mean square says that rounding alone changes what cannot be measured: an integer, or where a mask lies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from glassengine.errors import CorruptError, GlassError
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular
from glassengine.reading.tensors import open_safetensors
from glassengine.recording.layout.layout import INDEX, Entry
from glassengine.stores.places import delivered
from glassengine.writing import aside, crc32, save_safetensors

_Means = np.typing.NDArray[np.float64]

FILE = "noise_floor.safetensors"
SCHEMA_VERSION = 1

Key = tuple[str, int, int]
"""Site, step and rank."""


@dataclass(frozen=True)
class StoredFloor:
    """What rounding does to one tensor.

    Attributes:
        whole: Mean square of the noise.
        power: Mean square of the tensor.
        slices: For each axis, the mean squares of the noise within each index: float64 [size of that axis].
    """

    whole: float
    power: float
    slices: tuple[_Means, ...]


class NoiseFloor:
    """The floors of a recording, by tensor.

    Attributes:
        how: How they were measured, in a few words.
    """

    def __init__(self, floors: Mapping[Key, StoredFloor], how: str) -> None:
        self.how = how
        self._floors = floors
        self._relative: dict[tuple[str, int], float] = {}
        for (site, _, rank), floor in floors.items():
            if floor.power > 0 and floor.whole < float("inf"):
                known = self._relative.get((site, rank), 0.0)
                self._relative[site, rank] = max(known, (floor.whole / floor.power) ** 0.5)

    @classmethod
    def of_ranks(cls, parts: Mapping[int, NoiseFloor]) -> NoiseFloor:
        """Return the floors of several recordings, each of a rank of its own."""
        floors = {
            (site, step, rank): floor for rank, part in parts.items() for (site, step, _), floor in part._floors.items()
        }
        return cls(floors, next(iter(parts.values())).how)

    def of(self, entry: Entry) -> StoredFloor | None:
        """Return the floor of one tensor of the recording, None where it was not measured."""
        return self._floors.get(entry.place)

    def relative(self, entry: Entry) -> float:
        """Return the largest noise of this site in any step, relative to the tensor; one step may underestimate it."""
        return self._relative.get((entry.site, entry.rank), 0.0)


def write_noise_floor(directory: Path, floors: Mapping[Key, StoredFloor], how: str) -> None:
    """Keep `floors` in the finished recording `directory`."""
    import torch

    index, start = [], 0
    for (site, step, rank), floor in floors.items():
        shape = [len(means) for means in floor.slices]
        index.append([site, step, rank, start, shape])
        start += sum(shape)
    slices = [means for floor in floors.values() for means in floor.slices]
    tensors = {
        "whole": np.array([floor.whole for floor in floors.values()], dtype=np.float64),
        "power": np.array([floor.power for floor in floors.values()], dtype=np.float64),
        "slices": np.concatenate([*slices, np.empty(0, dtype=np.float64)]),
    }
    metadata = {
        "schema_version": str(SCHEMA_VERSION),
        "index": _checksum(directory),
        "how": how,
        "tensors": json.dumps(index),
    }
    try:
        with delivered(directory / FILE) as target, aside(target) as path:
            save_safetensors({name: torch.from_numpy(values) for name, values in tensors.items()}, path, metadata)
    except OSError as error:
        raise GlassError(
            "the noise floor could not be written; the recording is complete without it", got=f"{directory}: {error}"
        ) from error


def read_noise_floor(directory: Path) -> NoiseFloor | None:
    """Return the noise floor that a recording carries, if it carries one."""
    path = directory / FILE
    if not path.is_file() or path.is_symlink():
        return None
    try:
        with _opened(path) as file:
            metadata = dict(file.metadata() or {})
            if int(metadata["schema_version"]) > SCHEMA_VERSION:
                raise CorruptError(
                    "the noise floor was written by a newer version of Glass Engine",
                    got=f"{path}: schema version {metadata['schema_version']}",
                    expected=f"at most {SCHEMA_VERSION}",
                    hint="update Glass Engine",
                )
            if metadata["index"] != _checksum(directory):
                raise CorruptError(
                    "the noise floor belongs to another recording",
                    got=str(path),
                    hint=f"remove {path}, or record again with --noise-floor",
                )
            whole, power, slices = (file.get_tensor(name) for name in ("whole", "power", "slices"))
            return NoiseFloor(
                dict(_floors(parsed(metadata["tensors"], list[Any], path), whole, power, slices)), metadata["how"]
            )
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise CorruptError("the noise floor of a recording is damaged", got=f"{path}: {error}") from error


def _opened(path: Path) -> Any:
    try:
        return open_safetensors(path, inside=path.parent, framework="numpy")
    except CorruptError as error:
        raise CorruptError("the noise floor of a recording is damaged", got=error.got) from error


def _floors(index: Any, whole: _Means, power: _Means, slices: _Means) -> Iterator[tuple[Key, StoredFloor]]:
    if not len(index) == len(whole) == len(power) or any(t.dtype != np.float64 for t in (whole, power, slices)):
        raise ValueError("its parts do not fit together")
    for number, (site, step, rank, start, shape) in enumerate(index):
        if start < 0 or any(size < 0 for size in shape) or start + sum(shape) > len(slices):
            raise ValueError(f"the slices of {site!r} are not in it")
        ends = np.cumsum(shape)[:-1].tolist()
        parts = np.split(slices[start : start + sum(shape)], ends) if shape else ()
        yield (site, step, rank), StoredFloor(float(whole[number]), float(power[number]), tuple(parts))


def _checksum(directory: Path) -> str:
    """Return what tells one recording from another: a checksum of its index."""
    value = 0
    with open_regular(directory / INDEX, inside=directory) as file:
        while block := file.read(1 << 20):
            value = crc32(block, value)
    return f"{value:08x}"
