"""Taps within compiled code: each is a result of the compiled graph, handed on after every run.

While TorchDynamo traces `glass.tap` for the back-end "glass", it inserts the marking op that also names tensors during
an export. The mark is erased from the graph that is compiled, and what it marks becomes one more result. So a tap costs
a buffer in every run, and listening to it changes nothing of what is computed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from glassengine import taps
from glassengine.backends.protocol.backend import GraphFunction
from glassengine.capture.calls.observed_call import has_compiled_call
from glassengine.executable.graph.graph import mutated_placeholders
from glassengine.frontends.aot_graph import Names
from glassengine.program.user_code.marks import MARK

logger = logging.getLogger("glassengine")


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
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
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
