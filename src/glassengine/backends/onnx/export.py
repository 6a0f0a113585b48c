"""Exports a program to ONNX, without a second trace where no op needs a decomposition.

Pipeline: functional form (cache updates become outputs, a converter loses mutations silently) -> torch.onnx.export ->
checks. Two ops are translated here, because torch's own translations copy the whole cache in every step:

    index_copy                     ScatterElements on the cache itself, which a runtime can carry out in place; torch's
                                   goes through two transposes of the cache
    scaled_dot_product_attention   query heads grouped over their key head; torch's repeats keys and values, and scales
                                   every cached key

Shape legend: B batch, H query heads, G key/value heads, S new tokens, T keys, D head size.

`torch.onnx.export` runs every graph through `run_decompositions`, which executes it twice on fake tensors: half of the
time of a conversion. A program in functional form holds next to no op without a translation, and those that are there
are another name of one that has it. Such a graph is converted as it is; any other goes the long way.

It also reads the translations of all ops again in each conversion, which are the same: an eighth of the time. It runs
the graph once more to see which operands have to be cast, though all values are known: a fifth. And a rewriting rule
with two results lists all nodes for each node, whatever op that is: a third, quadratic in the nodes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node

from glassengine.backends.onnx.network import mark_nodes, name_layers
from glassengine.backends.protocol.attention import with_grouped_queries
from glassengine.backends.protocol.backend import Capabilities
from glassengine.backends.protocol.io import device_of
from glassengine.errors import BackendError, first_line
from glassengine.program.onnx.file import fill
from glassengine.program.onnx.session import with_outputs
from glassengine.program.representation.outputs import functional_form, result_names
from glassengine.program.representation.program import OnnxGraph, Program, copied_graph, rebuilt
from glassengine.program.user_code.tracing import fast_tracing

aten = torch.ops.aten

_OTHER_NAMES = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.max.other: aten.maximum.default,
    aten.min.other: aten.minimum.default,
}
"""Op -> the one op that it is decomposed into."""

_NUMBERS = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg),
    *(operator.getitem, torch.sym_max, torch.sym_min),
}


@contextlib.contextmanager
def fast_conversion() -> Iterator[None]:
    """Let `torch.onnx.export` read its translations once in a process, and trace only what has to be decomposed.

    Known values are not computed again, and a rewriting rule is tried only on nodes of its first op.
    """
    from onnxscript.rewriter import _matcher
    from torch.onnx._internal.exporter import _fx_passes, _registration
    from torch.onnx._internal.fx.passes import type_promotion

    real = _fx_passes.decompose_with_registry
    read = _registration.ONNXRegistry.from_torchlib

    def from_torchlib(opset_version: int) -> Any:
        registry = copy.copy(_registry(opset_version, read))
        # Translations of one's own are put in front of these.
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    def decompose(exported: ExportedProgram, registry: Any) -> ExportedProgram:
        found = _renamed(exported, _decomposed_ops(registry.opset_version, read), registry)
        return real(exported, registry) if found is None else found

    with (
        mock.patch.object(_registration.ONNXRegistry, "from_torchlib", staticmethod(from_torchlib)),
        mock.patch.object(_fx_passes, "decompose_with_registry", decompose),
        mock.patch.object(type_promotion._TypePromotionInterpreter, "run_node", _promoted),
        mock.patch.object(_matcher.SimplePatternMatcher, "match", _matched_from(_matcher.SimplePatternMatcher.match)),
        fast_tracing({}),
    ):
        yield


def _promoted(interpreter: Any, node: Node) -> Any:
    """Cast the operands of a node where torch would, and return its value: the known one, unless it was changed."""
    from torch.onnx._internal.fx.passes import type_promotion

    written = node.target, node.args, node.kwargs
    with interpreter._set_current_node(node):
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule:
            interpreter._maybe_promote_node(node, rule)
    known, mode = node.meta.get("val"), detect_fake_mode()
    is_known = isinstance(known, FakeTensor) and known.fake_mode is mode
    if node.op == "call_function" and is_known and written == (node.target, node.args, node.kwargs):
        return known
    return torch.fx.Interpreter.run_node(interpreter, node)


def _matched_from(match: Callable[..., Any]) -> Callable[..., Any]:
    """Return `match` of a pattern and a node, which fails at once where the first op of the pattern is another one."""
    from onnxscript.rewriter import MatchResult

    def of_its_op(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        first = matcher.pattern.output_nodes[0].op_identifier()
        if first is not None and first != node.op_identifier():
            return MatchResult().fail("another op")
        return match(matcher, model, graph, node, **options)

    return of_its_op


@functools.cache
def _registry(opset: int, read: Any) -> Any:
    return read(opset_version=opset)


@functools.cache
def _decomposed_ops(opset: int, read: Any) -> frozenset[Any]:
    """Return the ops that have a decomposition and, without those of one's own, no translation."""
    from torch.onnx._internal.exporter import _decomp

    translated = set(_decomp.get_onnx_implemented_overloads(_registry(opset, read)))
    return frozenset(_decomp.create_onnx_friendly_decomposition_table(translated))


