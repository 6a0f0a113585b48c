"""Captured graphs, as data that outlives their compilation; one run of an executable, and its observers.

A graph is at ATen level and flat: parameters, buffers and sizes are inputs like all others. Its canonical text names
values by position, so that the text and its hash are the same in every process and for every naming of nodes. The hash
covers what the compiled code depends on: operations, literal arguments, and dtype, shape, stride and device of inputs.

Observers attach to `Executable.run`, the only place where a compiled graph runs, so every front end has all of them.
Nothing is gathered for an unobserved execution.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.program.representation.naming import source_line
from glassengine.program.representation.program import OnnxGraph, Program, copied_graph

GraphKind = Literal["inference", "forward", "backward", "engine"]
InputKind = Literal["parameter", "buffer", "input", "size", "saved", "tangent", "other"]

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # of torch.export, for nodes outside of every module
_SYMBOL = re.compile(r"\b[suz]+f?\d+\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph.

    Attributes:
        name: Unique in its graph: the qualified name of a parameter or buffer, the expression that the user's code
            reads an input from ("x", "args[0]"), the name of the node behind anything else.
        kind: "parameter", "buffer", "input"; "size" for a number; "saved" and "tangent" for what a backward graph gets
            from its forward graph and from the gradient of its results; "other" for what torch adds (random states).
        dtype: Of a tensor, without "torch."; "int", "float" or "bool" for a number.
        shape: Sizes; a symbol or an expression of symbols is text. Empty for a number.
        symbol: Which symbol a number is the value of; "" for a tensor.
        stride: As `shape`; empty where there is none.
        device: "cpu", "cuda:0", ...; "" for a number.
        requires_grad: Whether the caller's tensor takes part in autograd.
        is_mutated: Whether the graph writes to it.
    """

    name: str
    kind: InputKind
    dtype: str
    shape: tuple[int | str, ...] = ()
    stride: tuple[int | str, ...] = ()
    device: str = ""
    requires_grad: bool = False
    is_mutated: bool = False
    symbol: str = ""

    def __str__(self) -> str:
        """What compiled code depends on: not the name, nor autograd, which is over once a graph is captured."""
        if not self.device:
            return f"{self.dtype} {self.symbol}".rstrip()
        shape, stride = (", ".join(map(str, sizes)) for sizes in (self.shape, self.stride))
        return f"{self.dtype}[{shape}] stride ({stride}) {self.device}"


@dataclass(frozen=True)
class CapturedGraph:
    """One graph as it was captured.

    Attributes:
        module: ATen graph with flat inputs and a flat tuple of outputs. Every call keeps the user's frames
            (`meta["stack_trace"]`) and the modules it is in, outermost first, by the user's paths
            (`meta["nn_module_stack"]`).
        inputs: In the order of the graph's placeholders.
        output_names: In the order of its results; None among the results keeps its name.
        kind: What captured it: "inference", "forward", "backward" (torch.compile), "engine" (a stored program).
        weights: Values of inputs that no execution is given, because the executable holds them; by name.
        onnx: Of a graph that is an ONNX file: the file, and the names of its values; its nodes are of no dialect that
            torch can write.
    """

    module: GraphModule
    inputs: tuple[InputSpec, ...]
    output_names: tuple[str, ...]
    kind: GraphKind
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    onnx: OnnxGraph | None = None

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The node of each line of `lines`."""
        return tuple(self.module.graph.nodes)

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """Canonical text: a line for every node in order, values named by position, symbols by appearance."""
        text = "\n".join(_canonical(self.module, self.inputs))
        symbols: dict[str, str] = {}
        text = _SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"$s{len(symbols)}"), text)
        return tuple(text.split("\n"))

    @functools.cached_property
    def hash(self) -> str:
        """32 hexadecimal digits of `lines`; the same in every process and for every hash seed."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:32]

    @property
    def num_ops(self) -> int:
        """Calls of operations: no inputs, outputs, or parts taken out of a tuple."""
        return sum(node.op == "call_function" and "getitem" not in str(node.target) for node in self.nodes)

    def describe(self, node: Node) -> str:
        """Return where a node comes from: module path and source line of the user, as far as they are known."""
        return ", ".join(part for part in (module_path(node), source_line(node)) if part)


