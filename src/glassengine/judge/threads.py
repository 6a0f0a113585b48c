"""How many threads a model is judged on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SMALL_BYTES = 64 << 20
"""Weights up to this size make a small model."""


@contextmanager
def threads_for(module: nn.Module) -> Iterator[None]:
    """Judge small models on one thread: their short ops would wait for a second one longer than they run."""
    before = torch.get_num_threads()
    if sum(parameter.nbytes for parameter in module.parameters()) <= SMALL_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
