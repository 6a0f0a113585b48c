"""Sizes of a graph as symbols: which arguments are sizes, what follows from which, and the nodes that compute them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from glassengine.plugins.lazy.memory import order_of
from glassengine.plugins.lazy.values import LazyOperation, LazySpec


@dataclass(frozen=True)
class Size:
    """A size: `scale` times the product of some symbols, plus `plus`."""

    scale: Fraction
    symbols: tuple[int, ...]
    plus: Fraction

    def of(self, values: Sequence[int]) -> Fraction:
        """Return it for values of the symbols."""
        product = self.scale
        for symbol in self.symbols:
            product *= values[symbol]
        return product + self.plus


@dataclass(frozen=True)
class SizeSample:
    """The sizes of one recording.

    Attributes:
        inputs: Of each leaf, dimension by dimension.
        arguments: Those among the arguments of the calls, in order.
    """

    inputs: tuple[int, ...]
    arguments: tuple[int, ...]


@dataclass
class Pattern:
    """How the sizes of recordings of the same calls follow from those that change.

    Attributes:
        symbols: For each the place in `SizeSample.inputs` that holds it.
        inputs: What each of `SizeSample.inputs` is.
        arguments: What each of `SizeSample.arguments` is.
        env: What a compiler assumed of the symbols; None before it was asked.
        names: The symbols in `env`.
    """

    symbols: tuple[int, ...]
    inputs: tuple[Size, ...]
    arguments: tuple[Size, ...]
    env: ShapeEnv | None = None
    names: tuple[sympy.Symbol, ...] = ()

    def fits(self, sample: SizeSample) -> bool:
        """Return whether a recording has the sizes that this foretells, and the compiler's assumptions hold."""
        values = [sample.inputs[place] for place in self.symbols]
        sizes = zip((*self.inputs, *self.arguments), (*sample.inputs, *sample.arguments), strict=True)
        return all(size.of(values) == found for size, found in sizes) and self._assumed(values)

    def _assumed(self, values: Sequence[int]) -> bool:
        env = self.env
        if env is None:
            return True
        known = dict(zip(self.names, map(sympy.Integer, values), strict=True))
        for name, value in known.items():
            bounds = env.var_to_range.get(name)
            if bounds is not None and not bounds.lower <= value <= bounds.upper:
                return False
            if name in env.replacements and env.replacements[name].xreplace(known) != value:
                return False
        return all(guard.expr.xreplace(known) == sympy.true for guard in env.guards)


def strides(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Return the strides of dense memory in which the dimensions follow each other in this order."""
    found: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in reversed(order):
        found[dim] = step
        step = step * shape[dim]
    return tuple(found)


class SymbolicSizes:
    """The sizes of a pattern as symbols of a graph.

    Args:
        pattern: What follows from the symbols.
        sample: The sizes of one recording, which a compiler takes as an example.
        env: What the symbols belong to.
    """

    def __init__(self, pattern: Pattern, sample: SizeSample, env: ShapeEnv) -> None:
        self._values: list[Any] = []
        for number, place in enumerate(pattern.symbols):
            source = ConstantSource(f"size{number}")
            symbol = env.create_symbol(sample.inputs[place], source, dynamic_dim=DimDynamic.DYNAMIC)
            self._values.append(env.create_symintnode(symbol, hint=sample.inputs[place], source=source))
        names = tuple(value.node.expr for value in self._values)
        self.pattern = Pattern(pattern.symbols, pattern.inputs, pattern.arguments, env, names)
        self._nodes: list[torch.fx.Node] = []
        self._inputs = iter(pattern.inputs)
        self._arguments = iter(pattern.arguments)

    def empty(self, kind: LazySpec) -> torch.Tensor:
        """Return the next leaf, without data, in the mode that is in effect."""
        sizes = [next(self._inputs) for _ in kind.shape]
        shape = [self._values[size.symbols[0]] if size.symbols else int(size.plus) for size in sizes]
        return torch.empty_strided(
            shape, strides(shape, order_of(kind.stride, kind.shape)), dtype=kind.dtype, device=kind.device
        )

    def placeholders(self, add: Callable[[Any, str, str], torch.fx.Node]) -> None:
        """Add an input for each symbol, of which a cache of compiled code asks whether it fits."""
        self._nodes = [add(value, f"size{number}", "input") for number, value in enumerate(self._values)]

    def arguments(self, graph: torch.fx.Graph, operation: LazyOperation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the next call, with what stands for its sizes."""
        sizes = [self._node(graph, next(self._arguments)) for _ in sizes_of(operation)]
        return with_sizes(operation, sizes.__getitem__)

    def _node(self, graph: torch.fx.Graph, size: Size) -> Any:
        if not size.symbols:
            return int(size.plus)
        value: Any = self._nodes[size.symbols[0]]
        for symbol in size.symbols[1:]:
            value = graph.call_function(operator.mul, (value, self._nodes[symbol]))
        numerator, denominator = size.scale.numerator, size.scale.denominator
        plus = size.plus * denominator  # (numerator * product + plus) / denominator, which is a whole number
        if numerator != 1:
            value = graph.call_function(operator.mul, (value, numerator))
        if plus:
            value = graph.call_function(operator.add, (value, int(plus)))
        return graph.call_function(operator.floordiv, (value, denominator)) if denominator != 1 else value


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


def sizes_of(operation: LazyOperation) -> tuple[int, ...]:
    """Return the sizes among the arguments of a call."""
    return form_of(operation).sizes


def ranks_of(operation: LazyOperation) -> list[tuple[torch.dtype, int] | None]:
    """Return the dtype and the number of dimensions of each result of a call."""
    return [None if kind is None else (kind.dtype, len(kind.shape)) for kind in operation.results]


def with_sizes(operation: LazyOperation, size: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with other sizes, places for tensors and numbers left in."""
    form = form_of(operation)

    def put(value: Any) -> Any:
        if type(value) is SizePlace:
            return size(value.index)
        return type(value)(map(put, value)) if type(value) in (list, tuple) else value

    return put(form.args), {name: put(value) for name, value in form.kwargs.items()}


def form_of(operation: LazyOperation) -> Form:
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
