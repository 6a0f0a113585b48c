"""An ONNX graph as a graph of `torch.fx`, one call for each node, and the file as an `ExportedProgram`.

Values keep their ONNX names in `values`; the names of fx nodes are identifiers made of them, so that nothing in a file
can become code. Graphs within graphs (branches, loop bodies) and functions of the model are calls that interpret a
graph of their own.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.plugins.onnx import (
    elementwise,  # noqa: F401  (they fill the table)
    neural,  # noqa: F401  (they fill the table)
    quantized,  # noqa: F401  (they fill the table)
    recurrent,  # noqa: F401  (they fill the table)
    shapes,  # noqa: F401  (they fill the table)
)
from glassengine.plugins.onnx.other_domains import STANDARD, definition, with_attributes
from glassengine.plugins.onnx.table import TRANSLATIONS, Call, OnnxNode
from glassengine.program.onnx.control import LABEL, NAME, Body, called_function, if_else, loop, scan
from glassengine.program.onnx.file import OnnxFile, constant_of, free_names, named_weights, tensor_of, torch_dtype
from glassengine.program.onnx.function import OnnxFunction, OnnxVerifier, one_node
from glassengine.program.onnx.translated import UNKNOWN_SIZE, TranslatedFile, ValueType, metadata_of, value_types

_TUPLES = frozenset({"TopK", "Split", "DynamicQuantizeLinear"})
"""Operators whose translations return a tuple even where the node has one result."""
_LITTLE_USED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch has, but few kernels for."""
_MOST_DEPTH = 32


