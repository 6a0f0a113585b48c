"""Models of the ladder's tests, and a file of token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


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
