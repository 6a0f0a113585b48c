"""Right runs of several processes are called right; what is wrong in others is named: op, rank and kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from glassengine.compare import compare
from tests import children
from tests.compare.ranks.end_to_end.spread_runs import ALL, PAIRS, RIGHT, WRONG

pytest.importorskip("torch.distributed.tensor")

MODULE = "tests.compare.ranks.end_to_end.spread_runs"
QUICK_RIGHT = ("tp2", "dp2-train", "cp2zigzag")
QUICK_WRONG = ("double all-reduce", "stale replica", "gradients added up", "a layer left out by a data rank")


def recorded(path: Path, names: Iterable[str]) -> Path:
    """Make all runs of a number of processes at once."""
    names = {*names, *(ALL[name].baseline for name in names)} - {""}
    root = Path(__file__).resolve().parents[4]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    for world in sorted({ALL[name].world for name in names}):
        words = ["-m", MODULE, str(path), str(path / f"store{world}")]
        running = [
            children.Popen(
                [sys.executable, *words, str(rank), str(world), *names],
                env=env, stderr=subprocess.PIPE, text=True, imports=children.COMPILING,
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            errors = [process.communicate(timeout=600)[1] for process in running]
        finally:
            for process in running:
                process.kill()
        assert not any(process.returncode for process in running), "\n".join(errors)
    return path


def check(path: Path, name: str) -> None:
    """Judge a run against its baseline."""
    of = ALL[name]
    result = compare(path / of.baseline, path / name)
    found = result.first_divergence
    if of.site is None:
        assert (result.ok, result.coverage, found) == (True, 1.0, None)
        assert result.counts["unmatched_candidate"] == 0
        return
    assert found is not None and not result.ok
    assert (found.site, found.rank) == (of.site, of.blamed)
    assert of.hint is None or found.hints[0].kind == of.hint


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("few"), (*QUICK_RIGHT, *QUICK_WRONG))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("many"), [*RIGHT, *WRONG])


@pytest.mark.parametrize("name", [*QUICK_RIGHT, *QUICK_WRONG])
def test_some_runs_of_two_processes(name: str, few: Path) -> None:
    check(few, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_runs_are_right(name: str, many: Path) -> None:
    check(many, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_planted_mistakes_are_named(name: str, many: Path) -> None:
    check(many, name)


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
    assert found is not None and (found.site, found.hints[0].kind) == ("layers.0.attn.o_proj", "reduction")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_layouts_against_layouts(name: str, many: Path) -> None:
    check_pair(many, name)