class Translator:
    """Translates the nodes of one graph.

    Args:
        model: The model that the graph is a part of.
        path: Where the model lies.
        types: Value -> type, as far as it is known.
        opsets: Domain -> version.
        outer: What the graph may read from the graphs around it; such names become placeholders when they are read.
        depth: How many graphs are around it.
        bodies: Functions that were translated already.

    Attributes:
        graph: What has been translated so far.
        values: Value -> node.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        path: Path,
        types: Mapping[str, ValueType],
        *,
        opsets: Mapping[str, int],
        depth: int = 0,
        bodies: dict[bytes, Body] | None = None,
    ) -> None:
        if depth > _MOST_DEPTH:
            raise UsageError(f"{path.name} has graphs within graphs too deep", got=f"more than {_MOST_DEPTH}")
        self.graph = Graph()
        self.values: dict[str, Node] = {}
        self._model, self._path, self._types = model, path, types
        self._opsets = dict(opsets)
        self._opset = self._opsets.get("", self._opsets.get("ai.onnx", 1))
        self._depth = depth
        self._bodies = {} if bodies is None else bodies
        self._fakes = Fakes()
        self._fixed = {tensor.name for tensor in model.graph.initializer} if not depth else set()
        self._functions = {(f.domain, f.name): f for f in model.functions}

    def add_placeholder(self, name: str) -> Node:
        """Add an input, a weight or a captured value."""
        node = self.graph.create_node("placeholder", "value", name=_identifier(name))
        node.target = node.name
        node.meta["val"] = self._fakes.tensor(self._types.get(name))
        self._define(name, node)
        return node

    def add_node(self, proto: onnx.NodeProto) -> list[Node]:
        """Translate a node; return what yields its results, in order.

        Raises:
            UsageError: It reads a value that nothing yields.
        """
        target, args, kwargs = self._call(proto)
        names = [name for name in proto.output if name]
        several = len(proto.output) > 1 or proto.op_type in _TUPLES
        stem = proto.name or proto.op_type
        call = self._created(target, args, kwargs, names[0] if names and not several else stem)
        if not several:
            call.meta["val"] = self._fakes.tensor(self._types.get(names[0])) if names else None
            self._define(names[0], call) if names else None
            return [call] if names else []
        call.meta["val"] = [self._fakes.tensor(self._types.get(name)) for name in proto.output]
        results = []
        for index, name in enumerate(proto.output):
            if name:
                part = self._created(operator.getitem, (call, index), {}, name)
                part.meta["val"] = call.meta["val"][index]
                self._define(name, part)
                results.append(part)
        return results

    def value(self, name: str) -> Node:
        """Return the node that yields a value.

        Raises:
            UsageError: There is none.
        """
        if name not in self.values:
            raise UsageError(f"{self._path.name} reads a value that nothing yields before", got=repr(name))
        return self.values[name]

    def _define(self, name: str, node: Node) -> None:
        if name in self.values:
            raise UsageError(f"{self._path.name} yields a value twice", got=repr(name), expected="one node for each")
        self.values[name] = node

    def _created(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Node:
        return self.graph.create_node("call_function", target, args, kwargs, name=_identifier(name))

    def _call(self, proto: onnx.NodeProto) -> Call:
        inputs = [self.value(name) if name else None for name in proto.input]
        if proto.domain in STANDARD and proto.op_type in ("If", "Loop", "Scan"):
            return self._nested(proto, inputs)
        function = self._functions.get((proto.domain, proto.op_type))
        if function is not None:
            return called_function(self._function(function, proto), proto.op_type), tuple(inputs), _PRECISION
        kinds = [self._types[name].element_type if name in self._types else 0 for name in proto.input]
        is_known = _key(proto) in TRANSLATIONS
        is_little_used = any(torch_dtype(kind) in _LITTLE_USED for kind in kinds)
        if is_known and not is_little_used:
            try:
                return self._translated(proto, inputs, kinds)
            except (NotImplementedError, TypeError, KeyError):
                pass  # a form of the operator that has no translation
        defined = None if is_little_used else definition(proto, self._opset, self._types)
        if defined is not None:
            try:
                body = self._function(defined, proto)
            except (UsageError, NotImplementedError, TypeError, KeyError, ValueError):
                pass  # it has sequences, say
            else:
                return called_function(body, proto.op_type), tuple(inputs), _PRECISION
        opsets = [*self._model.opset_import]
        fixed = frozenset(name for name in proto.input if name in self._fixed)
        return one_node(proto, opsets, kinds, self._model.ir_version, fixed), tuple(inputs), _PRECISION

    def _translated(self, proto: onnx.NodeProto, inputs: list[Node | None], kinds: list[int]) -> Call:
        node = OnnxNode(
            proto,
            inputs,
            {entry.name: self._attribute(entry) for entry in proto.attribute},
            self._opset,
            [self._types[name].shape if name in self._types else None for name in proto.input],
            kinds,
            self._helper,
        )
        target, args, kwargs = TRANSLATIONS[_key(proto)](node)
        if isinstance(target, OnnxFunction):
            inspect.signature(target.function).bind(*args, **kwargs)
        return target, args, kwargs

    def _helper(self, target: Any, *args: Any) -> Node:
        """Add a part of a node: a list of one, so that it counts as no tensor of its own."""
        node = self._created(target, args, {}, target.__name__)
        node.meta["val"] = [self._fakes.tensor(None)]
        return node

    def _attribute(self, entry: onnx.AttributeProto) -> Any:
        value = onnx.helper.get_attribute_value(entry)
        if isinstance(value, bytes):
            return value.decode("utf-8", errors="replace")
        if isinstance(value, onnx.TensorProto):
            if torch_dtype(value.data_type) is None:
                raise NotImplementedError("a tensor of a type that torch does not have")
            return tensor_of(value, self._path)
        return list(value) if isinstance(value, (list, tuple)) or hasattr(value, "append") else value

    def _nested(self, proto: onnx.NodeProto, inputs: list[Node | None]) -> Call:
        graphs = {entry.name: entry.g for entry in proto.attribute}
        if proto.op_type == "If":
            function, names = if_else(self._body(graphs["then_branch"]), self._body(graphs["else_branch"]))
        elif proto.op_type == "Loop":
            function, names = loop(self._body(graphs["body"]), len(inputs) - 2)
        else:
            options = {entry.name: self._attribute(entry) for entry in proto.attribute if entry.name != "body"}
            if self._opsets.get("", 9) < 9:
                raise UsageError(f"{self._path.name} has a Scan of an old operator set", expected="opset 9 or newer")
            function, names = scan(
                self._body(graphs["body"]),
                options["num_scan_inputs"],
                input_axes=options.get("scan_input_axes", ()),
                input_reversed=options.get("scan_input_directions", ()),
                output_axes=options.get("scan_output_axes", ()),
                output_reversed=options.get("scan_output_directions", ()),
            )
        return function, (*inputs, *(self.value(name) for name in names)), _PRECISION

    def _body(self, graph: onnx.GraphProto) -> Body:
        weights = list(graph.initializer)
        inputs = [value.name for value in graph.input]
        captured = tuple(free_names(graph))
        return self._interpreted(graph.node, inputs, captured, weights, [value.name for value in graph.output])

    def _function(self, function: onnx.FunctionProto, proto: onnx.NodeProto) -> Body:
        # Functions that call each other twice would double with every level.
        key = repr((proto.domain, proto.op_type, len(proto.input), len(proto.output))).encode()
        key += b"".join(entry.SerializeToString(deterministic=True) for entry in proto.attribute)
        if key in self._bodies:
            return self._bodies[key]
        given = {entry.name: entry for entry in (*function.attribute_proto, *proto.attribute)}
        nodes = [with_attributes(node, given) for node in function.node]
        opsets = {entry.domain: entry.version for entry in function.opset_import}
        inputs = list(function.input)[: len(proto.input)]
        outputs = list(function.output)[: len(proto.output)]
        self._bodies[key] = self._interpreted(nodes, inputs, (), [], outputs, opsets)
        return self._bodies[key]

    def _interpreted(
        self,
        nodes: Iterable[onnx.NodeProto],
        inputs: Sequence[str],
        captured: tuple[str, ...],
        weights: Sequence[onnx.TensorProto],
        outputs: Sequence[str],
        opsets: Mapping[str, int] | None = None,
    ) -> Body:
        types = {name: self._types[name] for name in captured if name in self._types}
        opsets = self._opsets if opsets is None else opsets
        inner = Translator(self._model, self._path, types, opsets=opsets, depth=self._depth + 1, bodies=self._bodies)
        constants = [(node.output[0], tensor) for node in nodes if (tensor := constant_of(node)) is not None]
        held = [*((tensor.name, tensor) for tensor in weights), *constants]
        for name in (*inputs, *captured, *(name for name, _ in held)):
            inner.add_placeholder(name).meta[NAME] = name
        for node in nodes:
            if constant_of(node) is None:
                for made in inner.add_node(node):
                    op = made.args[0] if made.target is operator.getitem else made
                    assert isinstance(op, Node)
                    op.meta[LABEL] = f"{node.op_type} {node.name or node.output[0]}"
        inner.graph.output(tuple(inner.value(name) for name in outputs))
        return Body(inner.graph, captured, tuple(tensor_of(tensor, self._path) for _, tensor in held))


_PRECISION = {"precision": torch.float32}
"""The reference retargets it to float64, as it does every dtype in a graph."""


def _key(proto: onnx.NodeProto) -> str:
    return proto.op_type if proto.domain in STANDARD else f"{proto.domain}.{proto.op_type}"


def _identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return text if text and not text[0].isdigit() else f"v_{text}"


class Fakes:
    """Makes tensors without data, whose dynamic sizes are symbols: one for each name."""

    def __init__(self) -> None:
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment)
        self._symbols: dict[str, Any] = {}

    def tensor(self, kind: ValueType | None) -> torch.Tensor:
        """Return a tensor of a type; one of float32 and no dimension where nothing is known."""
        dtype = (kind.dtype if kind is not None else None) or torch.float32
        sizes = [self._size(size) for size in (kind.shape if kind is not None else None) or ()]
        with self._mode:
            return torch.empty(sizes, dtype=dtype)

    def _size(self, size: int | str) -> Any:
        if isinstance(size, int):
            return size
        if size == UNKNOWN_SIZE or size not in self._symbols:
            symbol = self._environment.create_unbacked_symint()
            if size == UNKNOWN_SIZE:
                return symbol
            self._symbols[size] = symbol
        return self._symbols[size]


STACK_TRACE = "pkg.torch.onnx.stack_trace"
"""Key of a node's metadata, as PyTorch's exporter writes it."""


def translated(file: OnnxFile) -> TranslatedFile:
    """Translate an ONNX file.

    Raises:
        UsageError: The graph is not valid, or takes or returns something that is not a tensor.
    """
    model, types = file.model, value_types(file)
    weights = list(dict.fromkeys(name for name, _ in named_weights(model)))
    held = set(weights)
    inputs = [value.name for value in model.graph.input if value.name not in held]
    _require_tensors(file, inputs, types)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    translator = Translator(model, file.path, types, opsets=opsets)
    for name in (*weights, *inputs):
        translator.add_placeholder(name)
    protos: dict[Node, tuple[int, onnx.NodeProto]] = {}
    for index, proto in enumerate(model.graph.node):
        if constant_of(proto) is not None and proto.output[0] in held:
            continue
        for node in translator.add_node(proto):
            protos[node] = index, proto
            node.meta["stack_trace"] = metadata_of(proto, STACK_TRACE)
    results = {name: translator.value(name) for name in _results(file, types)}
    translator.graph.output(tuple(results.values()))
    exported = _exported(translator, file.weights(), weights, inputs, list(results.values()))
    return TranslatedFile(file, exported, types, translator.values, protos, tuple(inputs), results)


def _require_tensors(file: OnnxFile, inputs: list[str], types: dict[str, ValueType]) -> None:
    for name in inputs:
        if name not in types or types[name].dtype is None or types[name].shape is None:
            raise UsageError(
                f"{file.path.name} takes {name!r}, which is not a tensor type of torch",
                got="a sequence, an optional, text, or a tensor of unknown rank",
                expected="tensors of numbers, each with a shape (sizes may be dynamic)",
            )


def _results(file: OnnxFile, types: dict[str, ValueType]) -> list[str]:
    names = [value.name for value in file.model.graph.output]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"{file.path.name} returns a value twice", got=", ".join(twice))
    kept = [name for name in names if name in types and types[name].dtype is not None]
    if len(kept) < len(names):
        raise UsageError(
            f"{file.path.name} returns something that is not a tensor",
            got=", ".join(name for name in names if name not in kept),
            expected="tensors of numbers",
        )
    return kept


def _exported(
    translator: Translator, values: dict[str, torch.Tensor], weights: list[str], inputs: list[str], results: list[Node]
) -> ExportedProgram:
    nodes = translator.values
    specs = [InputSpec(InputKind.BUFFER, TensorArgument(name=nodes[n].name), n, persistent=True) for n in weights]
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(name=nodes[n].name), None) for n in inputs]
    returned = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in results]
    signature = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure(((), dict.fromkeys(inputs, 0))),
        out_spec=pytree.tree_structure(tuple(range(len(results)))),
    )
    return ExportedProgram(
        root=torch.nn.Module(),
        graph=translator.graph,
        graph_signature=ExportGraphSignature(specs, returned),
        state_dict={name: values[name] for name in weights},
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", signature)],
        example_inputs=None,
        constants={},
        verifiers=[OnnxVerifier],
    )