def _renamed(exported: ExportedProgram, decomposed: frozenset[Any], registry: Any) -> ExportedProgram | None:
    """Return `exported` with ops under the names that have a translation; None where one has to be decomposed."""
    specs = exported.graph_signature.output_specs
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in specs):
        return None
    graph = copied_graph(exported.graph)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target in _NUMBERS:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            return None
        if registry.is_registered(node.target):
            continue
        node.target = _OTHER_NAMES.get(node.target, node.target)
        if node.target in decomposed:
            return None
    signature = exported.module_call_graph[0].signature
    return rebuilt(exported, graph, specs, out_spec=signature and signature.out_spec)


MODEL_FILE = "model.onnx"
IN_PLACE_KEY = "glassengine.in_place"
"""Key of the model's metadata: the cache inputs whose buffer may also receive the updated cache, space-separated."""

OPSET = 20
_MOST_INSIDE = 1 << 30
"""Bytes of weights that a file which was given to us as it is keeps inside; a graph can have twice as many."""
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def export_onnx(program: Program, directory: Path) -> None:
    """Convert `program` into `model.onnx` and one external data file in `directory`.

    A program that is an ONNX graph is written as it is, with its outputs added under their own names.

    Weights are held at most twice while converting: the program's, and the transposed ones of linear layers.

    Raises:
        BackendError: The program is random, or the converted graph has other inputs, outputs or dynamic dimensions than
            the program.
    """
    if program.onnx is not None:
        _write_source(program.onnx, [program.output_nodes[name] for name in result_names(program)], directory)
        return
    functional = functional_form(program)
    if device_of(program) == "cpu":
        functional = functional.replace(with_grouped_queries(functional.exported))
    _refuse_dropout(functional)
    mark_nodes(functional.graph)
    inputs = [port.name for port in functional.inputs]
    # A state that is written in place has one name as input and as result; ONNX has one name space.
    updated = {name: f"updated:{name}" if name in inputs else name for name in result_names(functional)}
    outputs = list(updated.values())
    with torch.no_grad(), _quiet(), _one_reason(), fast_conversion():
        converted = torch.onnx.export(
            _without_parts(functional.exported),
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=_translations(),
            optimize=False,
            verbose=False,
        )
        assert converted is not None and converted.exported_program is not None
        _keep_constants(converted.model.graph)
        converted.optimize()
    graph = converted.model.graph
    _divide_by_roots(graph)
    name_layers(graph, converted.exported_program.graph, functional)
    _rename(graph, inputs, outputs)
    _check_inputs(functional, graph)
    caches = {past: updated[present] for past, present in program.caches.items()}
    converted.model.metadata_props[IN_PLACE_KEY] = " ".join(in_place_caches(graph, caches))
    with _quiet():
        converted.save(directory / MODEL_FILE, external_data=True)


def _without_parts(exported: ExportedProgram) -> ExportedProgram:
    """Return `exported`, whose graph is changed, with copies for outputs that are one of several results of an op.

    The converter takes some such ops (meshgrid) apart, and then looks in vain for what the output was called.
    """
    graph, specs = exported.graph, list(exported.graph_signature.output_specs)
    (last,) = graph.find_nodes(op="output")
    nodes = {node.name: node for node in last.all_input_nodes}
    for index, spec in enumerate(specs):
        part = nodes.get(spec.arg.name)
        if part is not None and part.target is operator.getitem:
            with graph.inserting_before(last):
                copied = graph.call_function(torch.ops.aten.clone.default, (part,))
            copied.meta = dict(part.meta)
            last.replace_input_with(part, copied)
            specs[index] = replace(spec, arg=TensorArgument(name=copied.name))
    signature = exported.module_call_graph[0].signature
    assert signature is not None
    return rebuilt(exported, graph, specs, out_spec=signature.out_spec)


