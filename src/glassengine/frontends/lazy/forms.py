"""Which arguments of a recorded call are sizes, and the call without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from glassengine.frontends.lazy.values import Operation

_SIZED = ("arange", "range")
"""Operations whose numbers are sizes, though their schema calls them numbers."""


@dataclass(frozen=True)
class SizePlace:
    """Stands for a size among the arguments of an operation: the n-th of them."""

    index: int


@dataclass(frozen=True)
class Form:
    """A call without its sizes.

    Attributes:
        key: Equal for calls that differ in sizes alone.
        sizes: Those among the arguments, in order.
        args: The arguments by position, with places for sizes, tensors and numbers.
        kwargs: And by keyword.
    """

    key: str
    sizes: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


_forms: dict[int, Form] = {}
"""Number of an operation -> its form."""


def sizes_of(operation: Operation) -> tuple[int, ...]:
    """Return the sizes among the arguments of a call."""
    return form_of(operation).sizes


def ranks_of(operation: Operation) -> list[tuple[torch.dtype, int] | None]:
    """Return the dtype and the number of dimensions of each result of a call."""
    return [None if kind is None else (kind.dtype, len(kind.shape)) for kind in operation.results]


def with_sizes(operation: Operation, size: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with other sizes, places for tensors and numbers left in."""
    form = form_of(operation)

    def put(value: Any) -> Any:
        if type(value) is SizePlace:
            return size(value.index)
        return type(value)(map(put, value)) if type(value) in (list, tuple) else value

    return put(form.args), {name: put(value) for name, value in form.kwargs.items()}


def form_of(operation: Operation) -> Form:
    """Return the form of an operation."""
    found = _forms.get(operation.number)
    if found is None:
        sizes: list[int] = []

        def put(value: Any, is_size: bool) -> Any:
            if type(value) in (list, tuple):
                return type(value)(put(item, is_size) for item in value)
            if is_size and type(value) is int:
                sizes.append(value)
                return SizePlace(len(sizes) - 1)
            return value

        sized = _sized(operation.target)
        names = [argument.name for argument in operation.target._schema.arguments]
        args = tuple(put(value, names[index] in sized) for index, value in enumerate(operation.args))
        kwargs = {name: put(value, name in sized) for name, value in operation.kwargs.items()}
        key = repr((str(operation.target), args, kwargs, ranks_of(operation)))
        found = _forms[operation.number] = Form(key, tuple(sizes), args, kwargs)
    return found


@functools.cache
def _sized(target: OpOverload) -> frozenset[str]:
    """Return the names of the arguments that are sizes."""
    every = target._overloadpacket.__name__ in _SIZED
    return frozenset(
        argument.name
        for argument in target._schema.arguments
        if _is_size(argument.real_type) or (every and str(argument.type) == "number")
    )


def _is_size(kind: Any) -> bool:
    while isinstance(kind, (torch.ListType, torch.OptionalType)):
        kind = kind.getElementType()
    return isinstance(kind, torch.SymIntType)
