"""A tokenizer that is trained once for all tests of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine import starting
from tests import children
from tests.prompt.planted import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A directory with a tokenizer of byte pairs, its configuration, a chat template and generation settings."""
    return train(tmp_path_factory.mktemp("prompt") / "trained", root)


@pytest.fixture(autouse=True)
def _with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes as copies of one that has imported transformers."""
    monkeypatch.setattr(starting, "subprocess", children.started_as_copies(children.MODELS))
