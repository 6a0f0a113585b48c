"""Runs what is pending, for a step or for one tensor, and finds the line of user code that asked for it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.backends.protocol.backend import CachingGraphs, CompilingGraphs, DecomposingGraphs
from glassengine.errors import BackendError, UsageError
from glassengine.executable.compilation import FIRST, Occasion
from glassengine.executable.counters import registry
from glassengine.executable.run.executable import compile_graph
from glassengine.plugins.lazy.graphs import Pending, awaited, captured, pending_graph
from glassengine.plugins.lazy.memory import viewed
from glassengine.plugins.lazy.rules import takes_any_number
from glassengine.plugins.lazy.settings import LazyExecutable, LazyGraph, Reason, bytes_of, settings
from glassengine.plugins.lazy.sizes import constant, fitted, foreseen, sample_of, skeleton
from glassengine.plugins.lazy.symbols import Pattern, SizeSample
from glassengine.plugins.lazy.tensor import LazyTensor
from glassengine.plugins.lazy.values import NUMBER_DTYPES, LazyMemory, LazyValue, counts, pending_memories
from glassengine.results.backends import Cause

NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen")
"""Where files begin that are no code of the user."""


def user_line() -> str:
    """Return "file:line" of the innermost code outside of torch and of this package; "" where there is none."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(NOT_USERS):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{line}"
    return ""


def names_of(made_by: Pending) -> dict[int, tuple[str, str]]:
    """Return the names of parameters and buffers among the leaves, as the modules of the user's code call them."""
    wanted = {id(value) for value in made_by.leaves}
    names: dict[int, tuple[str, str]] = {}
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_filename.startswith(NOT_USERS):
            continue
        for variable, module in _variables(frame):
            if not isinstance(module, torch.nn.Module):
                continue
            for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                for name, tensor in tensors:
                    if type(tensor) is LazyTensor and type(tensor._lazy) is LazyMemory:
                        value = tensor._lazy.value
                        if id(value) in wanted:
                            names.setdefault(id(value), (f"{variable}.{name}", kind))
    return names


