"""The graph of one operation: from its schema and the arguments of a call to a compiled `CapturedGraph` with one node.

The tensors of a call are the inputs of its graph, each once; everything else is a constant, but for numbers that are
made inputs. Results that are arguments written to are not results of the graph: the caller has them already.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from glassengine.backends.protocol.backend import CachingGraphs, CompilingGraphs
from glassengine.errors import BackendError
from glassengine.executable.compilation import Occasion
from glassengine.executable.graph import CapturedGraph, input_spec
from glassengine.executable.run.executable import Executable, compile_graph
from glassengine.ops.traits import traits_of_target

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ORIGIN = ("stack_trace", "nn_module_stack")
_NUMBER_DTYPES = {float: torch.float64, int: torch.int64}
Place = int | str
"""Where an argument stands: its position, or its name where it is given by keyword."""
_NUMERIC = {"Tensor", "number", "Optional[number]", "float", "Optional[float]", "List[number]", "List[float]"}
_SHAPING = {"arange", "range"}  # operations whose numbers are sizes
_UNCOUNTED = {"profiler", "prim", "inductor", "c10d", "_c10d_functional"}
_RANDOM = "random numbers are torch's own, so that a seed means the same"
_DYNAMIC = "the shape of its result depends on values"
_MASKS = (torch.bool, torch.uint8)


class UnforeseenError(BackendError):
    """The results of a call cannot be foreseen: its arguments do not fit, or its results are undeclared."""


class TensorSpec(NamedTuple):
    """What compiled code depends on of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


