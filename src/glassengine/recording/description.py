"""What index and header say about tensors, made into text once and used for every step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from glassengine.recording.layout import ALIGNMENT, STORED, Location, Sharding, block_starts, num_bytes
from glassengine.recording.records import text_frame


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
        most_header_bytes: What an entry or alias, and a pad entry before it, take in the header of a shard at most.
    """

    __slots__ = ("dtype", "header", "most_header_bytes", "nbytes", "record", "shape", "site", "site_json")

    def __init__(
        self,
        site: str,
        dtype: str,
        shape: tuple[int, ...],
        axes: Mapping[str, int] | None,
        node: str | None,
        sharding: Sharding | None = None,
    ) -> None:
        self.site = site
        self.dtype = dtype
        self.shape = shape
        self.nbytes = num_bytes(dtype, shape)
        self.site_json = json.dumps(site)[1:-1]
        code, _, parts = STORED[dtype]
        stored = [*shape, parts] if parts > 1 else list(shape)
        self.header = f'":{{"dtype":"{code}","shape":{json.dumps(stored, separators=(",", ":"))},"data_offsets":['
        fixed = {"dtype": dtype, "shape": shape, "axes": dict(axes or {}), "node": node, "nbytes": self.nbytes}
        spread = {} if sharding is None else {"sharding": dataclasses.asdict(sharding)}
        text = json.dumps({**fixed, **spread}, separators=(",", ":"))
        # Twice: the aliases are JSON within JSON, where each escape of a name grows once more.
        self.most_header_bytes = 2 * len(self.site_json) + len(self.header) + 220
        self.record = f'"site":"{self.site_json}",{text[1:-1]}'

    def frame(self, step: int, rank: int, location: Location) -> bytes:
        """Return the index frame of the tensor."""
        return text_frame(
            f'{{"kind":"tensor",{self.record},"step":{step},"rank":{rank},"shard":{location.shard},'
            f'"offset":{location.offset},"checksum":{location.checksum}}}'
        )


class Group:
    """Small tensors that are written behind one another, described once for all steps.

    Args:
        number: Groups are numbered from 0 in the order in which the index describes them.
        descriptions: Of the tensors; each has at least one byte.
        rank: Process that had them.
        same_as: (index, index of an earlier one) of the tensors that are not written because they have its bytes.

    Attributes:
        originals: Index of each tensor that is not written -> index of the one whose bytes it has.
        starts: Offset of each tensor in a block of the group.
        nbytes: Size of a block.
        kinds: (dtype name, number of bytes) of each tensor.
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
        self.kinds = tuple((description.dtype, description.nbytes) for description in descriptions)
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
        texts = [description.record for description in self.descriptions]
        for index, original in self.originals.items():
            texts[index] += f',"same_as":{original}'
        tensors = ",".join(f"{{{text}}}" for text in texts)
        return text_frame(f'{{"kind":"group","group":{self.number},"rank":{self.rank},"tensors":[{tensors}]}}')

    def block_frame(self, step: int, location: Location) -> bytes:
        """Return the index frame of one block."""
        return text_frame(
            f'{{"kind":"block","group":{self.number},"step":{step},"shard":{location.shard},'
            f'"offset":{location.offset},"checksum":{location.checksum}}}'
        )
