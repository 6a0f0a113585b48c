"""Finds the layout of a tensor that several processes hold in parts.

Of a regular mesh of processes each dimension cuts one dimension of the tensor, or repeats it. Which does what is not
written anywhere: of the few ways that fit the shapes, the one is taken in which most parts agree with the counterpart,
at a sample of their elements. Ways are tried in the order in which they are usual: it decides where evidence does not.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from glassengine.compare.matching.sources import CACHES, is_of_parameter

_MAX_GROUP = 64
"""Query heads per key head up to which a fused projection is recognized."""


@dataclasses.dataclass(frozen=True)
class RankPart:
    """What one process has, or several whose distributed tensor has been put together."""

    ranks: tuple[int, ...]
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class RankArrangement:
    """A way to make up the whole.

    Attributes:
        whole: Sizes of what is made up.
        index: Of each part: where it lies.
        cells: Of each part: a name of its place; parts with the same one are copies of each other.
        dims: The dimensions that are cut.
        by_data: Those of them that are cut as the inputs are.
        style: In which order the dimensions of the mesh follow one another.
        num_pieces: How many pieces a part has along the dimension that is cut, of a fused projection.
    """

    whole: Shape
    index: tuple[Index, ...]
    cells: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    by_data: tuple[int, ...] = ()
    style: str = ""
    num_pieces: int = 1

    @property
    def in_words(self) -> str:
        """In words."""
        if not self.dims:
            return "in every rank"
        dims = " and ".join(map(str, self.dims))
        text = f"concatenated along dimension{'s' if len(self.dims) > 1 else ''} {dims}"
        return text + (f" in {self.num_pieces} pieces" if self.num_pieces > 1 else "")


@dataclasses.dataclass(frozen=True)
class DataLayout:
    """Which rows, and which positions in them, each process was given of the inputs.

    Attributes:
        sizes: Rows and positions of the whole inputs.
        of_rank: Rank -> its rows and positions; None where it has all.
        groups: Rank -> number of the group of ranks that were given the same.
    """

    sizes: tuple[int, ...]
    of_rank: Mapping[int, tuple[Tensor | None, ...]]
    groups: Mapping[int, int]

    @property
    def num_groups(self) -> int:
        """How many groups were given different data."""
        return len(set(self.groups.values()))

    def positions(self, ranks: Sequence[int]) -> tuple[Tensor | None, ...] | None:
        """Return the rows and positions that all of `ranks` have; None where they do not have the same."""
        if any(rank not in self.groups for rank in ranks) or len({self.groups[rank] for rank in ranks}) != 1:
            return None
        return self.of_rank[ranks[0]]


def take(whole: Tensor, index: Index) -> Tensor:
    """Return the part of `whole` that lies at `index`."""
    whole, rest = _narrowed(whole, index)
    for dim, at in rest:
        whole = whole.index_select(dim, at)
    return whole


def put(whole: Tensor, index: Index, part: Tensor) -> None:
    """Write `part` into `whole` at `index`."""
    whole, rest = _narrowed(whole, index)
    if not rest:
        whole.copy_(part)
    elif len(rest) == 1:
        whole.index_copy_(*rest[0], part)
    else:
        scattered = dict(rest)
        places = [scattered.get(dim, torch.arange(size)) for dim, size in enumerate(whole.shape)]
        whole[torch.meshgrid(*places, indexing="ij")] = part


def _narrowed(whole: Tensor, index: Index) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Return a view that is cut along all dimensions where positions follow one another, and what is left to do."""
    rest = []
    for dim, at in enumerate(index):
        if at is None:
            continue
        start, size = int(at[0]) if len(at) else 0, len(at)
        if size and int(at[-1]) == start + size - 1 and bool((at.diff() == 1).all()):
            whole = whole.narrow(dim, start, size)
        else:
            rest.append((dim, at))
    return whole, rest


def shape_of_whole(part: Shape, whole: Shape, *, is_cache: bool) -> Shape | None:
    """Return what parts of one shape can make up: `whole`, but for a cache of another length; None if nothing."""
    if len(part) != len(whole):
        return None
    wanted = list(whole)
    if is_cache and len(whole) > 2 and (part[-2] > whole[-2] or whole[-2] % max(1, part[-2])):
        wanted[-2] = part[-2]
    if any((p == 0 and w != 0) or (p and w % p) for p, w in zip(part, wanted, strict=True)):
        return None
    return tuple(wanted)


