"""Traces that hold for the given inputs: of code that reads values, which an exporter does not have.

A branch on a tensor, a loop as long as a tensor says, rows that a mask picks: with real values beside the symbolic ones
the exporter goes the way that these inputs go. What it cannot follow at all (gradients inside of a forward, arrays of
NumPy) is run once, and the ops of torch are written down.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.jit._fuser import optimized_execution
from torch.utils import _pytree as pytree

from glassengine.torch_versions import tracing_real_tensors

SPECIALIZED = "specialized"
"""Key of the metadata: how a program was traced that holds for the inputs of one step."""
WITH_VALUES = "exported with the values of its inputs"
WRITTEN_DOWN = "run once, and its ops written down"

_ASSERTIONS = frozenset({"_assert_scalar", "_assert_async", "_assert_tensor_metadata"})


@contextlib.contextmanager
def real_values() -> Iterator[None]:
    """Let what is exported in the block see the values of its inputs."""
    import torch._functorch.config as config
    import torch.fx.experimental._config as symbols

    noisy = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch._export")]
    were = [logger.disabled for logger in noisy]
    options: dict[str, Any] = {
        "fake_tensor_propagate_real_tensors": True,
        "generate_fake_kernels_from_real_mismatches": True,
    }
    try:
        for logger in noisy:
            logger.disabled = True
        # Rows that a mask picks make a symbol for their number, which is known here and in no result.
        known = symbols.patch(soft_pending_unbacked_not_found_error=True)
        with config.patch(options), known, _numbers_as_they_are(), _no_tensor_where_none_is(), _as_uncompiled():
            yield
    finally:
        for logger, was in zip(noisy, were, strict=True):
            logger.disabled = was


@contextlib.contextmanager
def _numbers_as_they_are() -> Iterator[None]:
    """Let `tensor.item()` be the number that it is: one by a symbol goes on into shapes, of which nothing is known."""
    item = torch.ops.aten._local_scalar_dense.default
    own = op_implementations_dict[item]

    def number(mode: Any, func: Any, arg: Any) -> Any:
        return own(mode, func, arg) if arg.real_tensor is None else arg.real_tensor.item()

    op_implementations_dict[item] = number
    try:
        yield
    finally:
        op_implementations_dict[item] = own


@contextlib.contextmanager
def _as_uncompiled() -> Iterator[None]:
    """Let code that is not torch's take the branch that it takes when it is run: what is run is judged."""
    own = torch.compiler.is_compiling

    def is_compiling() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        return asking.partition(".")[0] == "torch" and own()

    torch.compiler.is_compiling = is_compiling
    try:
        yield
    finally:
        torch.compiler.is_compiling = own


@contextlib.contextmanager
def _no_tensor_where_none_is() -> Iterator[None]:
    """Let an op that has fewer results than its fake (the workspace of a recurrence) have as many as it has."""
    own = FakeTensorMode._maybe_infer_fake

    def inferred(self: Any, func: Any, path: Any, fake: Any, real: Any) -> tuple[Any, bool]:
        return (None, fake is not None) if real is None else own(self, func, path, fake, real)

    FakeTensorMode._maybe_infer_fake = inferred  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode._maybe_infer_fake = own  # type: ignore[method-assign]


def without_assertions(exported: ExportedProgram) -> ExportedProgram:
    """Erase what a graph asserts of values, and what only that needs or numbers that are known: it is run on these."""
    graph = exported.graph
    read: set[torch.fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "_opname", "")
        is_number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        is_needless = name in _ASSERTIONS or is_number or name == "_local_scalar_dense" or node in read
        if node.op == "call_function" and not node.users and is_needless:
            read.update(node.all_input_nodes)
            graph.erase_node(node)
    exported.graph_module.recompile()
    return exported


def written_down(module: nn.Module, inputs: Mapping[str, Any]) -> nn.Module:
    """Run a module once and return one with the same weights, under the same names, that repeats the ops of that run.

    Args:
        module: In evaluation mode.
        inputs: Keyword arguments.
    """
    scripted = [
        f"{path}." * bool(path) for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)
    ]
    weights = {name: tensor for name, tensor in _weights(module).items() if not name.startswith(tuple(scripted))}
    leaves, spec = pytree.tree_flatten(dict(inputs))

    def run(given: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        fresh = iter(tensors)
        filled = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        arguments = pytree.tree_unflatten(filled, spec)
        results = torch.func.functional_call(module, given, (), arguments) if given else module(**arguments)
        return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else None, results)

    trace = make_fx(run, tracing_mode="real", _error_on_data_dependent_ops=False)
    with tracing_real_tensors(), optimized_execution(False):
        graph_module = trace(weights, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return _Repeated(module, graph_module, tuple(weights))


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class _Repeated(nn.Module):
    """Repeats a graph; weights that TorchScript holds are constants of the graph, which stand for those of a name."""

    def __init__(self, module: nn.Module, graph_module: Any, names: Sequence[str]) -> None:
        super().__init__()
        self._graph = (graph_module,)  # no submodule: its ops are those of the root
        self._names = names
        known = {id(tensor): name for name, tensor in _weights(module).items()}
        targets = {node.target for node in graph_module.graph.find_nodes(op="get_attr")}
        constants = {target: known.get(id(getattr(graph_module, target))) for target in targets}
        self._constants = {target: name for target, name in constants.items() if name is not None}
        for target in self._constants:
            delattr(graph_module, target)
        for name, tensor in _weights(module).items():
            part: Any = self
            *path, last = name.split(".")
            for step in path:
                if step not in part._modules:
                    part.add_module(step, nn.Module())
                part = part._modules[step]
            if isinstance(tensor, nn.Parameter):
                part.register_parameter(last, tensor)
            else:
                part.register_buffer(last, tensor)

    def forward(self, **inputs: Any) -> Any:
        weights = {name: self._weight(name) for name in self._names}
        for target, name in self._constants.items():
            self._graph[0].__dict__[target] = self._weight(name)
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        return self._graph[0](weights, tensors)

    def _weight(self, name: str) -> Any:
        path, _, last = name.rpartition(".")
        return getattr(self.get_submodule(path), last)