class EagerCall:
    """The arguments of one call, taken apart.

    Attributes:
        operation: What is called.
        args: Its arguments by position.
        kwargs: And by keyword.
        tensors: Each tensor of the arguments once, in order.
        numbers: Values that may become inputs, in order.
        obstacle: Why this call cannot be compiled; "" where it may be.
    """

    __slots__ = ("_places", "_shape", "args", "kwargs", "numbers", "obstacle", "operation", "tensors")

    def __init__(self, operation: EagerOperation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[float] = []
        self.obstacle = ""
        self._places: dict[int, int] = {}
        self._shape: list[Any] = [operation.op]
        for place, value in enumerate(args):
            self._add(value, place in operation.numeric)
        for name in sorted(kwargs):
            self._shape.append(name)
            self._add(kwargs[name], name in operation.numeric)

    @property
    def key(self) -> tuple[Any, ...]:
        """What the code depends on, but for the values of `numbers`."""
        return tuple(self._shape)

    @property
    def number_key(self) -> tuple[str, ...]:
        """The values of `numbers`; as text, since 0.0 and -0.0 are equal, and so are 1 and 1.0."""
        return tuple(map(repr, self.numbers))

    def inputs(self, with_numbers: bool) -> list[Any]:
        """Return the inputs of the executable of this call, in order."""
        values: list[Any] = list(self.tensors)
        if with_numbers:
            values += [torch.tensor(number, dtype=_NUMBER_DTYPES[type(number)]) for number in self.numbers]
        return values

    def index(self, tensor: torch.Tensor) -> int:
        """Return which of `tensors` it is."""
        return self._places[id(tensor)]

    def _add(self, value: Any, is_numeric: bool) -> None:
        shape = self._shape
        if isinstance(value, torch.Tensor):
            index = self._places.get(id(value))
            if index is None:
                if type(value) not in _PLAIN or value.layout is not torch.strided or value.is_conj() or value.is_neg():
                    self.obstacle = f"{_kind(value)} is not compiled"
                    return
                self._places[id(value)] = len(self.tensors)
                self.tensors.append(value)
                shape.append(TensorSpec(value.dtype, value.shape, value.stride(), value.device))
            else:
                shape.append(index)
        elif is_numeric and is_input_number(value):
            self.numbers.append(value)
            shape.append(type(value))
        elif isinstance(value, (list, tuple)):
            shape.append(len(value))
            for item in value:
                self._add(item, is_numeric)
        else:
            # With the type: 1, 1.0 and True are equal.
            shape.append((type(value), repr(value) if isinstance(value, float) else value))


@dataclass(frozen=True)
class CompiledCall:
    """The executable of calls with one key.

    Attributes:
        executable: Takes `EagerCall.inputs`.
        with_numbers: Whether the numbers are inputs.
        num_results: For each result of the schema how many tensors of the graph it is: None for an argument that is
            returned, 1 for a tensor, and a tuple of one number for a list.
    """

    executable: Executable
    with_numbers: bool
    num_results: tuple[int | tuple[int] | None, ...]

    def run(self, call: EagerCall) -> Any:
        """Return what ATen would return."""
        results = iter(self.executable.run(call.inputs(self.with_numbers)))
        returned: list[Any] = []
        for place, number in zip(call.operation.returned, self.num_results, strict=True):
            if number is None:
                assert place is not None
                returned.append(argument(place, call.args, call.kwargs))
            elif isinstance(number, tuple):
                returned.append([next(results) for _ in range(number[0])])
            else:
                returned.append(next(results))
        return returned[0] if len(returned) == 1 else tuple(returned) or None


def compile_call(
    call: EagerCall,
    *,
    with_numbers: bool,
    backend: CompilingGraphs,
    occasion: Occasion,
    meta: Mapping[str, Any] | None = None,
) -> CompiledCall:
    """Compile the graph of one call.

    Args:
        call: What to compile.
        with_numbers: Whether its numbers become inputs.
        backend: Compiles it.
        occasion: Why.
        meta: Where the call comes from: "stack_trace" and "nn_module_stack" of a captured graph.

    Raises:
        UnforeseenError: Before compiling.
        BackendError: The back-end cannot compile it.
    """
    operation = call.operation
    mode = FakeTensorMode(shape_env=ShapeEnv())
    try:
        # Below autograd a graph is one of plain values.
        fakes = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in call.tensors]
        args, kwargs = tree_map(lambda value: _exchange(call, value, fakes), (tuple(call.args), dict(call.kwargs)))
        with mode, silent():
            outcome = operation.op(*args, **kwargs)
    except Exception as error:
        raise UnforeseenError(f"the results of {operation.op} cannot be foreseen") from error

    graph = torch.fx.Graph()
    written = _written(call)
    names = dict(reversed([(call.index(tensor), name) for name, tensor, _ in _named(call)]))
    specs = [input_spec(fake, names[index], "input", is_mutated=index in written) for index, fake in enumerate(fakes)]
    nodes = [_placeholder(graph, fake) for fake in fakes]
    numbers = []
    if with_numbers:
        for index, number in enumerate(call.numbers):
            fake = mode.from_tensor(torch.tensor(number, dtype=_NUMBER_DTYPES[type(number)]), static_shapes=True)
            specs.append(input_spec(fake, f"number{index}", "input"))
            fakes.append(fake)
            numbers.append(_placeholder(graph, fake))
    values = iter([graph.call_function(torch.ops.aten._local_scalar_dense.default, (node,)) for node in numbers])

    def convert(value: Any, is_numeric: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [convert(item, is_numeric) for item in value]
        if with_numbers and is_numeric and is_input_number(value):
            return next(values)
        return _exchange(call, value, nodes)

    called = graph.call_function(
        operation.op,
        tuple(convert(value, place in operation.numeric) for place, value in enumerate(call.args)),
        {name: convert(call.kwargs[name], name in operation.numeric) for name in sorted(call.kwargs)},
    )
    called.meta.update({name: meta[name] for name in _ORIGIN if name in meta} if meta else {})
    results, num_results = _results(graph, called, operation, outcome)
    graph.output(tuple(results))
    module = torch.fx.GraphModule({}, graph)
    captured = CapturedGraph(module, tuple(specs), tuple(node.name for node in results), "inference")
    cache = backend.graph_cache() if isinstance(backend, CachingGraphs) else None
    # AOT autograd watches the forward graphs that it runs through a mode of its own.
    with _disable_current_modes(), tracing(TracingContext(mode)):
        executable = compile_graph(
            str(operation.op), captured, lambda: backend.compile_graph(module, fakes), cache, occasion
        )
    executable.backend = backend.name
    return CompiledCall(executable, with_numbers, num_results)


def overlap(call: EagerCall) -> bool:
    """Whether a tensor that the call writes to shares memory with another of its tensors, or with itself."""
    if not call.operation.written:
        return False
    written = _written(call)
    storages = [tensor.untyped_storage().data_ptr() for tensor in call.tensors]
    return any(
        (storages[index] and storages.count(storages[index]) > 1)
        or torch._debug_has_internal_overlap(call.tensors[index]) == 1
        for index in written
    )


def _named(call: EagerCall) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every tensor of the arguments: its name by the schema, and whether it is written to."""
    names = [described.name for described in call.operation.op._schema.arguments]
    for name, value in [*zip(names, call.args, strict=False), *call.kwargs.items()]:
        is_written = name in call.operation.written
        if isinstance(value, torch.Tensor):
            yield name, value, is_written
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield f"{name}.{index}", item, is_written


def _written(call: EagerCall) -> set[int]:
    """Return which of the tensors of a call it writes to."""
    return {call.index(tensor) for _, tensor, is_written in _named(call) if is_written}


def _exchange(call: EagerCall, value: Any, others: Sequence[Any]) -> Any:
    return others[call.index(value)] if isinstance(value, torch.Tensor) else value


def _placeholder(graph: torch.fx.Graph, fake: torch.Tensor) -> torch.fx.Node:
    node = graph.placeholder(f"arg{len(graph.nodes)}")
    node.meta["val"] = fake
    return node


def _results(
    graph: torch.fx.Graph, called: torch.fx.Node, operation: EagerOperation, outcome: Any
) -> tuple[list[torch.fx.Node], tuple[int | tuple[int] | None, ...]]:
    """Return the nodes that the graph returns, and how they make up the results of the schema."""
    several = len(operation.returned) > 1
    given = list(outcome) if several else [outcome][: len(operation.returned)]
    nodes: list[torch.fx.Node] = []
    numbers: list[int | tuple[int] | None] = []
    for index, (place, value) in enumerate(zip(operation.returned, given, strict=True)):
        if place is not None:
            numbers.append(None)
            continue
        node = graph.call_function(operator.getitem, (called, index)) if several else called
        if isinstance(value, (list, tuple)):
            nodes += [graph.call_function(operator.getitem, (node, item)) for item in range(len(value))]
            numbers.append((len(value),))
        else:
            nodes.append(node)
            numbers.append(1)
    return nodes, tuple(numbers)


def _kind(tensor: torch.Tensor) -> str:
    """Say what a tensor is that no graph can take."""
    if type(tensor) not in _PLAIN:
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    return "a view as conjugate or negative"


@dataclass(frozen=True)
class EagerOperation:
    """An operation, as far as its schema tells.

    Attributes:
        op: The operation.
        computes: Whether there is anything to compile: not for views, memory that nothing has written, bookkeeping.
        obstacle: Why no call of it can be compiled; "" where one may be.
        numeric: Names and positions of arguments in which a number is a value, and no choice such as a dimension.
        written: Names and positions of arguments that are written to.
        returned: For each result: name and position of the argument that is written to and returned, or None.
        dropout: Name and position of the probability without which a call has nothing random about it, or None.
        indices: Name and position of indices that give the result a shape that depends on values if one is a mask.
    """

    op: OpOverload
    computes: bool
    obstacle: str
    numeric: frozenset[Place]
    written: frozenset[Place]
    returned: tuple[tuple[str, int] | None, ...]
    dropout: tuple[str, int] | None
    indices: tuple[str, int] | None

    def obstacle_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return why a call with these arguments cannot be compiled; "" where it may be."""
        if self.dropout is not None and argument(self.dropout, args, kwargs):
            return _RANDOM
        if self.indices is not None:
            found = argument(self.indices, args, kwargs) or ()
            if any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in found):
                return _DYNAMIC
        return self.obstacle


