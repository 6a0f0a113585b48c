"""Runs spread by torch and transformers: right ones are called right; what is wrong in others is named."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.pipelining")
pytestmark = pytest.mark.slow

from glassengine.compare import compare  # noqa: E402 (where there are no pipelines)
from glassengine.compare.roundings import ROUNDED  # noqa: E402 (likewise)
from tests.compare.ranks.end_to_end import torch_runs  # noqa: E402 (likewise)
from tests.compare.ranks.end_to_end.running import check, recorded  # noqa: E402 (likewise)
from tests.compare.ranks.end_to_end.torch_runs import ALL, RIGHT, UNSURE, WRONG  # noqa: E402 (likewise)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(torch_runs, tmp_path_factory.mktemp("runs"), [*RIGHT, *UNSURE, *WRONG])


@pytest.mark.parametrize("name", RIGHT)
def test_right_runs_are_right(name: str, runs: Path) -> None:
    check(runs, name, ALL[name])


@pytest.mark.parametrize("name", UNSURE)
def test_right_runs_in_half_precision_are_not_called_wrong(name: str, runs: Path) -> None:
    result = compare(runs / ALL[name].baseline, runs / name)
    assert (result.ok, result.too_little, result.verdict) == (False, True, "suspicious")
    assert {pair.reason for pair in result.pairs if pair.verdict == "suspicious"} == {ROUNDED}


@pytest.mark.parametrize("name", WRONG)
def test_planted_mistakes_are_named(name: str, runs: Path) -> None:
    check(runs, name, ALL[name])
