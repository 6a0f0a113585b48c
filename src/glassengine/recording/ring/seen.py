"""What earlier steps had: most tensors of a step are like one of them, and need no second look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glassengine.recording.layout.description import Description
from glassengine.recording.layout.layout import Sharding, aligned
from glassengine.recording.layout.statistics import MEASURED
from glassengine.recording.layout.values import describe

# Smaller tensors are written in blocks, and stored again rather than searched for.
MIN_SHARED_BYTES = 1 << 16
_MAX_SEEN = 1 << 14


class Sequel:
    """What follows a tensor in most of the steps that have it."""

    __slots__ = ()


@dataclass(slots=True)
class Seen:
    """A tensor of an earlier step: what is like it has the same description.

    `nbytes` are those of its values, `room` what they take in the ring. `is_small` says that such tensors are written
    in blocks, `is_simple` that their bytes are the values if they are contiguous and on the CPU, and
    `is_measured` that the thread knows to compute light statistics of them. `sequel` is what followed it, if that is
    known.
    """

    description: Description
    dtype: torch.dtype
    size: torch.Size
    nbytes: int
    room: int
    is_small: bool
    is_simple: bool
    is_measured: bool
    sharding: Sharding | None
    sequel: Sequel | None = None


class SeenTensors:
    """The descriptions of tensors, by site, dtype, shape and sharding; of a limited number of them."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, torch.dtype, torch.Size, Sharding | None], Seen] = {}
        # Of each site the last one.
        self.last: dict[str, Seen] = {}

    def look(
        self,
        site: str,
        tensor: Tensor,
        axes: Mapping[str, int] | None = None,
        node: str | None = None,
        sharding: Sharding | None = None,
    ) -> tuple[Seen, bool]:
        """Return what is known of such a tensor, and whether nothing was.

        Raises:
            UsageError: The tensor or its name cannot be recorded.
        """
        seen = self.last.get(site)
        strided = tensor.layout is torch.strided
        if (
            seen is not None
            and seen.size == tensor.shape
            and seen.dtype is tensor.dtype
            and strided
            and seen.sharding == sharding
        ):
            return seen, False
        key = (site, tensor.dtype, tensor.shape, sharding)
        seen = self.all.get(key)
        is_new = seen is None
        if seen is None or not strided:
            description = describe(site, tensor, axes=axes, node=node, sharding=sharding)
            if len(self.all) >= _MAX_SEEN:
                self.all.clear()  # a cache that grows has another shape in every step
                self.last.clear()
            nbytes = description.nbytes
            seen = self.all[key] = Seen(
                description,
                tensor.dtype,
                tensor.shape,
                nbytes,
                room=aligned(nbytes),
                is_small=0 < nbytes < MIN_SHARED_BYTES,
                # A single element may be one that is to be negated when it is read.
                is_simple=not tensor.dtype.is_complex and nbytes > tensor.itemsize,
                is_measured=description.dtype in MEASURED,
                sharding=sharding,
            )
        self.last[site] = seen
        return seen, is_new
