"""Models of the ladder's tests, and a file of token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from torch import nn

from glassengine.testing import models


@pytest.fixture(scope="session")
def token_ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two left-padded rows of different prompts, and one row alone."""
    path: Path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(
        json.dumps(
            {
                "input_ids": [[0, 0, 0, 17, 200, 9, 33, 41], [5, 91, 14, 3, 77, 120, 250, 8]],
                "attention_mask": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8],
            }
        )
    )
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def _export_once(exporting_once: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Most of what these tests cost is the export of equal models."""
    with exporting_once():
        yield


@pytest.fixture(scope="session")
def llama() -> nn.Module:
    """Return the clean baseline of all tests."""
    return models.llama()
