"""A tiny checkpoint and the engines that the tests share; only the eager back-end is built per test."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.engine import Engine
from glassengine.engine.manifest import FILE
from glassengine.program import Program, export_program, load_model
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, save_checkpoint

ExportingOnce = Callable[[], AbstractContextManager[None]]
OUTPUTS = ("model.layers.*.mlp", "mm_default", "lm_head/linear.0=head")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.proj = nn.Linear(16, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inter = torch.relu(self.fc(hidden_states))
        glass.tap("inter", inter)
        return self.proj(inter)


INPUTS = [{"hidden_states": torch.randn(size, 8, generator=torch.Generator().manual_seed(1))} for size in (2, 3)]


@pytest.fixture(scope="session")
def model() -> Any:
    return models.llama(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(model, tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def program(checkpoint: Path, exporting_once: ExportingOnce) -> Program:
    """Return the exported program: most tests build from it, which takes no time with the eager back-end."""
    with exporting_once():
        return export_program(load_model(checkpoint))


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, exporting_once: ExportingOnce) -> Engine:
    """Return an engine of the eager back-end; do not change its directory."""
    directory = tmp_path_factory.mktemp("eager") / "tiny"
    with exporting_once():
        return glass.build(checkpoint, directory, backend="eager", add_output=OUTPUTS)


def _compiled_once(name: str, base: Path, build: Callable[[Path], Engine]) -> Engine:
    """Return an engine that one worker compiles for all; `base` is this worker's folder."""
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = shared / "inductor" / name
    with (shared / f"inductor-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return glass.load(directory) if directory.is_dir() else build(directory)


@pytest.fixture(scope="session")
def inductor_engine(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, exporting_once: ExportingOnce
) -> Engine:
    """Return an engine of the default back-end; do not change its directory."""

    def build(directory: Path) -> Engine:
        with exporting_once():
            return glass.build(checkpoint, directory, backend="inductor", add_output=OUTPUTS)

    return _compiled_once("tiny", tmp_path_factory.getbasetemp(), build)


@pytest.fixture(scope="session")
def native_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return a small engine of the default back-end, with artifacts beside it; do not change its directory."""

    def build(directory: Path) -> Engine:
        torch.manual_seed(0)
        artifacts = directory.with_name("artifacts")
        return glass.build(MLP(), directory, backend="inductor", inputs=INPUTS, artifacts=artifacts)

    return _compiled_once("small", tmp_path_factory.getbasetemp(), build)


@pytest.fixture(scope="session")
def frozen_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, exporting_once: ExportingOnce) -> Engine:
    """Return an engine whose back-end keeps the weights in its own files; do not change its directory."""
    with exporting_once():
        return glass.build(checkpoint, tmp_path_factory.mktemp("frozen") / "tiny", backend="onnxruntime")


@pytest.fixture
def copy(engine: Engine, tmp_path: Path) -> Path:
    """Return a copy of the eager engine's directory, to damage."""
    return Path(shutil.copytree(engine.directory, tmp_path / "copy"))


@pytest.fixture
def forge() -> Callable[..., None]:
    """Return a function that changes entries of a manifest and leaves its checksum as it was."""

    def change(directory: Path, **entries: Any) -> None:
        path = directory / FILE
        data = json.loads(path.read_text())
        assert entries.keys() <= data.keys()
        path.write_text(json.dumps({**data, **entries}))

    return change
