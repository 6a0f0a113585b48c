"""Eager debug mode: every operation is compiled and run by itself, as soon as it is called.

Two front ends over the same operations. `eager_debug()` takes all that eager code calls: forward,
backward, optimizer. `interpret` takes a graph that torch.compile captured, node by node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from glassengine.backends.protocol.backend import GraphFunction
from glassengine.backends.registry import choose_graph_backend
from glassengine.frontends.eager_ops import OpRunner, count_fallback, op_runner
from glassengine.program.representation.naming import of_any_layout

_TRACING = (FakeTensor, FunctionalTensor)  # a graph is being captured: nothing is computed


class EagerDebugMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation that this thread calls to `runner`; tensors of other kinds unwrap themselves first."""

    def __init__(self, runner: OpRunner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runner = runner

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, _TRACING) for kind in types):
            return func(*args, **(kwargs or {}))
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        if not isinstance(func, OpOverload):
            count_fallback(func, "it is not a single operation")
            return func(*args, **(kwargs or {}))
        return self._runner.run(func, args, kwargs or {})


@contextlib.contextmanager
def eager_debug(backend: str | None = None) -> Iterator[None]:
    """Compile and run every operation by itself while the block runs, in this thread.

    Args:
        backend: Which back-end compiles them; None takes the default one.

    Raises:
        UnknownNameError: No such back-end is registered.
        BackendError: It cannot be used here.
        UsageError: It builds engines only.
    """
    with EagerDebugMode(op_runner(type(choose_graph_backend(backend)))):
        yield


class _ByNode(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, runner: OpRunner) -> None:
        super().__init__(module)
        self._runner = runner

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = of_any_layout(target)
        if isinstance(target, OpOverload):
            return self._runner.run(target, args, kwargs, self._meta)
        if isinstance(target, torch._ops.HigherOrderOperator):
            count_fallback(target, "it is not a single operation")
        return super().call_function(target, args, kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        self._meta = n.meta
        return super().run_node(n)


def interpret(module: torch.fx.GraphModule, runner: OpRunner) -> GraphFunction:
    """Return a function that runs a flat ATen graph one operation at a time; it empties the list it is given."""
    interpreter = _ByNode(module, runner)

    def run(arguments: list[Any]) -> Any:
        with torch.no_grad():
            return interpreter.boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