def _keep_constants(graph: Any) -> None:
    """Give constants that are nearly 0 or 1 a dimension, beside operands that have one.

    The optimizer of onnxscript takes what is within 1e-8 of 0, or within a part in 1e5 of 1, for these, and leaves out
    what adds or multiplies it: the epsilon of a norm, say. It looks at constants without dimensions only.
    """
    import onnx_ir

    for node in list(graph):
        neutral = _NEUTRAL.get(node.op_type)
        if neutral is None:
            continue
        for index, value in enumerate(node.inputs):
            constant, other = onnx_ir.convenience.get_const_tensor(value), node.inputs[1 - index]
            if constant is None or constant.shape.rank() or other.shape is None or not other.shape.rank():
                continue
            number = constant.numpy()
            if number.item() != neutral and math.isclose(number.item(), neutral, rel_tol=1e-4, abs_tol=1e-7):
                kept = onnx_ir.node("Constant", [], attributes={"value": onnx_ir.tensor(number.reshape(1))})
                kept.outputs[0].name = f"{value.name}:{index}:of:{node.name}"
                graph.insert_before(node, kept)
                node.replace_input_with(index, kept.outputs[0])


def _divide_by_roots(graph: Any) -> None:
    """Write x * (1 / sqrt(v)) as x / sqrt(v), by which runtimes know a norm, where nothing else reads 1 / sqrt(v)."""
    for node in list(graph):
        uses = list(node.outputs[0].uses())
        if node.op_type != "Reciprocal" or node.outputs[0].is_graph_output() or len(uses) != 1:
            continue
        ((product, place),), root = uses, node.inputs[0]
        if product.op_type == "Mul" and root.producer() is not None and root.producer().op_type == "Sqrt":
            other = product.inputs[1 - place]
            product.op_type = "Div"
            product.replace_input_with(0, other)
            product.replace_input_with(1, root)
            graph.remove(node, safe=True)


@contextlib.contextmanager
def _one_reason() -> Iterator[None]:
    """Tell why a conversion failed: the first error of a chain, without the advice to those who work on torch."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise BackendError(
            "the program cannot be converted to ONNX",
            got=f"{type(first).__name__}: {first_line(first)}",
            hint="another one with --backend, eager or inductor",
        ) from error


def _write_source(source: OnnxGraph, nodes: Sequence[str], directory: Path) -> None:
    import onnx

    model = with_outputs(source.file.model, [source.values[node] for node in nodes])
    model.metadata_props.add(key=IN_PLACE_KEY, value="")
    if source.file.with_data:
        onnx.load_external_data_for_model(model, str(source.file.path.parent))
    else:
        fill(model, source.file.weights())
    beside = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > _MOST_INSIDE
    path, data = directory / MODEL_FILE, f"{MODEL_FILE}.data"
    onnx.save_model(model, str(path), save_as_external_data=beside, location=data, convert_attribute=False)


def refuse_bfloat16(program: Program, capabilities: Capabilities) -> None:
    """Refuse a program that computes in bfloat16, for which the runtimes of ONNX have no kernels on the CPU."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            raise BackendError(
                "the runtimes of ONNX have no bfloat16 kernels for the CPU",
                got=f"{node.name}: bfloat16",
                expected=capabilities.dtypes,
                hint=_hint_of_bfloat16(program),
            )


def _hint_of_bfloat16(program: Program) -> str:
    if any(weight.dtype is torch.bfloat16 for weight in program.weights().values()):
        return "--dtype float32"
    return "the model's own code computes in that dtype at every --dtype: choose another --backend"


def _refuse_dropout(functional: Program) -> None:
    """Refuse what the translation of attention would silently leave out."""
    for node in functional.graph.find_nodes(op="call_function", target=_ATTENTION):
        if dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), node.args, strict=False)).get("dropout_p"):
            raise BackendError(
                "attention with dropout is random and cannot be built",
                got=f"{node.name}: dropout_p={node.args[4]}",
                hint="pass dropout_p=0 to scaled_dot_product_attention when the module is not training",
            )


def in_place_caches(graph: Any, caches: dict[str, str]) -> list[str]:
    """Return the inputs of `caches` (`past_*` -> `present_*`) whose buffer may also be that of the updated cache.

    That is so when the data of the input is read by nothing but the one ScatterElements that writes the update, and
    the update is its direct result: then nothing can read a slot after it was overwritten, in any order the
    nodes run. Reading the shape does no harm.

    `graph` is one of `onnx_ir`.
    """
    results = {value.name: value for value in graph.outputs}
    safe = []
    for value in graph.inputs:
        if value.name not in caches:
            continue
        readers = [(node.op_type, position) for node, position in value.uses() if node.op_type != "Shape"]
        writer = results[caches[value.name]].producer()
        is_only_reader = readers == [("ScatterElements", 0)] and writer is not None and writer.inputs[0] is value
        if is_only_reader and not value.is_graph_output():
            safe.append(value.name)
    return safe