def _variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the variables that code sees, by name.

    Before Python 3.13 a function that runs keeps the copy of its variables that is made here, and with it tensors that
    it deletes later. The copy is emptied, unless the function itself asked for `locals()`.
    """
    if frame.f_code.co_name == "<module>":
        return list({**frame.f_globals, **frame.f_locals}.items())
    places = frame.f_locals
    found = list(places.items())
    own_references = 3  # of the frame, of this function, of the call below
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        if sys.getrefcount(places) <= own_references:
            places.clear()
    return found


logger = logging.getLogger("glassengine.lazy")

_MOST_CALLS_AGAIN = 256
"""In the graph of a tensor that is read; of a larger one all that other tensors hold is kept."""
_MOST_VARIANTS = 3
"""Of a graph with other numbers as constants, before all its numbers are inputs."""
_MOST_SAMPLES = 8
"""Of the sizes of one graph that are kept: two tell what follows from one size, more what follows from several."""


_lock = threading.RLock()
_numbers = itertools.count()


def run_pending(reason: Reason = Reason("step", "mark_step")) -> int:  # noqa: B008  it does not change
    """Run everything that is pending as one graph, and return how many tensors that were."""
    with _lock:
        values = {id(memory.value): memory.value for memory in pending_memories()}
        for one in awaited():
            if one.value.data is None and not viewed(one.value):
                values[id(one.value)] = one.value
        if reason.kind == "read" and values:
            _note_read(values, reason)
        _run(list(values.values()), reason)
        return len(values)


def fetch(values: Sequence[LazyValue], reason: Reason) -> list[torch.Tensor]:
    """Return the data of values; one graph computes those of them that are pending.

    What views alone make of data is read without a graph.
    """
    with _lock:
        wanted: dict[int, LazyValue] = {}
        for value in values:
            if value.data is None and not viewed(value):
                wanted[id(value)] = value
        if wanted:
            if settings.unread:
                raise UsageError(
                    f"a value is needed inside of {settings.unread}, which would cut its graph in two",
                    got=f"{reason.text} at {user_line()}",
                    hint="return the tensor and read it after the call, or in a step closure",
                )
            if reason.kind != "debug":
                _note_read(wanted, reason)
            _run(list(wanted.values()), reason)
        start = time.perf_counter_ns()
        found = [value.data for value in values]
        if reason.kind == "read":
            registry.sample("TransferFromDeviceTime", time.perf_counter_ns() - start, "ns")
        return found  # type: ignore[return-value]


def _note_read(values: Mapping[int, LazyValue], reason: Reason) -> None:
    where = user_line()
    registry.count("TensorRead")
    registry.count(f"TensorRead::{reason.text} at {where}")
    logger.info("the graph of %s ran for %s at %s", _spelled(values), reason.text, where)


def _spelled(values: Mapping[int, LazyValue]) -> str:
    first = next(iter(values.values()))
    return str(first.spec) if len(values) == 1 else f"{len(values)} tensors"


def _run(values: list[LazyValue], reason: Reason) -> None:
    if not values:
        return
    made_by = pending_graph(values)
    if reason.kind != "step" and len(made_by.calls) > _MOST_CALLS_AGAIN:
        # Else each read of code without steps would compute all of it once more.
        calls = {call.number for call in made_by.calls}
        kept = {id(value): value for value in values}
        for memory in pending_memories():
            if memory.value.call.number in calls:  # type: ignore[union-attr]
                kept[id(memory.value)] = memory.value
        made_by = pending_graph(list(kept.values()))
    compiler = settings.compiler()
    form = skeleton(made_by)
    sample = None if form is None else sample_of(made_by)
    key = compiler.name, form or made_by.key
    graph = settings.graphs.setdefault(key, LazyGraph())
    variant = next((variant for variant in graph.variants if variant.fits(made_by.numbers, sample)), None)
    if variant is None:
        variant = _compiled(made_by, graph, sample, compiler)
        graph.variants.append(variant)
    inputs: list[Any] = []
    if variant.sizes is not None and sample is not None:
        inputs += [sample.inputs[place] for place in variant.sizes.symbols]
    inputs += [value.data for value in made_by.leaves]
    inputs += [_number(made_by.numbers[index]) for index in variant.hoisted]
    with _alone():
        results = variant.executable.run(inputs)
    for value, result in zip(made_by.outputs, results, strict=True):
        value.data = _kept(value, result)
    for value in made_by.outputs:
        value.call = None
    for on_run in dict.fromkeys(one.on_run for one in awaited()):
        on_run()


def _kept(value: LazyValue, result: torch.Tensor) -> torch.Tensor:
    """Return a result with the strides that were foreseen."""
    if value.spec.fits(result):
        return result
    if result.shape != value.spec.shape or result.dtype is not value.spec.dtype:
        raise BackendError(
            "a back-end returned another kind of tensor than its graph does",
            got=f"{str(result.dtype).removeprefix('torch.')}{list(result.shape)}",
            expected=str(value.spec),
        )
    with _alone():
        return value.spec.empty().copy_(result)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Run a graph as it was recorded: nothing that is in effect now changes its operations."""
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        yield


def _compiled(
    made_by: Pending, graph: LazyGraph, sample: SizeSample | None, compiler: CompilingGraphs
) -> LazyExecutable:
    everything = frozenset(range(len(made_by.numbers)))
    hoisted = frozenset(_operands(made_by))
    cause = FIRST if len(settings.graphs) == 1 else _NEW
    if graph.variants:
        latest = graph.variants[-1]
        changed = {index for index, value in latest.constants if bytes_of(made_by.numbers[index]) != value}
        cause = _NUMBER if changed else _SIZE
        many = changed and len(graph.variants) >= _MOST_VARIANTS
        hoisted = everything if many else frozenset((*latest.hoisted, *changed))

    def made(sizes: tuple[Pattern, SizeSample] | None) -> LazyExecutable:
        return _with_inputs(
            made_by, hoisted, compiler, lambda numbers: _variant(made_by, numbers, compiler, cause, sizes)
        )

    if sample is None:
        return made(None)
    earlier = [known for known in graph.samples if known != sample]
    guess = None if earlier else foreseen(made_by)
    samples = (sample, *earlier, *([guess] if guess else ()))
    graph.samples = [sample, *earlier][:_MOST_SAMPLES]
    pattern = fitted(samples)
    if pattern is not None and pattern.symbols and not {sample.inputs[place] for place in pattern.symbols} & {0, 1}:
        try:
            return made((pattern, sample))
        except Exception as error:  # a compiler may take no symbols: sizes that are known are always right
            logger.info("a graph is compiled for one size alone: %s", error)
    return made((constant(sample), sample))


