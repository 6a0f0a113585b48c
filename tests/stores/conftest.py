from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_in_memory() -> Iterator[None]:
    """Leave `memory://` as empty as it was."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