def module_path(node: Node) -> str:
    """Return the path of the innermost module that a node is in; "" for the root, or where unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return "" if path == _NO_MODULE else path


def input_spec(
    value: Any, name: str, kind: InputKind, *, requires_grad: bool = False, is_mutated: bool = False
) -> InputSpec:
    """Return the spec of an input from its value, a real or fake tensor or a number."""
    if not isinstance(value, torch.Tensor):
        names = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}
        symbol = str(value) if type(value) in names else ""
        return InputSpec(name, "size", names.get(type(value), type(value).__name__), symbol=symbol)
    strided = value.layout is torch.strided
    return InputSpec(
        name,
        kind,
        str(value.dtype).removeprefix("torch."),
        _sizes(value.shape),
        _sizes(value.stride()) if strided else (),
        str(value.device),
        requires_grad,
        is_mutated,
    )


def captured_program(program: Program) -> CapturedGraph:
    """Return the functional graph of a stored program: weights are inputs, updated caches are results."""
    ports, names, weights = {port.node: port.name for port in program.inputs}, program.weight_names(), program.weights()
    module = _without_placeholders(program, ports.keys() | names.keys())
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        name = ports.get(node.name) or names.get(node.name) or node.name
        kind: InputKind = "input" if node.name not in names else "parameter"
        if kind == "parameter" and not isinstance(weights.get(node.name), torch.nn.Parameter):
            kind = "buffer"
        inputs.append(input_spec(node.meta.get("val"), name, kind))
    results = {node: name for name, node in reversed(program.output_nodes.items())}
    returned: Any = program.graph.output_node().args[0]
    outputs = [results.get(node.name, node.name) for node in returned]
    held = {names[node]: value for node, value in weights.items()}
    return CapturedGraph(module, tuple(inputs), tuple(outputs), "engine", held, program.onnx)


def _without_placeholders(program: Program, kept: Collection[str]) -> GraphModule:
    """Return the graph without inputs that it was specialized for (a flag, a number, None), which no run is given."""
    module: GraphModule = program.exported.graph_module
    graph = copied_graph(module.graph)
    gone = [node for node in graph.find_nodes(op="placeholder") if node.name not in kept and not node.users]
    for node in gone:
        graph.erase_node(node)
    return GraphModule(module, graph) if gone else module


def mutated_placeholders(graph: torch.fx.Graph) -> set[Node]:
    """Return the placeholders that a call of `graph` writes to."""
    return {written for node in graph.nodes for written in written_placeholders(node)}


def written_placeholders(node: Node) -> Iterator[Node]:
    """Yield the placeholders that a node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for written in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(written, Node) and written.op == "placeholder":
                yield written


def _sizes(sizes: Any) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in sizes)


def _canonical(module: GraphModule, inputs: tuple[InputSpec, ...] = ()) -> list[str]:
    """Return a line for every node; `inputs` is empty for a graph within a graph, whose inputs follow from outside."""
    position: dict[Node, int] = {}
    specs = iter(inputs)
    lines = []
    for index, node in enumerate(module.graph.nodes):
        position[node] = index
        arguments = _literal(tuple(node.args), position)[1:-1].rstrip(",")
        named = [f"{key}={_literal(value, position)}" for key, value in sorted(node.kwargs.items())]
        arguments = ", ".join(part for part in (arguments, *named) if part)
        match node.op:
            case "placeholder":
                spec = next(specs, None)
                text = f"input {spec}" if spec is not None else "input"
            case "output":
                text = f"return {_literal(node.args[0], position)}"
            case "get_attr":
                text = f"constant {_constant(attribute(module, str(node.target)))}"
            case "call_function":
                text = f"{_target(node.target)}({arguments})"
            case _:
                text = f"{node.op} {node.target}({arguments})"
        lines.append(f"%{index} = {text}")
    return lines


def _literal(value: Any, position: Mapping[Node, int]) -> str:
    match value:
        case Node():
            return f"%{position[value]}"
        case list() | tuple():
            inner = ", ".join(_literal(item, position) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        case dict():
            inner = ", ".join(f"{key!r}: {_literal(item, position)}" for key, item in value.items())
            return f"{{{inner}}}"
        case slice():
            return f"slice({', '.join(_literal(part, position) for part in (value.start, value.stop, value.step))})"
        case enum.Enum():
            return str(value)
        case bool() | int() | float() | complex() | str() | bytes() | None:
            return repr(value)
        case torch.Tensor() | GraphModule():
            return _constant(value)
        case _ if callable(value):
            return _target(value)
        case _:  # dtypes, devices, layouts, memory formats, symbols
            return _ADDRESS.sub("", str(value))


def _target(target: Callable[..., Any]) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target._name}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", type(target).__qualname__)
    return f"{module}.{name}".lstrip(".")


