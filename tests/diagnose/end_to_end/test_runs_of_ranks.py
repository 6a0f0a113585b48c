"""Runs of several processes judged with the model: right ones are ok, and each mistake is named where it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassengine as glass
from tests.compare.ranks.end_to_end import spread_runs, torch_runs
from tests.compare.ranks.end_to_end.places import Place
from tests.compare.ranks.end_to_end.running import recorded
from tests.compare.ranks.end_to_end.spread_model import Net
from tests.compare.ranks.end_to_end.spread_runs import ALL, RIGHT, WRONG

pytest.importorskip("torch.distributed.tensor")
pytestmark = pytest.mark.slow

# What ranks share that have the same data, without gradients.
SHARED = [
    name for name, of in (RIGHT | WRONG).items() if of.mesh.keys() <= {"tp", "ep"} and not of.options.get("training")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(spread_runs, tmp_path_factory.mktemp("runs"), SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_each_is_judged_with_the_model(name: str, runs: Path) -> None:
    of = ALL[name]
    model = Net(Place(**{key: of.options[key] for key in ("fused", "experts") if key in of.options})).eval()
    result = glass.check(model, candidate=runs / name)
    if of.site is None:
        assert (result.ok, result.coverage, result.origins) == (True, 1.0, ())
        return
    named = [(found.site.partition("/")[0], found.rank) for found in result.origins]
    assert named[0] == (of.site.replace(":in[0]", ""), of.blamed)
    # A mistake that is in both layers is named in both, and nothing else is.
    assert {site.replace("layers.1.", "layers.0.").rstrip("0123456789") for site, _ in named} == {
        named[0][0].replace("layers.1.", "layers.0.").rstrip("0123456789")
    }


def test_transformers_with_a_plan(tmp_path: Path) -> None:
    """`tp_plan="auto"`, a prompt and two decode steps."""
    recorded(torch_runs, tmp_path, ["tp_plan 2", "tp_plan: a slip"])
    right = glass.check(torch_runs.llama(), candidate=tmp_path / "tp_plan 2")
    assert (right.ok, right.coverage, right.origins) == (True, 1.0, ())
    assert {pair.step for pair in right.pairs} == {0, 1, 2}
    wrong = glass.check(torch_runs.llama(), candidate=tmp_path / "tp_plan: a slip")
    assert [(found.site.partition("/")[0], found.rank) for found in wrong.origins] == [(torch_runs.GATED, 1)]
