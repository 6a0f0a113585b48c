"""Two scripts that are compared while they run: the first wrong step stops both."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from glassengine.commands import PairedScript, watch_scripts
from glassengine.errors import GlassError, IncomparableError

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
what, count = sys.argv[1], int(sys.argv[2])
with torch.no_grad():
    for i in range(count):
        x = torch.randn(4, 16)
        if i == 3 and what == "wrong":
            model[2].weight.mul_(1.01)
        if i == 3 and what == "raises":
            raise ValueError("planted")
        if i == 3 and what == "killed":
            import os; os.kill(os.getpid(), 9)
        if what == "rounding":
            x = x * (1 + 1e-7)
        model(x)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("watched") / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def _watch(script: str, what: str, count: int = 6) -> object:
    return watch_scripts(PairedScript(script, ["same", "6"]), PairedScript(script, [what, str(count)]))


def test_the_first_wrong_step_stops_both(script: str) -> None:
    found = watch_scripts(PairedScript(script, ["same", "100000"]), PairedScript(script, ["wrong", "100000"]))
    assert not found.ok and found.verdict == "wrong"
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.site) == (3, "2")
    assert found.notes[-1] == "stopped at step 3, after 3 steps that are ok"


@pytest.mark.slow
def test_rounding_stops_nothing(script: str) -> None:
    found = watch_scripts(PairedScript(script, ["same", "6"]), PairedScript(script, ["rounding", "6"]))
    assert found.ok and found.verdict == "rounding"
    assert found.notes[-1].startswith("6 steps were compared")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "count", "kind", "words"),
    [
        ("raises", 6, GlassError, "candidate fails .* ValueError: planted"),
        ("killed", 6, GlassError, "candidate fails .* status -9"),
        ("same", 4, IncomparableError, "candidate ended before the baseline"),
    ],
)
def test_a_side_that_ends_is_named(script: str, what: str, count: int, kind: type[GlassError], words: str) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        _watch(script, what, count)
