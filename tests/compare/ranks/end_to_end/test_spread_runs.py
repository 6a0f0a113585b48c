"""Right runs of several processes are called right; what is wrong in others is named: op, rank and kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.compare import compare
from tests.compare.ranks.end_to_end import spread_runs
from tests.compare.ranks.end_to_end.running import check, recorded
from tests.compare.ranks.end_to_end.spread_runs import ALL, PAIRS, RIGHT, WRONG

pytest.importorskip("torch.distributed.tensor")

QUICK_RIGHT = ("tp2", "dp2-train", "cp2zigzag")
QUICK_WRONG = ("double all-reduce", "stale replica", "gradients added up", "a layer left out by a data rank")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(spread_runs, tmp_path_factory.mktemp("few"), (*QUICK_RIGHT, *QUICK_WRONG))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(spread_runs, tmp_path_factory.mktemp("many"), [*RIGHT, *WRONG])


@pytest.mark.parametrize("name", [*QUICK_RIGHT, *QUICK_WRONG])
def test_some_runs_of_two_processes(name: str, few: Path) -> None:
    check(few, name, ALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_runs_are_right(name: str, many: Path) -> None:
    check(many, name, ALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_planted_mistakes_are_named(name: str, many: Path) -> None:
    check(many, name, ALL[name])


def check_pair(path: Path, name: str) -> None:
    """Judge a run of one layout against the same one in another layout."""
    result = compare(*(path / side for side in name.split("|")))
    found = result.first_divergence
    if PAIRS[name] is None:
        assert (result.ok, result.coverage, found) == (True, 1.0, None)
    else:
        assert found is not None and (found.site, found.rank) == PAIRS[name]


def test_some_layouts_against_others(few: Path) -> None:
    result = compare(few / "tp2", few / "cp2zigzag")
    assert (result.ok, result.coverage) == (True, 1.0)
    found = compare(few / "cp2zigzag", few / "double all-reduce").first_divergence
    assert found is not None and (found.site, found.hints[0].evidence) == ("layers.0.attn.o_proj", "reduction")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_layouts_against_layouts(name: str, many: Path) -> None:
    check_pair(many, name)
