"""Sources as a comparison sees them: what is asked of a side, rows of padding, and the order of execution.

`OpenedSource` passes questions on to what was opened. Others are a source seen differently: by other names, with
another dimension, of one rank, put together of several.

A recording says where its padding is by the attention mask that the model was given, or, where an engine made it, by
the lengths of its prompts. Which dimension holds the tokens is known from the recording or from its size; where
another dimension has that size as well, every element counts.

Shape legend: B batch, S tokens of the step, T cache slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from glassengine.blocks.arrays import ArrayValues, values_of
from glassengine.recording.layout.layout import Entry
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.recording.source import TensorSource
from glassengine.results import Skipped
from glassengine.sites import ROOT

if TYPE_CHECKING:
    from torch import Tensor


class Remark(NamedTuple):
    """How a tensor was put together, whether of shares not added up yet, and whether all ranks have the same."""

    step: int
    site: str
    how: str
    is_open: bool
    is_same: bool


class SourceWrapper:
    """A source, unchanged; see `TensorSource`."""

    is_assembled = False
    """Whether its tensors are put together from parts of several ranks."""
    is_printed = False
    """Whether its tensors are statistics that were printed."""

    def __init__(self, source: TensorSource) -> None:
        self._source: Any = source
        self.entries: Sequence[Entry] = source.entries

    @property
    def path(self) -> Path:
        """Where it is."""
        path: Path = self._source.path
        return path

    @property
    def metadata(self) -> dict[str, Any]:
        """That of the source."""
        metadata: dict[str, Any] = self._source.metadata
        return metadata

    @property
    def complete(self) -> bool:
        """Whether the source is."""
        return bool(self._source.complete)

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may read tensors at once."""
        return bool(getattr(self._source, "is_thread_safe", False))

    @property
    def skipped(self) -> Sequence[Skipped]:
        """What the source has skipped."""
        found: Sequence[Skipped] = self._source.skipped
        return found

    @property
    def changes(self) -> Mapping[str, Any]:
        """What was done to the source, for the environment of a result."""
        changes: Mapping[str, Any] = getattr(self._source, "changes", {})
        return changes

    def tensor(self, entry: Entry) -> Tensor:
        """Return one of `entries`."""
        found: Tensor = self._source.tensor(entry)
        return found

    def values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries`, without torch where the source can."""
        return values_of(self.tensor(entry))

    def can_be_cut(self, entry: Entry) -> bool:
        """Whether rows of one of `entries` can be read without the others."""
        return False

    def rows(self, entry: Entry, first: int, end: int) -> tuple[ArrayValues, int]:
        """Return some rows of an entry that `can_be_cut`, see `stored_values`, and the CRC-32 of their bytes."""
        raise NotImplementedError

    def stored(self, entry: Entry) -> memoryview | None:
        """Return the bytes of one of `entries` in row-major order, where they are mapped."""
        return None

    def noise_floor(self) -> NoiseFloor | None:
        """Return what rounding alone does to its tensors, where that was measured."""
        return None

    def printed(self) -> Printed | None:
        """Return the statistics that are all that the source has; None where it has values."""
        return None

    def expect(self, entry: Entry, source: TensorSource, counterpart: Entry) -> None:
        """Note that the whole of `entry` is judged against `counterpart`, of `source`."""

    def why_not(self, entry: Entry) -> str | None:
        """Return why one of `entries` cannot be judged; None if it can."""
        return None

    def reject(self, entry: Entry) -> None:
        """Note that the parts of a tensor do not add up to it: each is to be the whole."""

    def fresh(self) -> Self:
        """Return the same source, with nothing found out about its parts."""
        return self

    def remarks(self) -> Sequence[Remark]:
        """Return what was found out about the parts of each tensor that was read."""
        return ()

    def note(self, remarks: Iterable[Remark]) -> None:
        """Take over what a `fresh` source remarked."""


class OpenedSource(SourceWrapper):
    """A source as it was opened, whose kind may be of another package: it answers what it can."""

    def values(self, entry: Entry) -> ArrayValues:
        """Return the values of one of `entries`."""
        found: ArrayValues = (
            self._source.read_values(entry) if hasattr(self._source, "read_values") else super().values(entry)
        )
        return found

    def can_be_cut(self, entry: Entry) -> bool:
        """Whether rows of one of `entries` can be read: of a mapped file, or a recording without blocks of several."""
        if entry.location is None:
            return self.stored(entry) is not None
        return hasattr(self._source, "read_rows") and entry.location.block is None

    def stored(self, entry: Entry) -> memoryview | None:
        """Return the bytes of one of `entries`."""
        found: memoryview | None = self._source.stored(entry) if hasattr(self._source, "stored") else None
        return found

    def rows(self, entry: Entry, first: int, end: int) -> tuple[ArrayValues, int]:
        """Return some rows."""
        found: tuple[ArrayValues, int] = self._source.read_rows(entry, first, end)
        return found

    def noise_floor(self) -> NoiseFloor | None:
        """Return that of the recording."""
        found: NoiseFloor | None = self._source.noise_floor() if hasattr(self._source, "noise_floor") else None
        return found

    def printed(self) -> Printed | None:
        """Return the statistics that are all that the source has; None where it has values."""
        found = self._source.statistics() if hasattr(self._source, "statistics") else None
        return None if found is None else Printed(found)


class Printed(SourceWrapper):
    """Statistics that were printed in place of values."""

    is_printed = True


class OfRank(SourceWrapper):
    """One of several processes."""

    def __init__(self, source: TensorSource, rank: int) -> None:
        super().__init__(source)
        self.entries = tuple(entry for entry in source.entries if entry.rank == rank)


MASK = "attention_mask"
_INPUT_IDS = "input_ids"
CACHES = (":kv.key", ":kv.value")


_Mask = np.typing.NDArray[np.bool_]


class _Valid(NamedTuple):
    """Of one step: the tokens [B, S] that are not padding, and the cache slots [B, T] in use."""

    tokens: _Mask
    slots: _Mask


class Padding:
    """Where a source has padding."""

    def __init__(self, source: SourceWrapper) -> None:
        self._source = source
        self._roots = {
            (entry.step, entry.rank, name): entry
            for entry in source.entries
            for name in (MASK, _INPUT_IDS)
            if entry.site in (name, f".:in.{name}") and len(entry.shape) == 2
        }
        self._known: dict[tuple[int, int], _Valid | None] = {}

    def slots(self, entry: Entry) -> int | None:
        """Return how many slots of the cache hold something after the step of `entry`, None where unknown."""
        valid = self._of(entry)
        if valid is None:
            return None
        used = np.flatnonzero(valid.slots.any(0))
        return int(used[-1]) + 1 if len(used) else None

    def valid(self, entry: Entry, shape: tuple[int, ...]) -> _Mask | None:
        """Return a bool mask that broadcasts against a tensor of `shape` recorded as `entry`; None: all counts."""
        found = self._of(entry)
        if found is None or not shape:
            return None
        is_cache = entry.site.endswith(CACHES)
        table = found.slots[:, : shape[-2]] if is_cache and len(shape) > 2 else found.tokens
        if bool(table.all()) or (is_cache and table.shape[1] != shape[-2]):
            return None
        batch, size = table.shape
        if shape[0] == batch * size:
            return table.reshape(-1, *[1] * (len(shape) - 1))
        if shape[0] != batch:
            return None
        axis = len(shape) - 2 if is_cache else entry.axes.get("sequence", _sequence_axis(shape, size))
        if axis is None or not 0 < axis < len(shape) or shape[axis] != size:
            return None
        return table.reshape([batch, *(size if i == axis else 1 for i in range(1, len(shape)))])

    def _of(self, entry: Entry) -> _Valid | None:
        key = entry.step, entry.rank
        if key not in self._known:
            self._known[key] = self._from_mask(*key) or self._from_lengths(entry.step)
        return self._known[key]

    def _from_mask(self, step: int, rank: int) -> _Valid | None:
        entry, ids = (self._roots.get((step, rank, name)) for name in (MASK, _INPUT_IDS))
        if entry is None or ids is None:
            return None
        mask: _Mask = self._source.values(entry).array != 0
        size = ids.shape[1]
        # The tokens of the step are the last columns, unless the mask covers a cache that is longer than what is in it.
        if mask.shape[0] != ids.shape[0] or mask.shape[1] < size:
            return None
        if mask.shape[1] > size and not bool(mask[:, -1].all()):
            return None
        return _Valid(mask[:, -size:], mask)

    def _from_lengths(self, step: int) -> _Valid | None:
        lengths = self._source.metadata.get("prompt_lengths")
        if self._source.metadata.get("padding") != "left" or not isinstance(lengths, list) or not lengths:
            return None
        longest = max(lengths)
        prompt = np.arange(longest) >= longest - np.array(lengths)[:, None]
        following = np.ones((len(lengths), step), dtype=np.bool_)
        tokens = following[:, :1] if step else prompt
        return _Valid(tokens, np.concatenate([prompt, following], 1))


def _sequence_axis(shape: tuple[int, ...], size: int) -> int | None:
    """Return the dimension that holds the tokens: [B, S, ...], or [B, heads, S, ...]."""
    found = [axis for axis in range(1, min(3, len(shape))) if shape[axis] == size]
    return found[0] if len(found) == 1 else None


PHASES = ("forward", "backward", "update")


def phase_of(site: str) -> str:
    """Return in which part of a training step a site of a recording is made."""
    port = site.rpartition(":")[2]
    if port == "param" or port.startswith("state."):
        return "update"
    return "backward" if port.startswith("grad") else "forward"


def is_of_parameter(site: str) -> bool:
    """Whether a site is that of a parameter: its gradient, what an update made of it, or the optimizer's state."""
    port = site.partition(":")[2]
    return port in ("grad", "param") or port.startswith("state.")


def is_of_activation(site: str) -> bool:
    """Whether a site is the gradient of an activation."""
    return site.partition(":")[2].startswith(("grad_in", "grad_out"))


def paths_above(path: str) -> set[str]:
    """Return the paths of the modules around one."""
    names = path.split(".") if path != ROOT else []
    return {".".join(names[:i]) for i in range(1, len(names))} | ({ROOT} if names else set())


class ExecutionOrder:
    """The order in which the processes of one run made their tensors.

    All have the same clock, the order of sites within a step. Processes that have modules of their own are stages: in a
    forward the later ones come after all of the earlier ones, in a backward ahead of them.

    Args:
        entries: Of some steps, of one rank or of several.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_step: dict[int, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            self._by_step[entry.step][entry.rank].append(entry)
        self._place: dict[tuple[int, int, str], tuple[int, ...]] = {}
        self._placed: set[int] = set()

    def key(self, entry: Entry) -> tuple[int, ...]:
        """Return what sorts these entries: by step, by position in it, by rank."""
        if entry.step not in self._placed:
            self._placed.add(entry.step)
            self._place_step(entry.step, self._by_step[entry.step])
        return entry.step, *self._place[entry.step, entry.rank, entry.site], entry.rank

    def _place_step(self, step: int, by_rank: Mapping[int, Sequence[Entry]]) -> None:
        stages = _stages(by_rank)
        for stage, ranks in enumerate(stages):
            merged = _merged([[entry.site for entry in by_rank[rank]] for rank in ranks])
            last = _last_results(merged)
            for rank in ranks:
                for entry in by_rank[rank]:
                    phase = PHASES.index(phase_of(entry.site))
                    number = -stage if phase == 1 else stage
                    # What a module sums up in one number, a loss, is made of its other results.
                    is_sum = not entry.shape and entry.site in last
                    at = last[entry.site] if is_sum else merged[entry.site]
                    self._place[step, rank, entry.site] = (phase, number, at, is_sum)


def _stages(by_rank: Mapping[int, Sequence[Entry]]) -> list[list[int]]:
    """Return the ranks of each stage, in the order of their first one; all in one if there are no stages."""
    if len(by_rank) == 1:
        return [list(by_rank)]
    paths = {rank: {path_of(entry.site) for entry in entries} for rank, entries in by_rank.items()}
    everywhere = set.intersection(*paths.values())
    stages: list[tuple[set[str], list[int]]] = []
    for rank, found in sorted(paths.items()):
        own = found - everywhere
        for known, ranks in stages:
            if 2 * len(known & own) >= min(len(known), len(own)):
                known |= own
                ranks.append(rank)
                break
        else:
            stages.append((own, [rank]))
    # If all continue with the same modules, modules of only some ranks (experts, say) are not a stage.
    holders = {above for found in paths.values() for path in found for above in paths_above(path)}
    if len(stages) > 1 and all(_goes_on(entries, everywhere - holders, everywhere) for entries in by_rank.values()):
        return [sorted(paths)]
    return [ranks for _, ranks in stages]


def _goes_on(entries: Sequence[Entry], common: set[str], everywhere: set[str]) -> bool:
    """Whether one of the `common` modules is called after the last one that not all processes have."""
    forward = [path_of(entry.site) for entry in entries if phase_of(entry.site) == "forward"]
    last = max((i for i, path in enumerate(forward) if path not in everywhere), default=-1)
    return any(path in common for path in forward[last + 1 :])


def _last_results(positions: Mapping[str, int]) -> dict[str, int]:
    """Return for each result of a module the position of the last one of the same call."""
    calls: dict[str, int] = {}
    for site, at in positions.items():
        call, _, port = site.partition(":")
        if port.startswith("out"):
            calls[call] = max(at, calls.get(call, at))
    return {site: calls[site.partition(":")[0]] for site in positions if site.partition(":")[2].startswith("out")}


def path_of(site: str) -> str:
    """Return the module path of a site."""
    return site.partition(":")[0].partition("@")[0]


def _merged(sequences: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the position of each site in one sequence of all of them; what one has alone is after what it follows."""
    merged = list(sequences[0])
    known = set(merged)
    for sequence in sequences[1:]:
        if known.issuperset(sequence):
            continue
        at = 0
        positions = {site: i for i, site in enumerate(merged)}
        inserts: list[tuple[int, str]] = []
        for site in sequence:
            if site in known:
                at = positions[site] + 1
            else:
                inserts.append((at, site))
                known.add(site)
        for offset, (position, site) in enumerate(inserts):
            merged.insert(position + offset, site)
    return {site: i for i, site in enumerate(merged)}
