"""What makes a trace fast: no garbage collections, and no cache of fake tensors where sizes are symbolic.

A trace allocates millions of small objects and frees few, so that the collector walks them again and again. The cache
of fake tensors proves for each result that its strides are those of an earlier one; with symbolic sizes that proof
costs more than to compute the result again (a decoder of eight layers: 3.7 s in place of 5.0), with fixed sizes less.

It looks up the lines of a hundred frames for each op, which are the same few thousand: a sixth of its time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
import types
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree
from torch.utils import _traceback


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from running, where it was on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def fast_tracing(dynamic: Any) -> Iterator[None]:
    """Trace and decompose without collections, and without the cache of fake tensors where sizes are symbolic.

    Each pass of torch leaves a graph: only those that are called get code, 4 of 27.

    Args:
        dynamic: The dynamic dimensions, in the form that `torch.export.export` takes.
    """
    import torch._dynamo.config as config  # torch.export needs it, too, and it takes long to import

    is_symbolic = any(leaf is not None for leaf in pytree.tree_leaves(dynamic))
    caching = config.fake_tensor_cache_enabled and not is_symbolic
    patched = torch._dynamo.config.patch(fake_tensor_cache_enabled=caching)
    with without_collections(), patched, _frames_once(), _use_lazy_graph_module(True):
        yield


@contextlib.contextmanager
def _frames_once() -> Iterator[None]:
    """Look up the line of each frame once."""
    frame = functools.lru_cache(maxsize=None)(traceback.FrameSummary)

    def extracted(symbolized: Any, skip: int) -> traceback.StackSummary:
        found = traceback.StackSummary()
        found.extend(frame(f["filename"], f["line"], f["name"]) for f in reversed(symbolized[skip:]))
        return found

    with mock.patch.object(_traceback, "_extract_symbolized_tb", extracted):
        yield


@contextlib.contextmanager
def fast_reading() -> Iterator[None]:
    """Read stored programs without collections; each expression of sizes and each type of the format is read once."""
    from torch._export.serde import serialize

    parse: Any = serialize.GraphModuleDeserializer._parse_sym_expr
    parsed: dict[Any, Any] = {}  # holds the readers, too, so that no two of them have one identity

    def parse_once(self: Any, text: str, hint: Any = None) -> Any:
        key = (id(self), text, type(hint), hint)
        if key not in parsed:
            parsed[key] = self, parse(self, text, hint)
        return parsed[key][1]

    hints = functools.lru_cache(maxsize=None)(lambda cls: typing.get_type_hints(cls, vars(vars(serialize)["schema"])))
    own = types.SimpleNamespace(**vars(typing))
    own.get_type_hints = lambda cls, globalns=None: hints(cls)
    with (
        without_collections(),
        mock.patch.object(serialize.GraphModuleDeserializer, "_parse_sym_expr", parse_once),
        mock.patch.object(serialize, "typing", own),
    ):
        yield


@contextlib.contextmanager
def fast_writing() -> Iterator[None]:
    """Store programs without collections, and without torch's trial of a canonical form, which it makes and drops.

    That trial copies the whole description of a graph: a third of the time of `torch.export.save`.
    """
    from torch._export.serde import serialize

    with without_collections(), mock.patch.object(serialize, "canonicalize", lambda *given: None):
        yield
