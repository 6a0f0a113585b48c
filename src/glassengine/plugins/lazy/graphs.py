"""From pending values to a graph: the calls that make them, in one order, and the values that others look at.

Each is one more output of the graph that makes it anyway, under the name of its site. So observing costs no execution,
and what a tensor was when it was observed is what is seen of it, whatever is written to it later.
"""

from __future__ import annotations

import functools
import linecache
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parallel import DataParallel, DistributedDataParallel

from glassengine import taps
from glassengine.capture.observed_call import modules_being_called
from glassengine.executable.graph import CapturedGraph, input_spec
from glassengine.plugins.lazy.memory import viewed
from glassengine.plugins.lazy.symbols import Pattern, SizeSample, SymbolicSizes
from glassengine.plugins.lazy.tensor import LazyTensor
from glassengine.plugins.lazy.values import NUMBER_DTYPES, LazyCall, LazyValue, filled
from glassengine.sites import ROOT, tap_site


class Awaited:
    """What someone waits for without running a graph; kept alive by who waits.

    Attributes:
        value: What is waited for.
        on_run: Called when a graph has run, whether or not it made this value.

    Args:
        site: Name of the output of the graph, unless the value has one.
    """

    __slots__ = ("__weakref__", "on_run", "value")

    def __init__(self, value: LazyValue, site: str, on_run: Callable[[], None]) -> None:
        value.site = value.site or site
        self.value = value
        self.on_run = on_run
        _awaited[id(self)] = weakref.ref(self)

    def __del__(self) -> None:
        """Forget it."""
        _awaited.pop(id(self), None)

    @property
    def data(self) -> torch.Tensor | None:
        """Its data; None while it is pending."""
        return self.value.data if viewed(self.value) else None


_awaited: dict[int, weakref.ref[Awaited]] = {}


def awaited() -> list[Awaited]:
    """Return what is waited for, in the order in which it was asked for."""
    found = (reference() for reference in list(_awaited.values()))
    return [one for one in found if one is not None]


def observed(calls: Mapping[int, LazyCall], outputs: Collection[LazyValue]) -> Iterator[LazyValue]:
    """Yield the values of some calls that someone looks at and that are not among the outputs, each once.

    Args:
        calls: By number.
        outputs: What the graph is run for.
    """
    seen = {id(value) for value in outputs}
    read = (value for number in sorted(calls) for value in calls[number].reads if value.site)
    for value in (*read, *(one.value for one in awaited())):
        if value.data is None and id(value) not in seen and value.call.number in calls:  # type: ignore[union-attr]
            seen.add(id(value))
            yield value


def mark_taps() -> None:
    """Let a tap of a lazy tensor name its value."""
    taps.set_lazy(LazyTensor, _mark)


def _mark(name: str, tensor: LazyTensor) -> None:
    value = tensor._lazy.get()
    value.site = value.site or tap_site(called_path() or ROOT, name)


def called_path() -> str:
    """Return the path in the outermost module that is being called of the innermost; "" where there is only one."""
    called: nn.Module | None = None
    root: nn.Module | None = None
    for module in modules_being_called():
        called, root = called or module, module
    if root is None or called is root:
        return ""
    if isinstance(root, (DataParallel, DistributedDataParallel)):
        root = root.module
    return next((path for path, module in root.named_modules() if module is called), "")


aten = torch.ops.aten


@dataclass(frozen=True)
class Pending:
    """The calls that make some values.

    Attributes:
        calls: In the order in which they were recorded.
        leaves: The values with data that they read, in the order in which they are first read.
        outputs: The values, and after them those of the calls that someone looks at.
        numbers: All numbers among the arguments of the calls.
        key: Equal for equal calls, wired the same way, whatever the data and the numbers.
    """

    calls: tuple[LazyCall, ...]
    leaves: tuple[LazyValue, ...]
    outputs: tuple[LazyValue, ...]
    numbers: tuple[float, ...]
    key: tuple[int, ...]


_sites: dict[str, int] = {}
"""Names of outputs -> what stands for them in a key."""


def pending_graph(outputs: Sequence[LazyValue]) -> Pending:
    """Return the calls that make `outputs`, which are pending, each once, and what else someone looks at of them."""
    waiting = [value.call for value in outputs if value.call is not None]
    visited: dict[int, LazyCall] = {}
    while waiting:
        call = waiting.pop()
        if call.number in visited:
            continue
        visited[call.number] = call
        for value in call.reads:
            if value.data is None and value.call.number not in visited:  # type: ignore[union-attr]
                waiting.append(value.call)  # type: ignore[arg-type]
    calls = tuple(visited[number] for number in sorted(visited))
    outputs = (*outputs, *observed(visited, outputs))
    first: dict[int, int] = {}
    leaf_numbers: dict[int, int] = {}
    leaves: list[LazyValue] = []
    numbers: list[float] = []
    key: list[int] = []
    made = 0
    for call in calls:
        first[call.number] = made
        made += len(call.operation.results)
        key.append(call.operation.number)
        for value in call.reads:
            if value.data is None:
                key.append(first[value.call.number] + value.index)  # type: ignore[union-attr]
                continue
            number = leaf_numbers.get(id(value))
            if number is None:
                number = leaf_numbers[id(value)] = len(leaves)
                leaves.append(value)
            key.append(-1 - number)
        numbers += call.numbers
    key += [first[value.call.number] + value.index for value in outputs]  # type: ignore[union-attr]
    key += [_sites.setdefault(value.site, len(_sites)) for value in outputs if value.site]
    return Pending(calls, tuple(leaves), tuple(outputs), tuple(numbers), tuple(key))


