"""Operators without a translation: evaluated by the reference implementations of onnx, or by ONNX Runtime alone.

They have no rounding bound, so that a difference there is at most suspicious. What is computed in float64 elsewhere is
computed in float64 here as well where the reference implementation allows it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from glassengine.errors import BackendError
from glassengine.program.onnx.file import torch_dtype
from glassengine.program.onnx.function import OnnxFunction

if TYPE_CHECKING:
    import onnx

_STANDARD = ("", "ai.onnx")


class OneNode:
    """A node as a model of its own.

    Args:
        proto: The node.
        opsets: Operator sets of its model.
        element_types: Of its inputs; 0 where an input is left out or its type unknown.
    """

    def __init__(
        self, proto: onnx.NodeProto, opsets: list[onnx.OperatorSetIdProto], element_types: list[int], ir_version: int
    ) -> None:
        from onnx import ValueInfoProto, helper

        self._proto = proto
        self._names = [name for name in proto.input if name]
        self._dtypes = [torch_dtype(kind) for name, kind in zip(proto.input, element_types, strict=True) if name]
        results = [ValueInfoProto(name=name) for name in proto.output if name]
        typed = [
            helper.make_tensor_value_info(name, kind, None)
            for name, kind in zip(proto.input, element_types, strict=True)
            if name
        ]
        graph = helper.make_graph([proto], "node", list({value.name: value for value in typed}.values()), results)
        self._model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)

    def __call__(self, *values: Tensor | None, precision: torch.dtype) -> Any:
        """Return the results of the node; None for those that are left out."""
        found = self._run([value for value in values if value is not None])
        tensors = iter(torch.from_numpy(np.array(value)) for value in found)
        results = [next(tensors) if name else None for name in self._proto.output]
        if precision is torch.float64:
            results = [r.double() if r is not None and r.is_floating_point() else r for r in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _run(self, given: list[Tensor]) -> list[Any]:
        narrow = [v if d is None else v.to(d) for v, d in zip(given, self._dtypes, strict=True)]
        if self._proto.domain in _STANDARD:
            for values in (given, narrow):
                try:
                    results: list[Any] = self._reference.run(None, self._feeds(values))
                    return results
                except Exception as error:  # whatever a foreign implementation raises for types it does not take
                    failure = error
        else:
            try:
                found: list[Any] = self._session.run(None, self._feeds(narrow))
                return found
            except Exception as error:
                failure = error
        raise BackendError(
            f"the operator {self._proto.op_type} cannot be evaluated alone",
            got=f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}",
            expected="an operator of the ONNX standard, or one that ONNX Runtime knows",
        ) from failure

    def _feeds(self, values: list[Tensor]) -> dict[str, Any]:
        return {name: value.numpy() for name, value in zip(self._names, values, strict=True)}

    @functools.cached_property
    def _reference(self) -> Any:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(self._model)

    @functools.cached_property
    def _session(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        content = self._model.SerializeToString()
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def one_node(
    proto: onnx.NodeProto, opsets: list[onnx.OperatorSetIdProto], element_types: list[int], ir_version: int
) -> OnnxFunction:
    """Return a function that evaluates a node by itself."""
    return OnnxFunction(
        OneNode(proto, opsets, element_types, ir_version), f"{proto.domain}.{proto.op_type}".lstrip(".")
    )
