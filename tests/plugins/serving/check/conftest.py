"""Most of what these tests cost is the export of equal models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest


@pytest.fixture(autouse=True, scope="module")
def _export_once(exporting_once: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with exporting_once():
        yield
