"""Whether parts of some shapes can make up a whole, as far as shapes alone tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glassengine.compare.matching.padding import CACHES
from glassengine.compare.matching.phases import is_of_parameter
from glassengine.compare.ranks.spread import Part, shape_of_whole, uneven


def can_be_arranged(shapes: Sequence[tuple[int, ...]], count: int, whole: tuple[int, ...], site: str) -> bool:
    """Return whether `count` parts of these shapes may be the whole of a site."""
    if len(set(shapes)) > 1:
        sizes = [Part((i,), _Shape(shape)) for i, shape in enumerate(shapes)]  # type: ignore[arg-type]
        return uneven(sizes, whole) is not None
    if padding(shapes[0], count, whole, site) is not None:
        return True
    made = shape_of_whole(shapes[0], whole, is_cache=site.endswith(CACHES))
    if made is None:
        return True  # a shape that has nothing to do with parts is a shape that differs
    num_places = 1
    for part, size in zip(shapes[0], made, strict=True):
        num_places *= size // part if part else 1
    return count % num_places == 0


def padding(shape: tuple[int, ...], count: int, whole: tuple[int, ...], site: str) -> tuple[int, int] | None:
    """Return the dimension along which parts are shares of a table that is padded, and what the last one has of it.

    A vocabulary is padded until each rank has as many rows: of the table itself, and the last dimension of logits. None
    where parts of this shape are none of such a whole.
    """
    differ = [dim for dim, size in enumerate(whole) if len(shape) == len(whole) and shape[dim] != size]
    if len(differ) != 1 or not (differ[0] == len(whole) - 1 or is_of_parameter(site)):
        return None
    part, size = shape[differ[0]], whole[differ[0]]
    return (differ[0], size - part * (count - 1)) if part * (count - 1) < size < part * count else None


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What `uneven` asks of a tensor."""

    shape: tuple[int, ...]
