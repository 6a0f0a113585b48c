"""Runs whose processes exchange parts: right ones are called right; what is wrong in others is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compare.ranks.end_to_end import exchanged_runs
from tests.compare.ranks.end_to_end.exchanged_runs import ALL, RIGHT, WRONG
from tests.compare.ranks.end_to_end.running import check, recorded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(exchanged_runs, tmp_path_factory.mktemp("runs"), ALL)


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_right_runs_are_right_and_mistakes_are_named(name: str, runs: Path) -> None:
    check(runs, name, ALL[name])