def attribute(module: torch.nn.Module, path: str) -> Any:
    """Return what a `get_attr` node of a graph names."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _constant(value: Any) -> str:
    """Describe what a graph holds itself: a tensor by its content, a graph by its text."""
    if isinstance(value, GraphModule):
        return "{ " + "; ".join(_canonical(value)) + " }"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} {_digest(value)}"
    return _ADDRESS.sub("", f"{type(value).__qualname__} {value}")


def _digest(tensor: torch.Tensor) -> str:
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "without values"
    with _disable_current_modes():  # within a trace, too, this is about values
        plain = tensor.detach().cpu().contiguous().flatten()
        data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.sha256(data).hexdigest()[:16]


Arguments = Mapping[str, Any] | list[Any]
_attached: tuple[Observer, ...] = ()
_sources: tuple[Callable[[], Observer | None], ...] = ()


class Runnable(Protocol):
    """What runs, as observers see it; its attributes are those of `Executable`."""

    name: str
    number: int
    backend: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    graph: CapturedGraph | Callable[[], CapturedGraph] | None

    def captured(self) -> CapturedGraph | None:
        """Return the graph, read now if needed; None if unknown."""


class Execution:
    """One run of one executable, as observers see it.

    Attributes:
        executable: What runs.
        number: How many executions of it on this device went before.
        device_index: Of the device it runs on, among the devices of that kind; 0 on the CPU.
        inputs: Name -> tensor or plain value; before the run, and after it the same objects, perhaps written to.
        outputs: Name -> tensor, plain value or None; empty until the run ends well.
    """

    def __init__(
        self, executable: Runnable, number: int, device_index: int, arguments: Arguments, looking: tuple[Observer, ...]
    ) -> None:
        self._looking = looking
        self.executable = executable
        self.number = number
        self.device_index = device_index
        # A list is emptied by the run, so that what it holds can be freed: this keeps the values alive until the end.
        self.inputs: Mapping[str, Any] = (
            arguments if isinstance(arguments, Mapping) else dict(zip(executable.input_names, arguments, strict=True))
        )
        self.outputs: Mapping[str, Any] = {}
        for number, observer in enumerate(self._looking):
            try:
                observer.before(self)
            except BaseException as error:
                self._looking = self._looking[:number]
                self.fail(error)
                raise

    def finish(self, outputs: Mapping[str, Any] | Sequence[Any]) -> None:
        """Show the outputs of a run that ended well."""
        if not isinstance(outputs, Mapping):
            outputs = dict(zip(self.executable.output_names, outputs, strict=True))
        self.outputs = outputs
        with contextlib.ExitStack() as others:  # what one of them raises must not leave the others waiting
            for observer in self._looking:
                others.callback(observer.after, self)

    def fail(self, error: BaseException) -> None:
        """Show what the run raised."""
        with contextlib.ExitStack() as others:
            for observer in self._looking:
                others.callback(observer.failed, self, error)


class Observer(Protocol):
    """What looks at executions; what it raises ends the run and reaches the caller as it is.

    Of each that saw a run begin, `after` or `failed` is called once, however it ends; in the reverse order.
    """

    def before(self, execution: Execution) -> None:
        """Look at the inputs before the run."""

    def after(self, execution: Execution) -> None:
        """Look at the outputs after the run."""

    def failed(self, execution: Execution, error: BaseException) -> None:
        """Look at a run that raised `error`, which is raised again afterwards; Ctrl-C is one as well."""


def attach(observer: Observer) -> None:
    """Let `observer` see every execution from now on; the first attached is asked first."""
    global _attached
    _attached = (*_attached, observer)


def detach(observer: Observer) -> None:
    """Undo `attach`; nothing happens where it is not attached."""
    global _attached
    _attached = tuple(other for other in _attached if other is not observer)


def add_source(source: Callable[[], Observer | None]) -> None:
    """Ask `source` before every execution from now on who looks at it, after those that are attached."""
    global _sources
    _sources = (*_sources, source)


def observers() -> tuple[Observer, ...]:
    """Return who looks now; the environment is asked each time, so that a loop may turn its variables on and off."""
    found = _attached
    for source in _sources:
        if (observer := source()) is not None:
            found = (*found, observer)
    return found
