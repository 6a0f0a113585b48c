"""Settings shared by the whole suite: offline, one thread a worker, one compiler cache, no colours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports torch or transformers: these are read at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two workers on two cores: a second thread in each would only spin (measured: five times slower).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of OpenMP that spin while they wait make torch many times slower as soon as anything else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
# The surroundings of the person who runs the suite must not change what commands print.
for _name in ("NO_COLOR", "FORCE_COLOR", "CI"):
    os.environ.pop(_name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-guides", action="store_true", help="write what the blocks of the guides print into them")


@pytest.fixture(autouse=True)
def _threads() -> None:
    """Keep torch's number of threads, without importing it for tests that do not use it."""
    torch = sys.modules.get("torch")
    wanted = int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return ROOT
