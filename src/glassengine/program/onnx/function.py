"""The function in a node of a translated ONNX graph, and the evaluation of operators without a translation.

They have no rounding bound, so that a difference there is at most suspicious. What is computed in float64 elsewhere is
computed in float64 here as well where the reference implementation allows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._export.verifier import Verifier
from torch._ops import OpOverload
from torch.fx import Node

from glassengine.errors import BackendError, first_line
from glassengine.program.onnx.file import torch_dtype
from glassengine.program.onnx.session import SessionSettings, start

if TYPE_CHECKING:
    import onnx


class OnnxFunction:
    """A function of tensors with the name of an ATen op, and the order of its arguments.

    Bounds, noise and ties are those of the op of that name (`numerics.float64`); a name of no class has no bound.

    Args:
        function: Computes the results in any given dtype.
        name: Of the op.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = "onnx"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results."""
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnnxFunction) and (other.__name__, other.function) == (self.__name__, self.function)

    def __hash__(self) -> int:
        return hash((self.__name__, self.function))

    def __repr__(self) -> str:
        return f"onnx.{self.__name__}"


Each = Callable[[Node, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the node of an op, its result and its arguments, and returns what is to be used in place of the result."""


class Composite(OnnxFunction):
    """A function that is made of ops: a recurrence, a branch, a loop, a function of the model.

    It has no rounding bound of its own; what rounding does to it is what rounding does to its ops (see `rounded`).

    Args:
        function: As for `OnnxFunction`; takes the keyword `each`, an `Each` for its ops or None.
        name: Of the operator.
        bodies: The graphs that it interprets (`control.Body`), as the file calls them ("body", "then_branch").
        attributes: Of the operator, by name, where its function has them built in.

    Two calls of one operator are equal, for any graphs: their content does not decide which ops belong
    together than weights do.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        bodies: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(function, name)
        self.bodies = dict(bodies or {})
        self.attributes = dict(attributes or {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Composite) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)

    def rounded(self, each: Each) -> Callable[..., Any]:
        """Return the function with `each` applied to every op in it."""
        return functools.partial(self.function, each=each)


class OnnxVerifier(Verifier):
    """Lets an `ExportedProgram` hold a translated ONNX graph."""

    dialect = "GLASS_ONNX"

    def allowed_op_types(self) -> tuple[type[Any], ...]:
        """Ops of ATen, and functions of this dialect."""
        return (OpOverload, OnnxFunction)


_STANDARD = ("", "ai.onnx")
TABULAR = "ai.onnx.ml"
"""Domain of trees, linear models and encoders."""
_RANDOM = {
    "Bernoulli": "bernoulli",
    "Multinomial": "multinomial",
    "RandomNormal": "randn",
    "RandomNormalLike": "randn_like",
    "RandomUniform": "rand",
    "RandomUniformLike": "rand_like",
}
"""Operators with random results -> the ATen ops of which that is known."""


_OTHER_RESULTS = frozenset({"SVMClassifier"})
"""Operators of which the reference implementation of onnx and ONNX Runtime make different probabilities."""


class OneNode:
    """A node as a model of its own.

    Args:
        proto: The node.
        opsets: Operator sets of its model.
        element_types: Of its inputs; 0 where an input is left out or its type unknown.
        ir_version: Of its model.
        fixed: Inputs that are weights: runtimes have other kernels for these than for values.
    """

    def __init__(
        self,
        proto: onnx.NodeProto,
        opsets: list[onnx.OperatorSetIdProto],
        element_types: list[int],
        ir_version: int,
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        from onnx import ValueInfoProto, helper

        self._proto = proto
        self._fixed = fixed
        self._opened: Any = None
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
        tensors = iter(
            torch.from_numpy(np.array(v)) if v.dtype.kind in "biuf" else None for v in map(np.asarray, found)
        )
        results = [next(tensors) if name else None for name in self._proto.output]
        if precision is torch.float64:
            results = [r.double() if r is not None and r.is_floating_point() else r for r in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _run(self, given: list[Tensor]) -> list[Any]:
        narrow = [v if d is None else v.to(d) for v, d in zip(given, self._dtypes, strict=True)]
        if self.has_reference:
            for values in (given, narrow):
                try:
                    results: list[Any] = self._reference.run(None, self._feeds(values))
                    return results
                except Exception as error:  # a foreign implementation may raise anything for types it does not take
                    failure = error
        else:
            try:
                feeds = self._feeds(narrow)
                if self._opened is None:
                    self._opened = self._session(feeds)
                fed = {name: value for name, value in feeds.items() if name not in self._fixed}
                found: list[Any] = self._opened.run(None, fed)
                return found
            except Exception as error:
                failure = error
        raise BackendError(
            f"the operator {self._proto.op_type} cannot be evaluated alone",
            got=f"{type(failure).__name__}: {first_line(failure)}",
            expected="an operator of the ONNX standard, or one that ONNX Runtime knows",
        ) from failure

    @property
    def op_type(self) -> str:
        """The operator."""
        return str(self._proto.op_type)

    def attribute(self, name: str) -> Any:
        """Return an attribute that is a list; empty where the node has none of that name."""
        from onnx import helper

        return next((helper.get_attribute_value(one) for one in self._proto.attribute if one.name == name), [])

    @property
    def has_reference(self) -> bool:
        """Whether anything else than the runtime defines what it computes."""
        return self._proto.domain in _STANDARD or (
            self._proto.domain == TABULAR and self._proto.op_type not in _OTHER_RESULTS
        )

    def _feeds(self, values: list[Tensor]) -> dict[str, Any]:
        return {name: value.numpy() for name, value in zip(self._names, values, strict=True)}

    @functools.cached_property
    def _reference(self) -> Any:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(self._model)

    def _session(self, feeds: dict[str, Any]) -> Any:
        from onnx import ModelProto, numpy_helper

        # With the threads with which the file is run: a dynamic quantization takes the rows of each thread together.
        options = SessionSettings({"graph_optimization_level": "disable", "inter_op_num_threads": 1}).options()
        model = ModelProto()
        model.CopyFrom(self._model)
        inputs = [value for value in model.graph.input if value.name not in self._fixed]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.graph.initializer.extend(numpy_helper.from_array(feeds[name], name) for name in sorted(self._fixed))
        return start(model.SerializeToString(), options)


def is_of_runtime_alone(target: Any) -> bool:
    """Whether ONNX Runtime alone defines what a call computes."""
    one = target.function if isinstance(target, OnnxFunction) else None
    return isinstance(one, OneNode) and not one.has_reference


def thresholds_of(target: Any) -> list[tuple[int, float]] | None:
    """Return (feature, threshold) of every choice of trees; None where a call is of no trees."""
    one = target.function if isinstance(target, OnnxFunction) else None
    if not isinstance(one, OneNode) or not one.op_type.startswith("TreeEnsemble"):
        return None
    features, values = (one.attribute(name) for name in ("nodes_featureids", "nodes_values"))
    return list(zip(map(int, features), map(float, values), strict=False))


def one_node(
    proto: onnx.NodeProto,
    opsets: list[onnx.OperatorSetIdProto],
    element_types: list[int],
    ir_version: int,
    fixed: frozenset[str] = frozenset(),
) -> OnnxFunction:
    """Return a function that evaluates a node by itself; for the arguments see `OneNode`."""
    name = _RANDOM.get(proto.op_type) if proto.domain in _STANDARD else None
    name = name or f"{proto.domain}.{proto.op_type}".lstrip(".")
    return OnnxFunction(OneNode(proto, opsets, element_types, ir_version, fixed), name)