def arrangements(parts: Sequence[RankPart], whole: Shape, layout: DataLayout | None) -> Iterator[RankArrangement]:
    """Yield the ways in which parts of one shape can make up `whole`, the usual ones first."""
    shape = tuple(parts[0].tensor.shape)
    dims = [d for d, (p, w) in enumerate(zip(shape, whole, strict=True)) if p != w]
    if not dims:
        yield RankArrangement(whole, ((None,) * len(whole),) * len(parts), ((),) * len(parts), ())
        return
    for by_data in _data_dims(parts, shape, whole, dims, layout):
        yield from _on_meshes(parts, shape, whole, [d for d in dims if d not in by_data], by_data)


def uneven(parts: Sequence[RankPart], whole: Shape, layout: DataLayout | None = None) -> RankArrangement | None:
    """Return how parts of different sizes along one dimension make up the whole, or several copies of it.

    Those of the rows that each rank was given lie where these do.
    """
    shapes = [tuple(part.tensor.shape) for part in parts]
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    for dim, size in enumerate(whole):
        if {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes} != {(*whole[:dim], *whole[dim + 1 :])}:
            continue
        sizes = [shape[dim] for shape in shapes]
        if not 0 < size <= sum(sizes) or sum(sizes) % size or max(sizes) >= size:
            continue
        if layout is not None and (rows := _rows(parts, size, sizes, layout)) is not None:
            index = tuple(_along(dim, at, len(whole)) for at in rows)
            cells = tuple((layout.groups[part.ranks[0]],) for part in parts)
            return RankArrangement(whole, index, cells, (dim,), (dim,))
        for starts in _starts(sizes, size):
            index = tuple(_along(dim, torch.arange(a, a + n), len(whole)) for a, n in zip(starts, sizes, strict=True))
            cells = tuple((start,) for start in starts)
            return RankArrangement(whole, index, cells, (dim,))
    return None


def _rows(parts: Sequence[RankPart], size: int, sizes: Sequence[int], layout: DataLayout) -> list[Tensor] | None:
    """Return where parts of the ranks' own rows lie, or of all positions in them; None where they are of others."""
    given = [layout.positions(part.ranks) for part in parts]
    is_flat = size != layout.sizes[0] and size == math.prod(layout.sizes[:2])
    found = [(_flattened(at, layout.sizes) if is_flat else at[0]) if at else None for at in given]
    rows = [at for at, own in zip(found, sizes, strict=True) if at is not None and len(at) == own]
    return rows if len(rows) == len(parts) and (is_flat or size == layout.sizes[0]) else None


def _starts(sizes: Sequence[int], whole: int) -> Iterator[list[int]]:
    """Yield where parts begin: one copy after another, or all that have the same part beside one another."""
    count = sum(sizes) // whole
    for order in (sizes, sizes[::count]):
        ends = list(itertools.accumulate(order))
        begins = [(end - size) % whole for end, size in zip(ends, order, strict=True)]
        fits = all(begin + size <= whole for begin, size in zip(begins, order, strict=True))
        if order is sizes and fits:
            yield begins
        elif fits and len(sizes) % count == 0 and all(sizes[i] == sizes[i - i % count] for i in range(len(sizes))):
            yield [begin for begin in begins for _ in range(count)]


def _data_dims(
    parts: Sequence[RankPart], shape: Shape, whole: Shape, dims: Sequence[int], layout: DataLayout | None
) -> Iterator[dict[int, list[Tensor]]]:
    """Yield which dimensions are cut as the inputs are, and where each part lies along them; nothing cut so last."""
    positions = [layout.positions(part.ranks) for part in parts] if layout is not None else [None]
    if layout is not None and all(at is not None for at in positions):
        known = [at for at in positions if at is not None]
        of_dim: dict[int, list[Tensor]] = {}
        used: set[int] = set()
        for dim in dims:
            for axis, size in enumerate(layout.sizes):
                found = [at[axis] for at in known]
                if (
                    axis not in used
                    and whole[dim] == size
                    and all(x is not None and len(x) == shape[dim] for x in found)
                ):
                    of_dim[dim] = [x for x in found if x is not None]
                    used.add(axis)
                    break
            else:
                if not used and len(layout.sizes) > 1 and whole[dim] == math.prod(layout.sizes):
                    flat = [_flattened(at, layout.sizes) for at in known]
                    if all(len(x) == shape[dim] for x in flat):
                        of_dim[dim] = flat
                        used = {0, 1}
        if of_dim:
            yield of_dim
    yield {}


