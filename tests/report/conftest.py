"""One comparison of a model with a port that has another activation, in files of a repository."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.results import Comparison

REFERENCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))

def net():
    return Net().eval()
"""
GUILTY = "hidden = nn.functional.gelu(self.up(x))"
PORT = REFERENCE.replace("Net", "Port").replace(
    "return self.down(nn.functional.silu(self.up(x)))", f"{GUILTY}\n        return self.down(hidden)"
)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with .git, ref.py, models/port.py and x.pt; do not change it."""
    root = tmp_path_factory.mktemp("repository")
    (root / ".git").mkdir()
    (root / "models").mkdir()
    (root / "ref.py").write_text(textwrap.dedent(REFERENCE))
    (root / "models/port.py").write_text(textwrap.dedent(PORT))
    torch.save({"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(1))}, root / "x.pt")
    return root


@pytest.fixture
def here(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(repository)
    return repository


@pytest.fixture(scope="session")
def wrong(repository: Path) -> Comparison:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        return glass.check("ref.py:net", candidate="models/port.py:net", inputs="x.pt")
