"""Converts to ONNX without a second trace where no op needs a decomposition.

`torch.onnx.export` runs every graph through `run_decompositions`, which executes it twice on fake tensors: half of the
time of a conversion. A program in functional form holds next to no op without a translation, and those that are there
are another name of one that has it. Such a graph is converted as it is; any other goes the long way.

It also reads the translations of all ops again in each conversion, which are the same: an eighth of the time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from glassengine.program.representation.program import copied_graph, rebuilt
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
    """Let `torch.onnx.export` read its translations once in a process, and trace only what has to be decomposed."""
    from torch.onnx._internal.exporter import _fx_passes, _registration

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
        fast_tracing({}),
    ):
        yield


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