def _flattened(at: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> Tensor:
    rows, columns = (torch.arange(size) if x is None else x for x, size in zip(at, sizes, strict=True))
    return (rows[:, None] * sizes[1] + columns).flatten()


def _on_meshes(
    parts: Sequence[RankPart], shape: Shape, whole: Shape, dims: Sequence[int], by_data: Mapping[int, list[Tensor]]
) -> Iterator[RankArrangement]:
    """Yield the ways to spread `dims` over the processes that have the same data, or over all."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for i in range(len(parts)):
        groups[tuple(tuple(at[i].tolist()) for at in by_data.values())].append(i)
    sizes = {len(group) for group in groups.values()}
    factors = [whole[dim] // shape[dim] for dim in dims]
    if len(sizes) != 1 or (peers := sizes.pop()) % math.prod(factors):
        return
    number = {i: (g, j) for g, group in enumerate(groups.values()) for j, i in enumerate(group)}
    copies = peers // math.prod(factors)
    # The last dimension of a mesh runs fastest; copies beside one another are as usual as copies far apart.
    axes = [
        *((dim, factor) for dim, factor in zip(dims, factors, strict=True)),
        *([(-1, copies)] if copies > 1 else []),
    ]
    for order in itertools.permutations(axes):
        at = [_coordinates(number[i][1], order) for i in range(len(parts))]
        style = " ".join(str(-1 if dim == -1 else 0) for dim, _ in order)
        pieces: list[tuple[int, ...] | None] = [None]
        if len(dims) == 1:
            pieces += _pieces(shape[dims[0]])
        for sizes_of in pieces:
            index = []
            for i in range(len(parts)):
                own: list[Tensor | None] = [None] * len(whole)
                for dim, positions in by_data.items():
                    own[dim] = positions[i]
                for dim, factor in zip(dims, factors, strict=True):
                    own[dim] = _share(at[i][dim], factor, shape[dim], sizes_of)
                index.append(tuple(own))
            yield RankArrangement(
                whole,
                tuple(index),
                tuple((number[i][0], *(at[i][dim] for dim in dims)) for i in range(len(parts))),
                tuple(sorted((*dims, *by_data))),
                tuple(by_data),
                style,
                1 if sizes_of is None else len(sizes_of),
            )


def _coordinates(number: int, axes: Sequence[tuple[int, int]]) -> dict[int, int]:
    coordinates = {}
    for dim, size in reversed(axes):
        number, coordinates[dim] = divmod(number, size)
    return coordinates


def _share(at: int, count: int, size: int, pieces: tuple[int, ...] | None) -> Tensor:
    """Return the positions of share `at` of `count`: `size` in one run, or a run of each piece."""
    if pieces is None:
        return torch.arange(at * size, (at + 1) * size)
    starts = itertools.accumulate((piece * count for piece in pieces), initial=0)
    return torch.cat([torch.arange(s + at * p, s + (at + 1) * p) for s, p in zip(starts, pieces, strict=False)])


def _pieces(size: int) -> Iterator[tuple[int, ...]]:
    """Yield how a part may consist of pieces: two equal ones, or queries and as many or fewer keys and values."""
    if size % 2 == 0:
        yield size // 2, size // 2
    for group in range(1, _MAX_GROUP + 1):
        if size % (group + 2) == 0:
            piece = size // (group + 2)
            yield group * piece, piece, piece


def choose(
    parts: Sequence[RankPart], ways: Iterator[RankArrangement], reference: Tensor, usual: Mapping[str, int]
) -> RankArrangement | None:
    """Return the way in which most parts agree with `reference`; the usual one where none is better.

    Args:
        parts: Of one shape.
        ways: To choose from.
        reference: The counterpart of the whole; a cache may be of another length.
        usual: How often each style was what all parts agreed with.
    """
    best: tuple[tuple[int, int, int], RankArrangement] | None = None
    by_data: int | None = None
    sample = sampled(tuple(parts[0].tensor.shape), tuple(reference.shape))
    ours = [taken_at(part.tensor, sample) for part in parts]
    for number, way in enumerate(ways):
        if best is not None and not way.dims:
            break
        count = sum(
            agreement(x, taken_at(reference, moved_by(sample, index))) for x, index in zip(ours, way.index, strict=True)
        )
        if way.by_data:
            by_data = max(by_data or 0, count)
        elif by_data is not None and (count < len(parts) or 2 * by_data >= len(parts)):
            continue  # what is cut as the inputs are is not cut otherwise, unless that alone agrees
        key = (count, usual.get(way.style, 0) if way.num_pieces == 1 else -1, -number)
        if best is None or key > best[0]:
            best = key, way
        if count == len(parts):
            break
    return None if best is None else best[1]


def _along(dim: int, at: Tensor, ndim: int) -> Index:
    return tuple(at if i == dim else None for i in range(ndim))


Shape = tuple[int, ...]


Index = tuple["Tensor | None", ...]
"""For each dimension the positions in the whole; None for all of them."""


_NUM_SAMPLES = 256


_AGREES = 0.05
"""A part agrees with a place where, but for a factor, at most this fraction of it is not what is there."""


def sample_of(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, the same ones of every tensor of its shape."""
    return taken_at(tensor, sampled(tuple(tensor.shape), tuple(tensor.shape)))


def share_of_sample(part: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a sample of `part` beside each place of `whole` where it may lie, if the shapes allow it."""
    shape = tuple(part.shape)
    if part.dim() != whole.dim() or any(p == 0 or w % p for p, w in zip(shape, whole.shape, strict=True)):
        return
    sample = sampled(shape, shape)
    own = taken_at(part, sample)
    counts = [w // p for p, w in zip(shape, whole.shape, strict=True)]
    for place in itertools.islice(itertools.product(*map(range, counts)), _NUM_SAMPLES):
        moved = tuple(x + at * p for x, at, p in zip(sample, place, shape, strict=True))
        yield own, taken_at(whole, moved)


def agreement(x: Tensor, y: Tensor) -> bool:
    """Return whether two samples agree but for a factor."""
    power = float(y.dot(y))
    if not math.isfinite(power) or not bool(x.isfinite().all()):
        return bool((x.nan_to_num() == y.nan_to_num()).all())
    factor = float(x.dot(y)) / power if power else 0.0
    return float((x - factor * y).norm()) <= _AGREES * float(x.norm()) and (factor > 0 or not power)


def factor_of(part: Tensor, reference: Tensor) -> float | None:
    """Return what number of times `reference` a part is, at a sample; None where it is no multiple of it."""
    sample = sampled(tuple(part.shape), tuple(reference.shape))
    x, y = taken_at(part, sample), taken_at(reference, sample)
    power = float(y.dot(y))
    if not power or not math.isfinite(power) or not agreement(x, y):
        return None
    return float(x.dot(y)) / power


@functools.lru_cache(maxsize=1024)
def sampled(shape: Shape, whole: Shape) -> tuple[Tensor, ...]:
    """Return the positions of some elements of a part; of a cache that is longer than the whole, of the first ones."""
    sizes = [min(p, w) for p, w in zip(shape, whole, strict=True)]
    numel = math.prod(sizes)
    if numel <= _NUM_SAMPLES:
        at = torch.arange(numel)
    else:
        at = torch.randint(numel, (_NUM_SAMPLES,), generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []
    # torch.unravel_index imports sympy, which takes seconds.
    for size in reversed(sizes):
        found.insert(0, at % size)
        at = at // size
    return tuple(found)


def taken_at(tensor: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    """Return the elements of `tensor` at some positions."""
    return tensor[where].double().reshape(-1)


def moved_by(sample: tuple[Tensor, ...], index: Index) -> tuple[Tensor, ...]:
    """Return positions of a part as positions of the whole."""
    return tuple(x if at is None else at[x] for x, at in zip(sample, index, strict=True))


def can_be_arranged(shapes: Sequence[tuple[int, ...]], count: int, whole: tuple[int, ...], site: str) -> bool:
    """Return whether `count` parts of these shapes may be the whole of a site."""
    if len(set(shapes)) > 1:
        sizes = [RankPart((i,), _Shape(shape)) for i, shape in enumerate(shapes)]  # type: ignore[arg-type]
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
