"""Models of the ladder's tests, and a file of token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from glassengine.diagnose import climb
from glassengine.program import LoadedModel, Program, export_program
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


_CLEAN: dict[str, nn.Module] = {}
_EXPORTED: dict[tuple[int, str], Program] = {}


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The clean baseline of all tests: one object, exported once per dtype."""
    clean = _CLEAN.setdefault("llama", models.llama())

    def export_once(model: LoadedModel, **options: object) -> Program:
        if model.module is not clean:
            return export_program(model, **options)  # type: ignore[arg-type]
        key = (id(clean), model.dtype)
        if key not in _EXPORTED:
            _EXPORTED[key] = export_program(model)
        return _EXPORTED[key]

    monkeypatch.setattr(climb, "export_program", export_once)
    return clean
