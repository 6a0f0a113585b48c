"""The back-end "glass" of torch.compile: every graph becomes an `Executable`, and taps in it results of the graph.

TorchDynamo captures Python code, AOT autograd makes inference, forward and backward graphs of it, at ATen level,
decomposed further only where the back-end asks for it.

While TorchDynamo traces `glass.tap` for the back-end "glass", it inserts the marking op that also names tensors during
an export. The mark is erased from the graph that is compiled, and what it marks becomes one more result. So a tap costs
a buffer in every run, and listening to it changes nothing of what is computed.
"""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule
from torch._guards import CompileContext, TracingContext
from torch.nn.parallel import DataParallel, DistributedDataParallel

from glassengine import environment, taps
from glassengine.backends.protocol.backend import CachingGraphs, DecomposingGraphs, GraphFunction
from glassengine.backends.registry import choose_graph_backend
from glassengine.capture.observed_call import has_compiled_call
from glassengine.errors import UnknownNameError, logger
from glassengine.executable.compilation import Occasion
from glassengine.executable.graph import GraphKind, mutated_placeholders
from glassengine.executable.run.executable import compile_graph
from glassengine.frontends.aot_graph import Names, captured, partition
from glassengine.frontends.causes import RESUMED, occasion
from glassengine.frontends.eager_debug import interpret, op_runner
from glassengine.program.user_code.tracing import MARK
from glassengine.results.backends import Cause


def mark_taps_for(backend: Callable[..., Any]) -> None:
    """Let Dynamo keep taps of what it traces for `backend`."""

    def mark(context: Any) -> None:
        translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        if _innermost(translator.output.compiler_fn) is not backend:
            return
        name, value = context.get_local("name"), context.get_local("value")
        if not (name.is_python_constant() and value.is_proxy() and issubclass(value.python_type(), torch.Tensor)):
            return
        if value.python_type() not in (torch.Tensor, torch.nn.Parameter):
            reason = f"it is a {value.python_type().__name__}, which consists of other tensors"
        elif _is_enclosed(translator.output.current_tracer):
            reason = "it is within a transformation or a branch"
        else:
            reason = ""
        if reason:
            logger.warning("tap %r is not seen: %s", name.as_python_constant(), reason)
            return
        arguments = (value.as_proxy(), f".{name.as_python_constant()}")
        translator.output.create_proxy("call_function", MARK, arguments, {})

    taps.set_compiler(mark)


def _is_enclosed(tracer: Any) -> bool:
    """Whether what is traced now is batched or differentiated, or not a part of the whole graph in the end."""
    while tracer.parent is not None:
        if tracer.source_target is not torch.ops.higher_order.tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return torch._C._functorch.peek_interpreter_stack() is not None


def _innermost(compiler: Any) -> Any:
    """Return the back-end that Dynamo's wrappers call: for debugging, for data-parallel modules, for options."""
    while True:
        for inner in (
            getattr(compiler, "_torchdynamo_orig_backend", None),
            getattr(getattr(compiler, "__self__", None), "backend_compile_fn", None),
            getattr(compiler, "compiler_fn", None),
        ):
            if inner is not None:
                compiler = inner
                break
        else:
            return compiler


def take_taps(module: torch.fx.GraphModule, names: Names, *, is_backward: bool) -> tuple[str, ...]:
    """Erase the marks of a graph, append what they mark to its results, and return the names of these.

    Args:
        module: A graph of AOT autograd, before its module paths are replaced by the user's.
        names: Of the Dynamo graph that it was made from.
        is_backward: Marks of a backward graph are copies of those of the forward graph: erased only.

    Returns:
        Names relative to the compiled module, with paths and calls: "layers.0.mlp.inter", "norm@1.out".
    """
    graph = module.graph
    marks = [node for node in graph.nodes if node.op == "call_function" and node.target is MARK]
    if not marks:
        return ()
    # Where inputs are written to in the end, what shares their memory must be copied before.
    writes = bool(mutated_placeholders(graph))
    marked: dict[str, torch.fx.Node] = {}
    for mark in marks:
        value, port = mark.args
        assert isinstance(value, torch.fx.Node)
        if not is_backward:
            marked[_name(mark, str(port), names)] = _copied(mark, value) if writes else value
        graph.erase_node(mark)
    if not is_backward:
        output = graph.output_node()
        results: Any = output.args[0]
        output.args = ((*results, *marked.values()),)
    module.recompile()
    return tuple(marked)


def handing_on(function: GraphFunction, tapped: tuple[str, ...]) -> GraphFunction:
    """Return `function` without its last results, the taps, which go to their listeners instead."""
    if not tapped:
        return function

    def run(arguments: list[Any]) -> Any:
        results = function(arguments)
        if taps.is_heard():
            path = _path_of_call()
            for name, value in zip(tapped, results[-len(tapped) :], strict=True):
                taps.deliver(f"{path}.{name}" if path else name, value)
        return results[: -len(tapped)]

    return run


def _path_of_call() -> str:
    """Return the path of the module that is being called, within the outermost one that was compiled.

    It is the same one, and the path empty, unless graph breaks made a graph of each inner module's call.
    """
    root: torch.nn.Module | None = None
    called: torch.nn.Module | None = None
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            module = frame.f_locals["self"]
            if isinstance(module, OptimizedModule):
                root = module._orig_mod
            else:
                called = module if called is None else called
        elif frame.f_code is torch.nn.Module._wrapped_call_impl.__code__:
            module = frame.f_locals["self"]
            root = module if has_compiled_call(module) else root
    if root is None or called is None:
        return ""
    if isinstance(root, (DataParallel, DistributedDataParallel)):
        root = root.module
    path = next((path for path, module in root.named_modules() if module is called), "")
    return path.replace("_orig_mod.", "")


def _copied(mark: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    with mark.graph.inserting_before(mark):
        copied = mark.graph.call_function(torch.ops.aten.clone.default, (value,))
    copied.meta = dict(mark.meta)
    return copied


def _name(mark: torch.fx.Node, port: str, names: Names) -> str:
    stack = mark.meta.get("nn_module_stack") or {}
    if not stack:
        return port.removeprefix(".")
    key, (path, _) = list(stack.items())[-1]
    call = str(key).partition("@")[2]  # of the module; Dynamo counts as site names do: the second is 1
    return f"{names.path(path)}{f'@{call}' if call else ''}{port}".removeprefix(".")


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
    for frame, _ in traceback.walk_stack(sys._getframe(1)) if owned else ():
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            module = frame.f_locals["self"]
            tensors = {name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}
            return type(module).__name__ if tensors.issuperset(owned) else None
    return None


mark_taps_for(glass_backend)
