"""The guide pages of engines that live in an environment of their own: every block runs, as in tests/docs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.conftest import run_guide as run_guide
from tests.docs.test_guides import ELSEWHERE

PYTHON = os.environ.get("GLASS_SERVING_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="make test-serving installs the engines, and names their interpreter"
)


@pytest.mark.parametrize("page", ELSEWHERE)
def test_every_block_runs_and_prints_what_is_shown(
    page: str, root: Path, tmp_path: Path, run_guide: Callable[[Path], list[str]]
) -> None:
    (tmp_path / "VENV").symlink_to(Path(PYTHON).parents[1])
    problems = run_guide(root / "docs" / "guide" / page)
    assert not problems, "\n".join(problems)
