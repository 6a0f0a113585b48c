"""Excludes rows of padding from a comparison, since two sides may fill them differently.

A recording says where its padding is by the attention mask that the model was given, or, where an engine made it, by
the lengths of its prompts. Which dimension holds the tokens is known from the recording or from its size; where
another dimension has that size as well, every element counts.

Shape legend: B batch, S tokens of the step, T cache slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.recording.layout.layout import Entry

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
