"""How far what each process has is from its place in the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from glassengine.compare.ranks.assembly import Assembly, error_of
from glassengine.compare.ranks.shards import Local, owners
from glassengine.recording.layout.layout import Entry

if TYPE_CHECKING:
    from torch import Tensor


def errors_of_ranks(
    assembly: Assembly, reference: Tensor, factor: float, local_parts: Sequence[tuple[int, Tensor, Entry]]
) -> dict[int, float] | None:
    """Return the error of each rank; None where ranks add up to what they have.

    Args:
        assembly: Parts in their places.
        reference: The counterpart of the whole.
        factor: How many times the whole's the parts are.
        local_parts: Rank, values and entry of what each process recorded.
    """
    found: dict[int, float] = {}
    for i, part in enumerate(assembly.parts):
        there, tensor = assembly.place(i, reference), part.tensor / factor if factor != 1 else part.tensor
        if len(part.ranks) == 1:
            found[part.ranks[0]] = error_of(tensor, there)
            continue
        local: list[Local] = [
            (rank, of_rank, one.sharding)
            for rank, of_rank, one in local_parts
            if rank in part.ranks and one.sharding is not None
        ]
        by = owners(local)
        if by is None or tensor.shape != there.shape:
            return None
        found |= {rank: error_of(tensor[by == rank], there[by == rank]) for rank in part.ranks}
    return found
