"""Lazy tensors on the back-end that computes as eager code does, with nothing left of the test before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import glassengine as glass
from glassengine.plugins.lazy.settings import settings


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """The lazy device."""
    settings.graphs.clear()
    glass.metrics.reset()
    with glass.lazy.mode(backend="eager") as device:
        yield device


@pytest.fixture
def counters() -> object:
    """Returns a counter of this test by its name."""
    return lambda name: glass.metrics.current().counters.get(name, 0)
