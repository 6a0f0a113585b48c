"""Describes tensors for index and header: text that is made once and used for every step."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from glassengine.recording.layout.layout import ALIGNMENT, STORED, Location, Sharding, block_starts, num_bytes
from glassengine.recording.layout.records import LARGEST, block_frame, text_frame

_MAX_GROUPS = 256
PAD_PREFIX = "__pad__/"

# They stand for a step, a file and an offset in text that is ASCII otherwise.
_STEP, _FILE, _OFFSET = "\u00a7", "\u00b6", "\u00a4"


def pad_entry(start: int | str, end: int | str, size: int) -> str:
    """Return the entry, in the header of a shard, of `size` bytes that belong to no tensor."""
    return f'"{PAD_PREFIX}{start}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}'


class Facts(TypedDict, total=False):
    """What a recording says of a tensor beside its name and its values.

    Attributes:
        axes: Position of the "batch", "sequence" and "cache" dimensions.
        node: Name of the graph node that made it.
        sharding: What the whole is, where it is one process's part of a distributed tensor.
    """

    axes: Mapping[str, int] | None
    node: str | None
    sharding: Sharding | None


class Description:
    """What the records of one tensor have in common in every step: made once, because records are made in thousands.

    Attributes:
        site: Site name.
        dtype: torch dtype name.
        shape: Sizes.
        nbytes: Bytes of the values.
        site_json: The site as JSON text, without its quotes.
        header: Text of a safetensors header entry up to its offsets.
        record: Text of an index record, without what differs between steps.
        text: The same as a JSON object.
        most_header_bytes: What an entry or alias, and a pad entry before it, take in the header of a shard at most.
    """

    __slots__ = ("dtype", "header", "most_header_bytes", "nbytes", "record", "shape", "site", "site_json", "text")

    def __init__(
        self,
        site: str,
        dtype: str,
        shape: tuple[int, ...],
        axes: Mapping[str, int] | None = None,
        node: str | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.site = site
        self.dtype = dtype
        self.shape = shape
        self.nbytes = num_bytes(dtype, shape)
        self.site_json = json.dumps(site)[1:-1]
        code, _, parts, _ = STORED[dtype]
        stored = [*shape, parts] if parts > 1 else list(shape)
        self.header = f'":{{"dtype":"{code}","shape":{json.dumps(stored, separators=(",", ":"))},"data_offsets":['
        fixed = {"dtype": dtype, "shape": shape, "axes": dict(axes or {}), "node": node, "nbytes": self.nbytes}
        spread = {} if sharding is None else {"sharding": dataclasses.asdict(sharding)}
        text = json.dumps({**fixed, **spread}, separators=(",", ":"))
        # Twice: the aliases are JSON within JSON, where each escape of a name grows once more.
        self.most_header_bytes = 2 * len(self.site_json) + len(self.header) + 220
        self.record = f'"site":"{self.site_json}",{text[1:-1]}'
        self.text = f"{{{self.record}}}".encode()

    def frame(self, step: int, rank: int, location: Location) -> bytes:
        """Return the index frame of the tensor."""
        return text_frame(
            f'{{"kind":"tensor",{self.record},"step":{step},"rank":{rank},"shard":{location.shard},'
            f'"offset":{location.offset},"checksum":{location.checksum}}}'
        )

    def header_entry(self, step: int | str, rank: int, start: int | str, end: int | str) -> str:
        """Return the entry of the tensor in the header of a shard, whose bytes lie from `start` to `end`."""
        return f'"{self._key(step, rank)}{self.header}{start},{end}]}}'

    def header_alias(self, original: Description, step: int | str, rank: int, file: str) -> str:
        """Return the JSON text, escaped once more, that says that the tensor has the bytes of `original` in `file`."""
        of = f'"of":"{original._key(step, rank)}","file":"{file}",'
        head, _, _ = self.header.partition(',"data_offsets":[')
        return json.dumps(f'"{self._key(step, rank)}":{{{of}{head[3:]}}}', ensure_ascii=False)[1:-1]

    def _key(self, step: int | str, rank: int) -> str:
        return f"step{step}/rank{rank}/{self.site_json}"


class Group:
    """Small tensors that are written contiguously, described once for all steps.

    Args:
        number: Groups are numbered from 0 in the order in which the index describes them.
        descriptions: Of the tensors; each has at least one byte.
        rank: Process that had them.
        same_as: (index, index of an earlier one) of the tensors that are not written because they have its bytes.

    Attributes:
        originals: Index of each tensor that is not written -> index of the one whose bytes it has.
        starts: Offset of each tensor in a block of the group.
        nbytes: Size of a block.
        kinds: (dtype name, number of bytes) of each tensor that is written.
        columns: Index of each tensor, or of the one whose bytes it has, among those.
        names: (site, rank) of each tensor.
    """

    def __init__(
        self,
        number: int,
        descriptions: Sequence[Description],
        rank: int,
        same_as: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.number = number
        self.descriptions = descriptions
        self.rank = rank
        self.originals = dict(same_as)
        written = [index for index in range(len(descriptions)) if index not in self.originals]
        starts, self.nbytes = block_starts([descriptions[index].nbytes for index in written])
        places = dict(zip(written, starts, strict=True))
        self.starts = [places[self.originals.get(index, index)] for index in range(len(descriptions))]
        self.kinds = tuple((descriptions[index].dtype, descriptions[index].nbytes) for index in written)
        numbers = {index: number for number, index in enumerate(written)}
        self.columns = [numbers[self.originals.get(index, index)] for index in range(len(descriptions))]
        self.names = {(description.site, rank) for description in descriptions}
        # A pad entry lies between tensors that do not end where the next one may begin.
        self.most_header_bytes = sum(
            len(descriptions[index].site_json)
            + len(descriptions[index].header)
            + (200 if descriptions[index].nbytes % ALIGNMENT else 90)
            for index in written
        ) + sum(
            descriptions[index].most_header_bytes + descriptions[original].most_header_bytes
            for index, original in same_as
        )

    def frame(self) -> bytes:
        """Return the index frame that describes the group."""
        return text_frame(group_text(self.number, self.descriptions, self.rank, self.originals))

    def block_frame(self, step: int, location: Location) -> bytes:
        """Return the index frame of one block."""
        if self.number < LARGEST:
            return block_frame(self.number, step, location)
        return text_frame(
            f'{{"kind":"block","group":{self.number},"step":{step},"shard":{location.shard},'
            f'"offset":{location.offset},"checksum":{location.checksum}}}'
        )

    def header_entries(self, step: int, offset: int) -> str:
        """Return the entries, joined, of a block at `offset` in the header of a shard."""
        text, bounds = self._entries
        return text.replace(_STEP, str(step)) % tuple((bounds + offset).tolist())

    def header_aliases(self, step: int, file: str) -> str:
        """Return the aliases, joined, of a block in `file`; see `Description.header_alias`."""
        return self._aliases.replace(_STEP, str(step)).replace(_FILE, file)

    @functools.cached_property
    def _entries(self) -> tuple[str, np.typing.NDArray[np.int64]]:
        """Text of the entries for any step, and the places in a block that it wants."""
        texts: list[str] = []
        bounds: list[int] = []
        end = 0
        for index, (description, start) in enumerate(zip(self.descriptions, self.starts, strict=True)):
            if index in self.originals:
                continue
            if start > end:
                texts.append(pad_entry(_OFFSET, _OFFSET, start - end))
                bounds += (end, end, start)
            end = start + description.nbytes
            texts.append(description.header_entry(_STEP, self.rank, _OFFSET, _OFFSET))
            bounds += (start, end)
        return ",".join(texts).replace("%", "%%").replace(_OFFSET, "%d"), np.array(bounds, dtype=np.int64)

    @functools.cached_property
    def _aliases(self) -> str:
        """Text of the aliases for any step and file."""
        found = self.descriptions
        texts = [found[i].header_alias(found[o], _STEP, self.rank, _FILE) for i, o in self.originals.items()]
        return ",".join(texts)


def group_text(number: int, descriptions: Sequence[Description], rank: int, originals: Mapping[int, int]) -> str:
    """Return the JSON text that describes a group; the arguments are its attributes."""
    texts = [description.record for description in descriptions]
    for index, original in originals.items():
        texts[index] += f',"same_as":{original}'
    tensors = ",".join(f"{{{text}}}" for text in texts)
    return f'{{"kind":"group","group":{number},"rank":{rank},"tensors":[{tensors}]}}'


_MAX_GROUPS = 256
_MAX_ALONE = 1 << 14
_Key = tuple[Sequence[Description], int, tuple[tuple[int, int], ...]]


class Groups:
    """The groups that a writer has described or will; of those that come again the latest are known."""

    def __init__(self) -> None:
        self._groups: dict[_Key, Group] = {}
        self._alone: dict[tuple[Description, int], Group] = {}
        self._count = 0

    def of(self, descriptions: tuple[Description, ...], rank: int, same_as: tuple[tuple[int, int], ...] = ()) -> Group:
        """Return what is written once about several tensors; the arguments are those of `Group`."""
        key = (descriptions, rank, same_as)
        found = self._groups.get(key)
        return found or self._new(self._groups, key, _MAX_GROUPS, descriptions, rank, same_as)

    def alone(self, description: Description, rank: int) -> Group:
        """Return what is written once about a tensor that lies alone, and has at least one byte."""
        key = (description, rank)
        return self._alone.get(key) or self._new(self._alone, key, _MAX_ALONE, (description,), rank)

    def _new(self, known: dict[Any, Group], key: Any, most: int, *of: Any) -> Group:
        while len(known) >= most:
            del known[next(iter(known))]
        known[key] = Group(self._count, *of)
        self._count += 1
        return known[key]
