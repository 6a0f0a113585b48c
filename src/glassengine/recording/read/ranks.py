"""The recordings of all processes of one run, `rank<r>/` side by side in one directory, as one source.

A rank that has several stages of a pipeline records each into `stage<s>/`: they count as ranks, in their order.

Every tensor keeps the rank it was recorded by; `compare` puts the parts of one tensor together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.blocks.arrays import Values
from glassengine.recording.layout.entries import Entries, LeftOuts, Mapped
from glassengine.recording.layout.layout import MANIFEST, Entry, LeftOut
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.recording.read.reader import Recording
from glassengine.results import Skipped
from glassengine.stores.places import Remote

if TYPE_CHECKING:
    from torch import Tensor

_REQUESTS = 8
_RANK = re.compile(r"rank(\d{1,9})")
_STAGE = re.compile(r"stage(\d{1,5})")


class RankRecordings:
    """Tensors of the recordings `rank0/`, `rank1/`, ... in one directory.

    Attributes:
        path: The directory.
        metadata: That of the first rank; "token_ids" are the rows of all ranks, once of ranks that have the same, and
            "num_ranks" is how many recordings there are.
        complete: Whether each of them is, and none is missing from the first to the last.
        entries: The tensors in order of step and rank.
        left_out: What was seen and has no values.
        skipped: The same in the words of a comparison.

    Raises:
        CorruptError: A recording is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        directories = dict(sorted(rank_directories(path)))
        # In a store each of them is several requests; on a disk more threads would only wait for each other.
        with ThreadPoolExecutor(_REQUESTS if isinstance(path, Remote) else 1) as pool:
            self._recordings = dict(zip(directories, pool.map(Recording.open, directories.values()), strict=True))
        each = list(self._recordings.values())
        self.metadata: dict[str, Any] = {**each[0].metadata, "num_ranks": len(each)}
        rows = [recording.metadata.get("token_ids") for recording in each]
        # Ranks that split a batch have rows of their own; those that share the work on a row have the same.
        if all(isinstance(of_rank, list) for of_rank in rows) and any(of_rank != rows[0] for of_rank in rows):
            distinct = [of_rank for i, of_rank in enumerate(rows) if of_rank not in rows[:i]]
            self.metadata["token_ids"] = [row for of_rank in distinct for row in of_rank or ()]
        is_gapless = list(self._recordings) == list(range(len(each)))
        self.complete = is_gapless and all(recording.complete for recording in each)
        # A recording may have been made as rank 0 of a run that its process knew nothing about.
        self.entries = Entries.of_ranks({rank: recording.entries for rank, recording in self._recordings.items()})
        self.left_out = LeftOuts.of_ranks({rank: recording.left_out for rank, recording in self._recordings.items()})
        self.skipped: Sequence[Skipped] = Mapped(_skipped, self.left_out)

    def noise_floor(self) -> NoiseFloor | None:
        """Return the noise floors of all ranks; None where a rank has none.

        Raises:
            CorruptError: One is damaged.
        """
        found = {rank: recording.noise_floor() for rank, recording in self._recordings.items()}
        known = {rank: floor for rank, floor in found.items() if floor is not None}
        return NoiseFloor.of_ranks(known) if len(known) == len(found) else None

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        return self._recordings[entry.rank].tensor(entry)

    def read_values(self, entry: Entry) -> Values:
        """Return the values of one of `entries`; see `Recording.read_values`."""
        return self._recordings[entry.rank].read_values(entry)

    def read_rows(self, entry: Entry, first: int, end: int) -> tuple[Values, int]:
        """Return some rows of one of `entries`; see `Recording.read_rows`."""
        return self._recordings[entry.rank].read_rows(entry, first, end)


def _skipped(item: LeftOut) -> Skipped:
    return Skipped(item.site, "both", f"{item.reason} (rank {item.rank})", item.step)


def rank_directories(path: Path) -> list[tuple[int, Path]]:
    """Return rank and directory of the recordings `rank<r>/` in `path`.

    Those of `stage<s>/rank<r>/`, where a rank has several stages of a pipeline, are numbered one after another.
    """
    own = _of_ranks(path)
    stages = {} if own else {int(found[1]): item for item in path.iterdir() if (found := _STAGE.fullmatch(item.name))}
    number = 0
    for stage in range(max(stages, default=-1) + 1):
        there = sorted(_of_ranks(stages[stage])) if stage in stages else []
        own += [(number + place, directory) for place, (_, directory) in enumerate(there)]
        number += max(1, len(there))  # one that is missing leaves a gap
    return own


def _of_ranks(path: Path) -> list[tuple[int, Path]]:
    numbered = [(int(found[1]), item) for item in path.iterdir() if (found := _RANK.fullmatch(item.name))]
    with ThreadPoolExecutor(_REQUESTS if isinstance(path, Remote) else 1) as pool:
        are_there = list(pool.map(lambda item: (item[1] / MANIFEST).is_file(), numbered))
    return [item for item, is_there in zip(numbered, are_there, strict=True) if is_there]
