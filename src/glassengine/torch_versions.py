"""Differences between the supported versions of torch, in one place.

Tested is the version of `constraints.txt`. Statements on older ones, from 2.11 on, come from their sources, and were
never run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any


def donated() -> dict[str, Any]:
    """Return the arguments that let Inductor compile a graph where it is; before torch 2.13 it takes a copy anyway."""
    import torch

    known = inspect.signature(torch._inductor.standalone_compile).parameters
    return {"donate_graph_module": True} if "donate_graph_module" in known else {}


def enlarge_caches() -> None:
    """Let Inductor remember how the index of a kernel moves: its caches of 128 answers do not hold those of a model.

    To work one out again takes milliseconds: a quarter of the time of an engine with debug outputs.
    """
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    for name in ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range"):
        known: Any = getattr(sizevars, name, None)
        if hasattr(known, "cache_parameters") and known.cache_parameters()["maxsize"] == 128:
            remembered = functools.lru_cache(1 << 14)(known.__wrapped__)
            for module in (sizevars, cpp):
                if getattr(module, name, None) is known:
                    setattr(module, name, remembered)


@contextlib.contextmanager
def tracing_real_tensors() -> Iterator[None]:
    """Let all nodes that `make_fx` traces with real tensors have values of one fake mode while the block runs.

    By itself torch makes a mode for each node, which walks the whole stack: a quarter of the time of a trace.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` be true while the block runs.

    torch 2.13 has a private context manager for that, older ones the flag behind it alone.
    """
    import torch.compiler

    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
