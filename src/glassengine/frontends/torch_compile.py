"""The back-end "glass" of torch.compile: every graph that it captures becomes an `Executable`.

TorchDynamo captures Python code, AOT autograd makes inference, forward and backward graphs of it, at ATen level and not
decomposed further, so that the graphs and their hashes are the same whatever compiles them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext

from glassengine import environment
from glassengine.backends.protocol import CachingGraphs, GraphFunction
from glassengine.backends.registry import choose_graph_backend
from glassengine.errors import UnknownNameError
from glassengine.executable.cache import CompilerCache
from glassengine.executable.executable import compile_graph
from glassengine.executable.graph import CapturedGraph, GraphKind
from glassengine.frontends.aot_graph import Names, captured
from glassengine.frontends.eager_debug import interpret
from glassengine.frontends.eager_ops import OpRunner

MODES = ("compile", "eager_debug")


@dataclass(frozen=True)
class Options:
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
    chosen = read_options(options, mode)
    backend = choose_graph_backend(chosen.backend)
    operations = OpRunner(backend) if chosen.mode == "eager_debug" else None
    cache = backend.graph_cache() if isinstance(backend, CachingGraphs) else None
    names = Names(module.graph)
    label = _label(names)

    def compiler(kind: GraphKind) -> Callable[[torch.fx.GraphModule, Sequence[Any]], GraphFunction]:
        def compile_one(traced: torch.fx.GraphModule, inputs: Sequence[Any]) -> GraphFunction:
            graph = captured(traced, kind, names)
            if operations is not None:
                return interpret(traced, operations)
            return _boxed(graph, f"{label}/{_number(kind)}", lambda: backend.compile_graph(traced, inputs), cache)

        return compile_one

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(module, example_inputs)


def _boxed(
    graph: CapturedGraph, name: str, compiler: Callable[[], GraphFunction], cache: CompilerCache | None
) -> GraphFunction:
    run = compile_graph(name, graph, compiler, cache).run

    def call(arguments: list[Any]) -> Any:
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def read_options(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Return the options of a call of torch.compile.

    Raises:
        UnknownNameError: An option or a mode that there is not.
    """
    given = dict(options or {})
    if mode is not None:
        given.setdefault("mode", mode)
    known = tuple(Options.__dataclass_fields__)
    for name in given.keys() - known:
        raise UnknownNameError("option of torch.compile", name, known, hint='options={"backend": ..., "mode": ...}')
    chosen = Options(**given)
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
    """Return the class of the compiled module, or the name of the compiled function."""
    if names.model is not None:
        return names.model
    context = TracingContext.try_get()
    code = context.traced_code[0] if context is not None and context.traced_code else None
    return code.co_qualname.rpartition("<locals>.")[2].removesuffix(".forward") if code is not None else "graph"
