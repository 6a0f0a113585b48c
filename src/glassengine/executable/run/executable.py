"""The only place where a graph is compiled or run.

Front ends hand in what compiles (`compile_executable`) or loads (`load_executable`) and get an `Executable` back. Both
functions and `Executable.run` keep counts and times; metrics, causes, snapshots and the profiler use them.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import glassengine.executable.snapshot.snapshots  # noqa: F401  registers who the environment wants to look
from glassengine import environment, spans
from glassengine.errors import BackendError, GlassError
from glassengine.executable.cache import CompilerCache, compiled
from glassengine.executable.compilation import FIRST, Occasion, note_compilation
from glassengine.executable.counters import registry
from glassengine.executable.graph import Arguments, CapturedGraph, Execution, observers
from glassengine.results.backends import Cause

Function = Callable[[Any], Any]
_BUILD = Occasion((("", Cause("build", "an engine is built")),))
_FIRST = Occasion((("", FIRST),))
_numbers = itertools.count()


@dataclass(eq=False)
class Executable:
    """One compiled graph, loaded.

    Attributes:
        name: Shown in messages, e.g. "tiny-llama/main".
        function: What the back-end gave: takes the inputs and returns the outputs, both by name or both in order;
            mutates cache inputs where the back-end does. One that takes a list empties it.
        input_names: Names of the inputs in order; needed where they come as a list.
        output_names: Names of the outputs in order; needed where they come as a sequence.
        graph: What was compiled, or a function that reads it from where it is stored; None if unknown.
        backend: Name of the back-end that compiled it; "" if unknown.
        synchronous: Whether a run ends when its devices have finished. An accelerator reports an error when it is next
            waited for, by default in a later execution, perhaps of another executable. Costs the overlap of host and
            device; nothing on the CPU.
        number: Of this executable among those of the process.
        executions: Index of a device -> completed runs on it.
        execute_s: Seconds spent in them.
    """

    name: str
    function: Function
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    graph: CapturedGraph | Callable[[], CapturedGraph] | None = None
    backend: str = ""
    synchronous: bool = field(default_factory=environment.synchronous)
    number: int = field(default_factory=lambda: next(_numbers))
    executions: dict[int, int] = field(default_factory=dict)
    execute_s: float = 0.0

    @property
    def num_executions(self) -> int:
        """Completed runs on all devices."""
        return sum(self.executions.values())

    def captured(self) -> CapturedGraph | None:
        """Return the graph, read now if needed; None if unknown."""
        if callable(self.graph):
            self.graph = self.graph()
        return self.graph

    def run(self, inputs: Arguments) -> Any:
        """Run once.

        Args:
            inputs: By name; or a list in the order of `input_names`, which is emptied.

        Returns:
            The outputs, by name or as a sequence, as `function` gives them.

        Raises:
            BackendError: The back-end failed with inputs by name; names the executable and chains the original error.
            Exception: The back-end failed with inputs in a list: its own error, with a note, because the caller is the
                user's code and may expect it. Or what an observer raised.
        """
        busy = _accelerators(inputs) if self.synchronous or torch.accelerator.is_available() else []
        device = busy[0].index or 0 if busy else 0
        number = self.executions.get(device, 0)
        looking = observers()
        execution = Execution(self, number, device, inputs, looking) if looking else None
        start = time.perf_counter_ns()
        try:
            outputs = self.function(inputs)
            if self.synchronous:
                for accelerator in busy:
                    torch.accelerator.synchronize(accelerator)
        except BaseException as error:
            if execution is not None:
                execution.fail(error)
            if isinstance(error, GlassError) or not isinstance(error, Exception):
                raise
            if isinstance(inputs, Mapping):
                raise self._failure(error, number, inputs) from error
            error.add_note(f"in executable {self.name!r}, execution {number}")
            raise
        elapsed = time.perf_counter_ns() - start
        self.execute_s += elapsed * 1e-9
        self.executions[device] = number + 1
        if registry.enabled:
            registry.sample("DispatchTime" if busy and not self.synchronous else "ExecuteTime", elapsed, "ns")
            if number:
                registry.count("CachedCompile")
        if execution is not None:
            execution.finish(outputs)
        return outputs

    def _failure(self, error: Exception, number: int, inputs: Mapping[str, torch.Tensor]) -> BackendError:
        shapes = ", ".join(f"{name}: {_spell(tensor)}" for name, tensor in list(inputs.items())[:6])
        late = not self.synchronous and bool(_accelerators(inputs))
        return BackendError(
            f"executable {self.name!r} failed in execution {number}" + (", or one before it" if late else ""),
            got=f"{type(error).__name__}: {error}",
            expected=f"inputs that fit the built ranges, on the right device; these were {shapes}",
            hint="wait for the device after each execution: --synchronous, or GLASS_SYNCHRONOUS=1" if late else None,
        )


def _accelerators(inputs: Arguments) -> list[torch.device]:
    """Return the devices of `inputs` that work on their own time."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    found = dict.fromkeys(value.device for value in values if hasattr(value, "device"))
    return [device for device in found if device.type not in ("cpu", "meta")]


def _spell(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{','.join(map(str, tensor.shape))}]@{tensor.device}"


def compile_executable(
    name: str, compiler: Callable[[Path], None], directory: Path, graph: CapturedGraph | None = None
) -> None:
    """Compile one graph into `directory`.

    `compiler` writes its files into the empty directory; `graph` explains the compilation later.

    Raises:
        BackendError: The compiler failed; chains the original error.
    """
    start = time.perf_counter_ns()
    with _named(f"compiling {name!r} failed", "try another one with --backend"), spans.span("compile", name):
        compiler(directory)
    note_compilation(name, graph, _BUILD, time.perf_counter_ns() - start)


def compile_graph(
    name: str,
    graph: CapturedGraph,
    compiler: Callable[[], Function],
    cache: CompilerCache | None = None,
    occasion: Occasion = _FIRST,
) -> Executable:
    """Compile a captured graph in memory, or take it from the persistent cache.

    Args:
        name: Shown in messages.
        graph: What is compiled.
        compiler: Given by the back-end: returns a function that takes the inputs as a list, which it empties, and
            returns the outputs as a sequence.
        cache: How the back-end's compiler keeps its products; None where it cannot.
        occasion: Why it is compiled.

    Raises:
        BackendError: The compiler failed; chains the original error.
    """
    start = time.perf_counter_ns()
    hint = 'another back-end: options={"backend": "eager"}'
    with _named(f"compiling {name!r} failed", hint, own=(GlassError,)), spans.span("compile", name):
        made = compiled(name, graph, compiler, cache)
    elapsed = time.perf_counter_ns() - start
    note_compilation(name, graph, occasion, elapsed, from_cache=made.outcome == "hit")
    input_names = tuple(spec.name for spec in graph.inputs)
    return Executable(name, made.function, input_names, graph.output_names, graph)


def load_executable(name: str, loader: Callable[[Path], Function], directory: Path) -> Executable:
    """Load what `compile_executable` wrote.

    Raises:
        BackendError: The loader failed; chains the original error.
    """
    with _named(f"loading {name!r} failed", "build it again on this machine"):
        return Executable(name, loader(directory))


@contextlib.contextmanager
def _named(what: str, hint: str, *, own: tuple[type[Exception], ...] = (GlassError, OSError)) -> Iterator[None]:
    """Turn any error of a back-end in the block, except of the kinds `own`, into one that says what failed.

    Raises:
        BackendError: It failed; chains the original error.
    """
    try:
        yield
    except own:
        raise
    except Exception as error:
        raise BackendError(what, got=f"{type(error).__name__}: {error}", hint=hint) from error
