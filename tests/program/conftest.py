"""Programs of the tiny models, exported once per worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from torch import nn

from glassengine.program import generation
from glassengine.program.representation.program import Program
from glassengine.testing import models
from glassengine.testing.checkpoints import save_checkpoint

ExportingOnce = Callable[[], AbstractContextManager[None]]

_made: dict[str, tuple[nn.Module, Program]] = {}


@pytest.fixture(scope="session")
def exported(exporting_once: ExportingOnce) -> Callable[[str], tuple[nn.Module, Program]]:
    """Return a function: name of a tiny causal LM -> (the untouched model, its program)."""

    def make(name: str) -> tuple[nn.Module, Program]:
        if name not in _made:
            model = models.CAUSAL_LMS[name]()
            with exporting_once():
                _made[name] = model, generation.export_causal_lm(model)
        return _made[name]

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: name of a tiny causal LM -> directory of its checkpoint, without a tokenizer."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            directory = tmp_path_factory.mktemp("checkpoint") / name
            made[name] = save_checkpoint(models.CAUSAL_LMS[name](), directory, tokenizer=False)
        return made[name]

    return make
