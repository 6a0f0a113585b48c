"""Sizes that change: how the sizes among the arguments of recorded calls follow from those of a graph's inputs.

A call is recorded with the sizes of its moment, so nothing says that the 8 of a `view` is twice the batch. It is
worked out from two recordings of the same calls with other sizes: what differs is fitted as a multiple of a size, or
of a product of two. After the first recording the second is foreseen (`foreseen`). No fit is trusted: each later
recording is compared with what it says, argument by argument, and one that differs is compiled again.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from glassengine.plugins.lazy.graphs import Pending
from glassengine.plugins.lazy.memory import order_of
from glassengine.plugins.lazy.rules import NotRecordableError, infer_outputs
from glassengine.plugins.lazy.symbols import Pattern, Size, SizeSample, form_of, ranks_of, sizes_of, strides, with_sizes
from glassengine.plugins.lazy.values import LazyOperation, LazySpec, LazyValue, spec

_MAX_TRIALS = 64
_FORESEEN = 3
"""Times the size that is there: what is divided into equal parts still is."""


_Term = tuple[tuple[int, ...], tuple[int, ...]]
"""Symbols, and the product of their values in each recording."""


def sample_of(made_by: Pending) -> SizeSample:
    """Return the sizes of a recording."""
    inputs = tuple(size for value in made_by.leaves for size in value.spec.shape)
    return SizeSample(inputs, tuple(size for call in made_by.calls for size in sizes_of(call.operation)))


def skeleton(made_by: Pending) -> tuple[Any, ...] | None:
    """Return what is equal for recordings of the same calls, whatever their sizes; None where they cannot change."""
    if not any(value.dynamic for value in made_by.leaves) or not all(_is_dense(value.spec) for value in made_by.leaves):
        return None
    key = list[Any](made_by.key)
    place = 0
    for call in made_by.calls:
        key[place] = form_of(call.operation).key
        place += 1 + len(call.reads)
    for value in made_by.leaves:
        kind = value.spec
        key.append((kind.dtype, kind.device, tuple(order_of(kind.stride, kind.shape)), tuple(sorted(value.dynamic))))
    return tuple(key)


def _is_dense(kind: LazySpec) -> bool:
    dense = strides(kind.shape, order_of(kind.stride, kind.shape))
    return kind.offset == 0 and all(
        size < 2 or one == other for size, one, other in zip(kind.shape, kind.stride, dense, strict=True)
    )


def constant(sample: SizeSample) -> Pattern:
    """Return the pattern of one recording alone."""
    return Pattern((), tuple(map(_constant, sample.inputs)), tuple(map(_constant, sample.arguments)))


def fitted(samples: Sequence[SizeSample]) -> Pattern | None:
    """Return the pattern of all these recordings; None where there is none."""
    symbols: dict[tuple[int, ...], int] = {}
    places: list[int] = []
    inputs: list[Size] = []
    for place, values in enumerate(zip(*(sample.inputs for sample in samples), strict=True)):
        if len(set(values)) == 1:
            inputs.append(_constant(values[0]))
            continue
        if values not in symbols:
            symbols[values] = len(symbols)
            places.append(place)
        inputs.append(Size(Fraction(1), (symbols[values],), Fraction(0)))
    terms = _terms(list(symbols))
    find = functools.cache(lambda values: _fit(values, terms))
    arguments = [find(values) for values in zip(*(sample.arguments for sample in samples), strict=True)]
    if any(found is None for found in arguments):
        return None
    return Pattern(tuple(places), tuple(inputs), tuple(found for found in arguments if found is not None))


def _constant(value: int) -> Size:
    return Size(Fraction(0), (), Fraction(value))


def _terms(symbols: Sequence[tuple[int, ...]]) -> list[_Term]:
    """Return what a size may be a multiple of, the simplest first."""
    numbers = range(len(symbols))
    found: list[_Term] = [((number,), symbols[number]) for number in numbers]
    for a, b in itertools.combinations_with_replacement(numbers, 2):
        found.append(((a, b), tuple(x * y for x, y in zip(symbols[a], symbols[b], strict=True))))
    return found


def _fit(values: tuple[int, ...], terms: Sequence[_Term]) -> Size | None:
    if len(set(values)) == 1:
        return _constant(values[0])
    found = []
    for symbols, products in terms:
        if len(set(products)) == 1:
            continue
        other = next(index for index, product in enumerate(products) if product != products[0])
        scale = Fraction(values[other] - values[0], products[other] - products[0])
        plus = values[0] - scale * products[0]
        if all(scale * product + plus == value for product, value in zip(products, values, strict=True)):
            found.append(Size(scale, symbols, plus))
    return min(found, key=lambda size: (size.plus != 0, len(size.symbols), size.scale.denominator), default=None)


def foreseen(made_by: Pending) -> SizeSample | None:
    """Return what would be recorded with other sizes in the dimensions that are marked; None where nothing fits.

    Each call is foreseen with sizes in its arguments that come from those of its inputs as the recorded ones do, or
    else from those of any tensor before it.
    """
    leaves = {id(value): _enlarged(value) for value in made_by.leaves}
    seen = _Changes()
    for value in made_by.leaves:
        seen.add(value.spec.shape, leaves[id(value)].shape)
    kinds: dict[tuple[int, int], LazySpec] = {}
    arguments: list[int] = []
    for call in made_by.calls:
        after = [
            leaves[id(value)] if value.data is not None else kinds[value.call.number, value.index].flat  # type: ignore[union-attr]
            for value in call.reads
        ]
        changes = _Changes()
        for value, kind in zip(call.reads, after, strict=True):
            changes.add_products(value.spec.shape, kind.shape)
        choices = [dict.fromkeys((*changes.of(size), *seen.of(size), size)) for size in sizes_of(call.operation)]
        outcome = None
        for sizes in itertools.islice(itertools.product(*choices), _MAX_TRIALS):
            outcome = _outcome(call.operation, sizes, after, call.numbers)
            if outcome is not None:
                arguments += sizes
                break
        if outcome is None:
            return None
        for index, (was, kind_after) in enumerate(zip(call.operation.results, outcome.results, strict=True)):
            if was is not None and kind_after is not None:
                kinds[call.number, index] = kind_after
                seen.add(was.shape, kind_after.shape)
    return SizeSample(tuple(size for value in made_by.leaves for size in leaves[id(value)].shape), tuple(arguments))


class _Changes:
    """What sizes become."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, None]] = {}

    def add(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Note the sizes of a tensor."""
        for was, becomes in zip(before, after, strict=True):
            if was != becomes and was > 1:
                self._found.setdefault(was, {})[becomes] = None

    def add_products(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Note the sizes of a tensor, and the products of neighbors, into which a view may put them together."""
        self.add(before, after)
        for start in range(len(before)):
            self.add(list(_products(before[start:])), list(_products(after[start:])))

    def of(self, size: int) -> Iterator[int]:
        """Yield what a size becomes, what was noted first before the others."""
        yield from self._found.get(size, ())


def _products(sizes: Sequence[int]) -> Iterator[int]:
    return itertools.accumulate(sizes, operator.mul)


def _enlarged(value: LazyValue) -> LazySpec:
    kind = value.spec
    shape = tuple(size * _FORESEEN if dim in value.dynamic else size for dim, size in enumerate(kind.shape))
    return spec(kind.dtype, shape, strides(shape, order_of(kind.stride, kind.shape)), 0, kind.device)


def _outcome(
    operation: LazyOperation, sizes: Sequence[int], kinds: Sequence[LazySpec], numbers: Sequence[float]
) -> LazyOperation | None:
    """Foresee a call with other sizes; None where they do not fit."""
    args, kwargs = with_sizes(operation, sizes.__getitem__)
    try:
        made = infer_outputs(operation.target, kinds, numbers, (args, kwargs))
    except NotRecordableError:
        return None
    return made if ranks_of(made) == ranks_of(operation) else None
