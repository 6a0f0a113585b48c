"""Runs spread by torch and transformers: right ones are called right; what is wrong in others is named."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.pipelining")
pytestmark = pytest.mark.slow

from tests.compare.ranks.end_to_end import torch_runs  # noqa: E402 (where there are no pipelines)
from tests.compare.ranks.end_to_end.running import check, recorded  # noqa: E402 (likewise)
from tests.compare.ranks.end_to_end.torch_runs import ALL, RIGHT, WRONG  # noqa: E402 (likewise)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(torch_runs, tmp_path_factory.mktemp("runs"), [*RIGHT, *WRONG])


@pytest.mark.parametrize("name", RIGHT)
def test_right_runs_are_right(name: str, runs: Path) -> None:
    check(runs, name, ALL[name])


@pytest.mark.parametrize("name", WRONG)
def test_planted_mistakes_are_named(name: str, runs: Path) -> None:
    check(runs, name, ALL[name])
