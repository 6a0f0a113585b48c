"""Makes runs of several processes, and judges them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from glassengine.compare import compare
from tests import children
from tests.compare.ranks.end_to_end.spread_runs import Run


def recorded(module: ModuleType, path: Path, names: Iterable[str]) -> Path:
    """Make all runs of a number of processes at once."""
    runs: dict[str, Run] = module.ALL
    names = {*names, *(runs[name].baseline for name in names)} - {""}
    root = Path(__file__).resolve().parents[4]
    places = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    for world in sorted({runs[name].world for name in names}):
        words = ["-m", module.__name__, str(path), str(path / f"store{world}")]
        commands = ([*words, str(rank), str(world), *names] for rank in range(world))
        options = {"env": {**os.environ, "PYTHONPATH": places}, "imports": children.COMPILING}
        children.run_ranks(commands, timeout=600, **options)
    return path


def check(path: Path, name: str, of: Run) -> None:
    """Judge a run against its baseline."""
    result = compare(path / of.baseline, path / name)
    found = result.first_divergence
    if of.site is None:
        assert (result.ok, result.coverage, found) == (True, 1.0, None)
        assert result.counts["unmatched_candidate"] == 0
        return
    assert found is not None and not result.ok
    assert (found.site, found.rank) == (of.site, of.blamed)
    assert of.hint is None or found.hints[0].evidence == of.hint