def _with_inputs(
    made_by: Pending,
    hoisted: frozenset[int],
    compiler: CompilingGraphs,
    compiled: Callable[[frozenset[int]], LazyExecutable],
) -> LazyExecutable:
    """Compile a graph with as many of its numbers as inputs as the back-end takes."""
    known = settings.constant.setdefault(compiler.name, {})
    if isinstance(compiler, DecomposingGraphs):
        _learn_constants(made_by, known, compiler)
    numbers = hoisted - _constants(made_by, known)
    while True:
        try:
            return compiled(numbers)
        except BackendError as error:
            if not numbers:
                raise
            logger.info("some numbers of a graph cannot be inputs of it: %s", error)
        _learn_constants(made_by, known, compiler)
        fewer = numbers - _constants(made_by, known)
        numbers = fewer if fewer != numbers else frozenset()


def _learn_constants(made_by: Pending, known: dict[OpOverload, bool], compiler: CompilingGraphs) -> None:
    """Find out of which operations a back-end needs to know the numbers, of those that are not known yet."""
    table: Mapping[Any, Any] | None = None
    for call in made_by.calls:
        if call.numbers and call.operation.target not in known:
            if table is None:
                table = compiler.decompositions() if isinstance(compiler, DecomposingGraphs) else {}
            known[call.operation.target] = not takes_any_number(call, table)


def _constants(made_by: Pending, known: Mapping[OpOverload, bool]) -> frozenset[int]:
    """Return the numbers that the back-end needs to know when it compiles, as the weight of `torch.lerp`."""
    found: list[int] = []
    start = 0
    for call in made_by.calls:
        if known.get(call.operation.target):
            found += range(start, start + len(call.numbers))
        start += len(call.numbers)
    return frozenset(found)


_NEW = Cause("operations", "other operations were recorded than before")
_NUMBER = Cause("argument", "a number changed")
_SIZE = Cause("size", "a size changed, and others with it in another way than was foreseen")


def _variant(
    made_by: Pending,
    hoisted: frozenset[int],
    compiler: CompilingGraphs,
    cause: Cause,
    sizes: tuple[Pattern, SizeSample] | None,
) -> LazyExecutable:
    graph, fakes, mode, pattern = captured(made_by, hoisted, names_of(made_by), sizes)
    cache = compiler.graph_cache() if isinstance(compiler, CachingGraphs) else None
    with _alone(), tracing(TracingContext(mode)):
        executable = compile_graph(
            f"lazy/{next(_numbers)}", graph, lambda: compiler.compile_graph(graph.module, fakes), cache,
            Occasion((("", cause),)),
        )  # fmt: skip
    executable.backend = compiler.name
    constants = tuple((index, bytes_of(number)) for index, number in enumerate(made_by.numbers) if index not in hoisted)
    return LazyExecutable(executable, tuple(sorted(hoisted)), constants, pattern)


def _operands(made_by: Pending) -> Iterator[int]:
    """Yield the numbers that are computed with: those of an optimizer change from step to step."""
    start = 0
    for call in made_by.calls:
        # A float among integers is one that is rounded to them, as the label that stands for none.
        if any(value.spec.dtype.is_floating_point or value.spec.dtype.is_complex for value in call.reads):
            yield from (start + index for index, is_operand in enumerate(call.operation.operands) if is_operand)
        start += len(call.numbers)


def _number(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=NUMBER_DTYPES[type(number)])


registry.add_source(counts)