def _rename(graph: Any, inputs: list[str], outputs: list[str]) -> None:
    """Give inputs and outputs their names: where an input is a result as well, the optimizer renames it."""
    if len(graph.outputs) != len(outputs):
        raise BackendError(
            "the converted graph has other outputs than the program",
            got=f"{len(graph.outputs)} outputs",
            expected=f"{len(outputs)}: {', '.join(outputs)}",
        )
    taken = {*inputs, *outputs}
    for node in graph:
        for value in node.outputs:
            if value.name in taken:
                value.name = f"inner:{value.name}"
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name


def _check_inputs(program: Program, graph: Any) -> None:
    """Every input is there, and no size that may change was fixed by the conversion."""
    shapes = {value.name: tuple(value.shape) for value in graph.inputs}
    for port in program.inputs:
        shape = shapes.get(port.name)
        fixed = shape is not None and any(
            isinstance(size, str) and isinstance(other, int) for size, other in zip(port.shape, shape, strict=True)
        )
        if shape is None or fixed:
            raise BackendError(
                f"the conversion to ONNX {'fixed a dynamic size' if fixed else 'lost the input'} {port.name!r}",
                got=str(shape),
                expected=str(port.shape),
            )


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations of this export; the functions share the scatter indices that equal updates need."""
    import onnxscript
    from onnx_ir import DataType

    op: Any = onnxscript.opset20
    scatter_indices: dict[tuple[Any, ...], Any] = {}

    def index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
        """Write `source` [B, G, S, D] into `self` [B, G, T, D] at `index` [S] along `dim`."""
        rank = len(source.shape)
        dim %= rank
        key = (id(index), dim, *(str(size) for size in source.shape))
        if key not in scatter_indices:
            column = op.Constant(value_ints=[-1 if axis == dim else 1 for axis in range(rank)])
            scatter_indices[key] = op.Expand(op.Reshape(index, column), op.Shape(source))
        return op.ScatterElements(self, scatter_indices[key], source, axis=dim)

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Attend with query [B, H, S, D], key [B, G, T, D] and value [B, G, T, Dv]; [B, H, S, Dv]."""

        def constant(number: float) -> Any:
            return op.CastLike(op.Constant(value_float=number), query)

        size, rank = query.shape[-1], len(query.shape)
        num_new, num_keys = op.Shape(query, start=-2, end=-1), op.Shape(key, start=-2, end=-1)
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        if grouped:
            # Query heads that share a key head become rows of one matrix product: keys and values are not repeated.
            batch, heads, groups = op.Shape(query, end=-3), query.shape[-3], key.shape[-3]
            rows = op.Concat(batch, op.Constant(value_ints=[groups, -1, size]), axis=0)
            query = op.Reshape(query, rows)
        if scale is None:
            scale = 1.0 / math.sqrt(size)
        swap_last = [*range(rank - 2), rank - 1, rank - 2]
        # The query is scaled, not the product: float16 products would overflow.
        scores = op.MatMul(op.Mul(query, constant(scale)), op.Transpose(key, perm=swap_last))
        if grouped:
            per_head = op.Concat(batch, op.Constant(value_ints=[heads]), num_new, num_keys, axis=0)
            scores = op.Reshape(scores, per_head)
        if is_causal:
            ones = op.Expand(op.Constant(value_ints=[1]), op.Concat(num_new, num_keys, axis=0))
            attn_mask = op.Cast(op.Trilu(ones, upper=0), to=DataType.BOOL)
        if attn_mask is not None:
            if is_causal or attn_mask.dtype == DataType.BOOL:
                attn_mask = op.Where(attn_mask, constant(0.0), constant(-math.inf))
            scores = op.Add(scores, attn_mask)
        weights = op.Softmax(scores, axis=-1)
        # A row that may see nothing is 0 in torch; NaN would spread through the cache of padded rows.
        weights = op.Where(op.IsNaN(weights), constant(0.0), weights)
        if grouped:
            weights = op.Reshape(weights, op.Concat(batch, op.Constant(value_ints=[groups, -1]), num_keys, axis=0))
        context = op.MatMul(weights, value)
        if grouped:
            per_head = op.Concat(batch, op.Constant(value_ints=[heads]), num_new, op.Shape(value, start=-1), axis=0)
            context = op.Reshape(context, per_head)
        return context

    return {torch.ops.aten.index_copy.default: index_copy, _ATTENTION: attention}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the converter's notices (optional packages, deprecations) off the user's screen."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