def captured(
    made_by: Pending,
    hoisted: frozenset[int],
    names: dict[int, tuple[str, str]],
    sizes: tuple[Pattern, SizeSample] | None = None,
) -> tuple[CapturedGraph, list[Any], FakeTensorMode, Pattern | None]:
    """Return the graph of pending values, its inputs without data, the mode that these belong to, and its sizes.

    Args:
        made_by: The calls.
        hoisted: Which of their numbers are inputs; the others are constants.
        names: Id of a value -> (name, kind) of a parameter or buffer.
        sizes: What sizes follow from those that are symbols, and all sizes of this recording; None for a graph without
            symbols.
            The pattern that is returned has the symbols of the graph.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    symbols = None if sizes is None else SymbolicSizes(*sizes, env)
    graph = torch.fx.Graph()
    fakes: list[Any] = []
    specs = []
    nodes: dict[tuple[int, int], torch.fx.Node] = {}
    leaves: dict[int, torch.fx.Node] = {}
    taken: set[str] = set()

    def placeholder(fake: Any, name: str, kind: str) -> torch.fx.Node:
        node = graph.placeholder(f"arg{len(fakes)}")
        node.meta["val"] = fake
        fakes.append(fake)
        unique = name if name not in taken else f"{name}.{len(fakes)}"
        taken.add(unique)
        specs.append(input_spec(fake, unique, kind))  # type: ignore[arg-type]
        return node

    if symbols is not None:
        symbols.placeholders(placeholder)
    for index, value in enumerate(made_by.leaves):
        assert value.data is not None
        name, kind = names.get(id(value), (f"input{index}", "input"))
        if symbols is None:
            fake: torch.Tensor = mode.from_tensor(value.data, static_shapes=True)
        else:
            with mode:
                fake = symbols.empty(value.spec)
        leaves[id(value)] = placeholder(fake, name, kind)
    numbers: dict[int, torch.fx.Node] = {}
    for index in sorted(hoisted):
        number = made_by.numbers[index]
        example = torch.tensor(number, dtype=NUMBER_DTYPES[type(number)])
        numbers[index] = placeholder(mode.from_tensor(example, static_shapes=True), f"number{index}", "input")
    for index, node in list(numbers.items()):
        numbers[index] = graph.call_function(aten._local_scalar_dense.default, (node,))
    start = 0
    for call in made_by.calls:

        def tensor(index: int, call: LazyCall = call) -> torch.fx.Node:
            value = call.reads[index]
            return leaves[id(value)] if value.data is not None else nodes[value.call.number, value.index]  # type: ignore[union-attr]

        def number_of(index: int, call: LazyCall = call, start: int = start) -> Any:
            return numbers.get(start + index, call.numbers[index])

        operation = call.operation
        placed = (operation.args, operation.kwargs) if symbols is None else symbols.arguments(graph, operation)
        args, kwargs = filled(*placed, tensor, number_of)
        node = graph.call_function(operation.target, args, kwargs)
        where = source_of(call)
        if where:
            node.meta["stack_trace"] = where
        start += len(call.numbers)
        if operation.is_list or operation.is_tuple:
            read = {value.index for other in made_by.calls for value in other.reads if value.call is call}
            read |= {value.index for value in made_by.outputs if value.call is call}
            for index in sorted(read):
                nodes[call.number, index] = graph.call_function(operator.getitem, (node, index))
        else:
            nodes[call.number, 0] = node
    results = [nodes[value.call.number, value.index] for value in made_by.outputs]  # type: ignore[union-attr]
    graph.output(tuple(results))
    module = torch.fx.GraphModule({}, graph)
    outputs = _unique([value.site or node.name for node, value in zip(results, made_by.outputs, strict=True)])
    graph_of = CapturedGraph(module, tuple(specs), outputs, "inference")
    return graph_of, fakes, mode, None if symbols is None else symbols.pattern


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, with its number added to one that was there before."""
    return tuple(f"{name}.{number}" if name in names[:number] else name for number, name in enumerate(names))


def source_of(call: LazyCall) -> str:
    """Return where a call was made, in the form of a traceback; "" where it is unknown."""
    if call.code is None:
        return ""
    file, line, name = place_of(call.code, call.lasti)
    text = linecache.getline(file, line).strip()
    return f'File "{file}", line {line}, in {name}\n    {text}'


@functools.lru_cache(4096)
def place_of(code: CodeType, lasti: int) -> tuple[str, int, str]:
    """Return the file, the line and the function of an instruction."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= lasti < end and number is not None:
            line = number
    return code.co_filename, line, code.co_qualname
