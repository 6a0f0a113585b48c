"""Marks that a trace keeps: names of modules, lines of helpers, and the ops that lead to results.

While a model is traced, hooks on every module and the tap sink call `glass::mark(tensor, port)`. The op is registered
as side-effecting, or dead-code elimination would drop it silently; it never feeds anything. After functionalisation
the graph is in SSA form: `collect_marks` reads which node each mark points at and erases it. The path and call index of
a mark come from its own `nn_module_stack`, because hooks run inside the call of their module.

Of the frames that made an op, `torch.export` keeps those of functions called `forward`. A model that is written with
methods and functions has one line there for all of them, so the frames that the innermost `forward` called are kept
too, as far as they are of its folder: what a library makes of a call is not where the user wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import Graph
from torch.fx.proxy import TracerBase

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


NOT_THE_USERS = ("/glassengine/program/", "/torch/")
_INSTALLED = ("/glassengine/", "/site-packages/", "/dist-packages/", "/lib/python", "<")


def is_users(file: str) -> bool:
    """Whether a frame of `file` is the user's: neither torch's nor that of an export."""
    return not any(part in file for part in NOT_THE_USERS)


def with_helpers(kept: traceback.StackSummary, frames: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames `kept` of `frames`, outermost first, with the helpers of the innermost `forward`."""
    places = [place for place, frame in enumerate(frames) if frame.name == "forward" and is_users(frame.filename)]
    if not places:
        return kept
    forward, called = frames[places[-1]], frames[places[-1] + 1 :]
    helpers = [frame for frame in called if _is_helper(frame.filename, forward.filename)]
    return traceback.StackSummary.from_list([*kept, *helpers])


def _is_helper(file: str, forward: str) -> bool:
    """Whether a frame that a `forward` calls is of the same author: of its folder, or of no installed package."""
    return _folder(file) == _folder(forward) or not any(part in file for part in _INSTALLED)


@functools.lru_cache(maxsize=4096)
def _folder(file: str) -> Path:
    return Path(file).parent


def helper_lines() -> contextlib.AbstractContextManager[Any]:
    """Let what is traced in the block keep the lines of helpers."""
    # One step of export takes that from its tracer alone, without an option.
    own = TracerBase._filter_traceback_frames

    def kept(self: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        return with_helpers(own(self, frames), frames)

    return mock.patch.object(TracerBase, "_filter_traceback_frames", kept)


def remove_dead_nodes(graph: Graph, marks: Iterable[Mark]) -> list[Mark]:
    """Erase what no result depends on, and return the marks of what is left.

    Args:
        graph: Functional and free of marks.
        marks: What the erased marks named.
    """
    for node in reversed(list(graph.nodes)):
        # Inputs are part of the signature. Assertions have no result, so that all that they read would stay.
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    left = set(graph.nodes)
    return [mark for mark in marks if mark.node in left]
