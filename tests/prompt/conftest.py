"""A tokenizer that is trained once for all tests of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prompt.planted import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A directory with a tokenizer of byte pairs, its configuration, a chat template and generation settings."""
    return train(tmp_path_factory.mktemp("prompt") / "trained", root)