def argument(place: tuple[str, int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call by name and position; None where it is left out."""
    name, position = place
    return args[position] if position < len(args) else kwargs.get(name)


@functools.cache
def examine(op: OpOverload) -> EagerOperation:
    """Return what the schema of `op` says."""
    schema = op._schema
    places = [(argument.name, index) for index, argument in enumerate(schema.arguments)]
    numeric: set[Place] = set()
    written: set[Place] = set()
    owners: dict[str, tuple[str, int]] = {}
    dropout = indices = None
    for place, described in zip(places, schema.arguments, strict=True):
        if str(described.type) in _NUMERIC and op._overloadpacket.__name__ not in _SHAPING:
            numeric.update(place)
        if described.name == "dropout_p":
            dropout = place
        if described.name == "indices" and torch.Tag.dynamic_output_shape in op.tags:
            indices = place
        if described.alias_info is not None and described.alias_info.is_write:
            written.update(place)
            owners.update(dict.fromkeys(described.alias_info.before_set, place))
    returned = []
    for result in schema.returns:
        aliases = result.alias_info.before_set if result.alias_info is not None else ()
        returned.append(next((owners[alias] for alias in aliases if alias in owners), None))
    computes = not (
        op.is_view
        or torch.Tag.inplace_view in op.tags
        or traits_of_target(op).is_unwritten
        or op._overloadpacket.__name__ == "resize_"
        or op.namespace in _UNCOUNTED
    )
    return EagerOperation(
        op,
        computes,
        _obstacle(op, has_dropout=dropout is not None, has_indices=indices is not None),
        frozenset(numeric),
        frozenset(written),
        tuple(returned),
        dropout if torch.Tag.nondeterministic_seeded in op.tags else None,
        indices,
    )


def _obstacle(op: OpOverload, *, has_dropout: bool, has_indices: bool) -> str:
    if torch.Tag.nondeterministic_seeded in op.tags and not has_dropout:
        return _RANDOM
    if torch.Tag.dynamic_output_shape in op.tags and not has_indices:
        return _DYNAMIC
    if torch.Tag.data_dependent_output in op.tags or not all(
        isinstance(result.type, torch.TensorType) or str(result.type) == "List[Tensor]" for result in op._schema.returns
    ):
        return "its result is a plain value"
    if any(given.kwarg_only and given.alias_info is not None for given in op._schema.arguments):
        return "it writes to out="
    return ""


def is_input_number(value: Any) -> bool:
    """Return whether a value is a number that an input of a graph, a tensor, can hold."""
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let torch not log, while the block foresees results, that arguments do not fit: ATen reports it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
