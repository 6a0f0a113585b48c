"""Marks: how names survive an export.

While a model is traced, hooks on every module and the tap sink call `glass::mark(tensor, port)`. The op is registered
as side-effecting, or dead-code elimination would drop it silently; it never feeds anything. After functionalisation
the graph is in SSA form: `collect_marks` reads which node each mark points at and erases it. The path and call index of
a mark come from its own `nn_module_stack`, because hooks run inside the call of their module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from glassengine.sites import port_leaves
from glassengine.taps import tap_sink

_LIBRARY = torch.library.Library("glass", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("mark(Tensor x, str port) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl("mark", lambda x, port: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
# Without a result there is nothing to infer, to wrap or to differentiate.
MARK = torch.ops.glass.mark.default
torch.fx.node.has_side_effect(MARK)


@dataclass(frozen=True)
class Mark:
    """One erased mark: `node` holds the value of `port` (":out[0]", ":in.x", ".tap") of the module of `stack`."""

    node: torch.fx.Node
    port: str
    stack: dict[str, tuple[str, Any]]


@contextlib.contextmanager
def marking(module: nn.Module) -> Iterator[None]:
    """Insert marks for the inputs and outputs of every submodule of `module`, and for taps, while it is traced."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        for port, tensor in (*port_leaves(":in", args), *port_leaves(":in", kwargs)):
            MARK(tensor, port)

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        for port, tensor in port_leaves(":out", result):
            MARK(tensor, port)

    handles = []
    try:
        for submodule in module.modules():
            handles.append(submodule.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(submodule.register_forward_hook(after, with_kwargs=True))
        with tap_sink(lambda name, tensor: MARK(tensor, f".{name}")):
            yield
    finally:
        for handle in handles:
            handle.remove()


def collect_marks(graph: torch.fx.Graph) -> list[Mark]:
    """Erase every mark of a functional graph and return what they named, in graph order."""
    found = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is MARK:
            source, port = node.args
            found.append(Mark(source, port, node.meta.get("nn_module_stack", {})))
            graph.erase_node(node)  # nothing uses it
    return found
