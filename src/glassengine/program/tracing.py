"""What makes a trace fast: no garbage collections, and no cache of fake tensors where sizes are symbolic.

A trace allocates millions of small objects and frees few, so that the collector walks them again and again. The cache
of fake tensors proves for each result that its strides are those of an earlier one; with symbolic sizes that proof
costs more than to compute the result again (a decoder of eight layers: 3.7 s in place of 5.0), with fixed sizes less.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


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

    Args:
        dynamic: The dynamic dimensions, in the form that `torch.export.export` takes.
    """
    import torch._dynamo.config as config  # torch.export needs it, too, and it takes long to import

    is_symbolic = any(leaf is not None for leaf in pytree.tree_leaves(dynamic))
    caching = config.fake_tensor_cache_enabled and not is_symbolic
    with without_collections(), torch._dynamo.config.patch(fake_tensor_cache_enabled=caching):
        yield
