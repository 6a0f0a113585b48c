"""The back-end "glass" of torch.compile: every graph that it captures becomes an `Executable`.

TorchDynamo captures Python code, AOT autograd makes inference, forward and backward graphs of it, at ATen level,
decomposed further only where the back-end asks for it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext, TracingContext

from glassengine import environment
from glassengine.backends.protocol.backend import CachingGraphs, DecomposingGraphs, GraphFunction
from glassengine.backends.registry import choose_graph_backend
from glassengine.errors import UnknownNameError
from glassengine.executable.graph.graph import GraphKind
from glassengine.executable.metrics.compilation import Occasion
from glassengine.executable.run.executable import compile_graph
from glassengine.frontends.aot_graph import Names, captured, partition
from glassengine.frontends.causes import RESUMED, occasion
from glassengine.frontends.compiled_taps import handing_on, mark_taps_for, take_taps
from glassengine.frontends.eager_debug import interpret, op_runner
from glassengine.results.compilation import Cause

MODES = ("compile", "eager_debug")


@dataclass(frozen=True)
class CompileOptions:
    """What `torch.compile(..., options=...)` may say.

    Attributes:
        backend: Which back-end compiles the graphs; None takes the default one.
        mode: "compile" for whole graphs, "eager_debug" for every operation alone; the default where GLASS_EAGER_DEBUG
            or NEURON_USE_EAGER_DEBUG_MODE asks for it.
    """

    backend: str | None = None
    mode: str = field(default_factory=lambda: "eager_debug" if environment.eager_debug() else "compile")


def glass_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of TorchDynamo; what `torch.compile(model, backend="glass")` calls.

    Args:
        module: The graph, functional or not.
        example_inputs: Its inputs, fake.
        options: {"backend": "inductor" | "eager" | ..., "mode": "compile" | "eager_debug"}; both may be left out.
        mode: Same as options["mode"].

    Raises:
        UnknownNameError: An option, a mode or a back-end that there is not.
        BackendError: The back-end cannot be used here.
    """
    compiler = _GraphCompiler(read_options(options, mode), Names(module.graph))
    return aot_autograd(
        fw_compiler=functools.partial(compiler.compile, "forward"),
        bw_compiler=functools.partial(compiler.compile, "backward"),
        inference_compiler=functools.partial(compiler.compile, "inference"),
        decompositions=compiler.decompositions(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(module, example_inputs)


class _GraphCompiler:
    """Compiles what AOT autograd makes of one graph of Dynamo: an inference graph, or a forward and a backward one."""

    def __init__(self, options: CompileOptions, names: Names) -> None:
        self._backend = choose_graph_backend(options.backend)
        self._operations = op_runner(type(self._backend)) if options.mode == "eager_debug" else None
        self._cache = self._backend.graph_cache() if isinstance(self._backend, CachingGraphs) else None
        self._names = names
        self._label = _label(names)
        self._occasion = occasion(names.root)
        self._forward = ""

    def decompositions(self) -> Mapping[Any, Callable[..., Any]] | None:
        """Return what the back-end wants decomposed; nothing is where operations run one by one."""
        if self._operations is None and isinstance(self._backend, DecomposingGraphs):
            return self._backend.decompositions()
        return None

    def compile(self, kind: GraphKind, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> GraphFunction:
        """Compile one of the graphs."""
        tapped = take_taps(module, self._names, is_backward=kind == "backward")
        graph = captured(module, kind, self._names, tapped)
        if self._operations is not None:
            return _boxed(interpret(module, self._operations), tapped)
        name, why = f"{self._label}/{_number(kind)}", self._occasion
        if kind == "forward":
            self._forward = name
        elif kind == "backward":
            why = Occasion((("", Cause("backward", f"it is the backward graph of {self._forward}")),), why.compile_id)
        executable = compile_graph(
            name, graph, lambda: self._backend.compile_graph(module, example_inputs), self._cache, why
        )
        executable.backend = self._backend.name

        return _boxed(executable.run, tapped)


def _boxed(function: GraphFunction, tapped: tuple[str, ...]) -> GraphFunction:
    """Return what AOT autograd calls with a list that is emptied."""
    run = handing_on(function, tapped)

    def call(arguments: list[Any]) -> Any:
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def read_options(options: Mapping[str, Any] | None, mode: str | None) -> CompileOptions:
    """Return the options of a call of torch.compile.

    Raises:
        UnknownNameError: An option or a mode that there is not.
    """
    given = dict(options or {})
    if mode is not None:
        given.setdefault("mode", mode)
    known = tuple(CompileOptions.__dataclass_fields__)
    for name in given.keys() - known:
        raise UnknownNameError("option of torch.compile", name, known, hint='options={"backend": ..., "mode": ...}')
    chosen = CompileOptions(**given)
    if chosen.mode not in MODES:
        raise UnknownNameError("mode", str(chosen.mode), MODES, hint='options={"mode": "compile"}')
    return chosen


_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def _number(kind: GraphKind) -> str:
    """Return e.g. "forward-0.1": the first recompilation of the first frame; a third number for its further graphs."""
    context = CompileContext.try_get()
    text = str(context.compile_id).replace("/", ".") if context is not None else "x"
    again = next(_numbers[f"{kind}-{text}"])
    return f"{kind}-{text}" + (f".{again}" if again else "")


def _label(names: Names) -> str:
    """Return the class of the compiled module or the name of the function, with the line that a graph break ended."""
    context = TracingContext.try_get()
    code = context.traced_code[0] if context is not None and context.traced_code else None
    if code is not None and (resumed := RESUMED.match(code.co_name)):
        return f"{resumed[1]}:{resumed[2]}"
    # Forward methods are often wrapped, and then the code has the name of the wrapper.
    called = names.model or _called_module(names)
    if called is not None or code is None:
        return called or "graph"
    return code.co_qualname.rpartition("<locals>.")[2].removesuffix(".forward")


def _called_module(names: Names) -> str | None:
    """Return the class of the module whose call is being compiled; None where that is not a call of a module."""
    owned = [source.name for source in names.sources if source.kind in ("parameter", "buffer")]
    frame = sys._getframe()
    while owned and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            module = frame.f_locals["self"]
            tensors = {name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}
            return type(module).__name__ if tensors.issuperset(owned) else None
    return None


mark_taps_for(glass_backend)
