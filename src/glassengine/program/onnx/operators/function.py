"""The function in a node of a translated ONNX graph: named by the ATen op whose rounding it has, evaluated by torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch._export.verifier import Verifier
from torch._ops import OpOverload
from torch.fx import Node


class OnnxFunction:
    """A function of tensors with the name of an ATen op, and the order of its arguments.

    Bounds, noise and ties are those of the op of that name (`numerics.ops`); a name of no class has no bound.

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
