"""An ONNX file as an `ExportedProgram`, whose graph is the translated one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
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
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.plugins.onnx.translate import Translator
from glassengine.program.onnx.operators.function import OnnxVerifier
from glassengine.program.onnx.stored.file import OnnxFile, constant_of, named_weights
from glassengine.program.onnx.stored.types import ValueType, value_types
from glassengine.program.onnx.translated import TranslatedFile, metadata_of

if TYPE_CHECKING:
    import onnx

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
