"""A tiny checkpoint and one engine that the commands share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, save_checkpoint

ExportingOnce = Callable[[], AbstractContextManager[None]]
OUTPUTS = ("layers.*.mlp", "mm_default")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = models.llama(vocab_size=VOCAB_SIZE)
    return save_checkpoint(model, tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def engine_directory(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, exporting_once: ExportingOnce) -> Path:
    """Return an engine of the eager back-end; do not change it."""
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    with exporting_once():
        return glass.build(checkpoint, directory, backend="eager", add_output=OUTPUTS).directory
