"""Eager debug mode: every operation is compiled and run by itself, as soon as it is called.

Two front ends over the same operations. `eager_debug()` takes all that eager code calls: forward, backward, optimizer.
`interpret` takes a graph that torch.compile captured, node by node.

Each distinct operation is compiled once and runs as an executable of its own. Distinct are operations, dtypes, shapes,
strides, devices and constants. A number that changes from call to call (the bias corrections of Adam) would be another
constant each time: on its second value the operation is compiled once more, with the number as an input. What has
nothing to compile, or cannot be compiled, runs on ATen; but for views and the like, which compute nothing, that is
counted with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from glassengine.backends.protocol.backend import CompilingGraphs, GraphFunction
from glassengine.backends.registry import choose_graph_backend
from glassengine.errors import BackendError, logger
from glassengine.executable.compilation import FIRST, Occasion
from glassengine.executable.counters import registry
from glassengine.frontends.eager_graph import (
    CompiledCall,
    EagerCall,
    TensorSpec,
    UnforeseenError,
    compile_call,
    examine,
    overlap,
)
from glassengine.program.representation.naming import of_any_layout
from glassengine.results.backends import Cause

_TRACING = (FakeTensor, FunctionalTensor)  # a graph is being captured: nothing is computed

_said: set[tuple[str, str]] = set()
_NUMBER = Cause("argument", "a number changed")
_ARGUMENT = Cause("argument", "an argument that is not a tensor changed")
_MAX_CONSTANTS = 4  # values of numbers that cannot be inputs, before an operation is left to ATen


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


@dataclass
class _Family:
    """What was compiled of one operation with the same tensors, for any numbers.

    Attributes:
        cause: Why an executable is needed at all.
        by_numbers: Values of the numbers -> the executable in which they are constants.
        general: The executable in which they are inputs.
        cannot_generalize: Why there is none.
        obstacle: Why there is no executable at all.
    """

    cause: Cause
    by_numbers: dict[tuple[str, ...], CompiledCall] = field(default_factory=dict)
    general: CompiledCall | None = None
    cannot_generalize: str = ""
    obstacle: str = ""


class OpRunner:
    """Runs operations one by one on a back-end, and holds what it has compiled."""

    def __init__(self, backend: CompilingGraphs) -> None:
        self._backend = backend
        self._families: dict[tuple[Any, ...], _Family] = {}

    def run(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `op`: the result is what ATen would return, also where arguments are written to and returned.

        Args:
            op: The operation.
            args: Its arguments by position.
            kwargs: And by keyword.
            meta: Where the call comes from, as in the node of a captured graph.

        Raises:
            Exception: What ATen raises for these arguments.
        """
        operation = examine(op)
        if not operation.computes:
            return op(*args, **kwargs)
        obstacle = operation.obstacle_of(args, kwargs)
        if not obstacle:
            call = EagerCall(operation, args, kwargs)
            found = self._find(call, meta) if not call.obstacle else call.obstacle
            if isinstance(found, CompiledCall):
                # Below autograd, which has seen the call already; compiled code writes into tensors it has made.
                with torch._C._AutoDispatchBelowAutograd():
                    return found.run(call)
            obstacle = found
        count_fallback(op, obstacle)
        return op(*args, **kwargs)

    def _find(self, call: EagerCall, meta: Mapping[str, Any] | None) -> CompiledCall | str:
        """Return the executable of a call, compiled now if it is the first of its kind, or why there is none."""
        if overlap(call):
            return "it writes to memory that another of its tensors shares"
        family = self._families.get(call.key)
        if family is None:
            family = self._families[call.key] = _Family(self._why(call))
        if family.obstacle:
            return family.obstacle
        constants = family.by_numbers.get(call.number_key)
        if constants is not None:
            return constants
        if family.general is not None:
            return family.general
        if family.by_numbers and not family.cannot_generalize:
            try:
                family.general = self._compile(call, _NUMBER, meta, with_numbers=True)
                return family.general
            except BackendError as error:
                family.cannot_generalize = _reason(error)
        if len(family.by_numbers) >= _MAX_CONSTANTS:
            return f"a number in it changes and cannot be an input: {family.cannot_generalize}"
        try:
            compiled = self._compile(call, _NUMBER if family.by_numbers else family.cause, meta, with_numbers=False)
        except BackendError as error:
            family.obstacle = _reason(error)
            if not isinstance(error, UnforeseenError):
                logger.warning("%s cannot be compiled and runs on ATen: %s", call.operation.op, family.obstacle)
            return family.obstacle
        family.by_numbers[call.number_key] = compiled
        return compiled

    def _compile(
        self, call: EagerCall, cause: Cause, meta: Mapping[str, Any] | None, *, with_numbers: bool
    ) -> CompiledCall:
        occasion = Occasion((("", cause),))
        return compile_call(call, with_numbers=with_numbers, backend=self._backend, occasion=occasion, meta=meta)

    def _why(self, call: EagerCall) -> Cause:
        """Return why a call is unlike all earlier ones, by the call of the same operation that it is most like."""
        op = call.operation.op
        earlier = [key for key in self._families if key[0] is op]
        if not earlier:
            return FIRST
        key = call.key
        nearest = max(reversed(earlier), key=lambda other: sum(map(operator.eq, key, other)))
        unlike = ((before, now) for before, now in zip(nearest, key, strict=False) if before != now)
        return next(itertools.starmap(_difference, unlike), _ARGUMENT)


@functools.cache
def op_runner(backend: type[CompilingGraphs]) -> OpRunner:
    """Return the runner of this process for a back-end, so that no front end compiles what another has compiled."""
    return OpRunner(backend())


def count_fallback(op: OpOverload | HigherOrderOperator, reason: str) -> None:
    """Count an operation that ran on ATen, by the name that PyTorch/XLA gives it, and log it the first time."""
    packet = op._overloadpacket if isinstance(op, OpOverload) else op
    name = str(packet).replace(".", "::", 1)
    registry.count(name)
    if (name, reason) not in _said:
        _said.add((name, reason))
        logger.info("%s runs on ATen: %s", name, reason)


def _difference(before: Any, now: Any) -> Cause:
    """Return the cause that two parts of a key that differ are."""
    if isinstance(before, TensorSpec) and isinstance(now, TensorSpec):
        for kind, old, new in (
            ("dtype", before.dtype, now.dtype),
            ("rank", len(before.shape), len(now.shape)),
            ("size", tuple(before.shape), tuple(now.shape)),
            ("stride", before.stride, now.stride),
            ("device", before.device, now.device),
        ):
            if old != new:
                return Cause(kind, f"the {kind} of a tensor changed from {old} to {new}")
    return _ARGUMENT


def _reason(error: BackendError) -> str:
    """Return the first line of what the compiler said."""
    lines = str(error.__cause__ or error).strip().splitlines()
    return f"{type(error.__cause__ or error).__name__}: {lines[0] if lines else ''}"
