"""The rule of `ok`: results first, then the inside, then how much was judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.diagnose.training_check import TrainingFindings
from glassengine.results import Comparison, Findings, Pair, Policy, ResultComparison, Verdict
from glassengine.results.findings import decide
from glassengine.testing import models


def result(verdict: Verdict, snr: float = 60.0) -> ResultComparison:
    sizes = {
        "max_abs_diff": 0.5,
        "largest": 2.0,
        "ulp": 9.0,
        "snr_db": snr,
        "cosine_similarity": 0.9,
        "noise_ratio": 9.0,
    }
    return ResultComparison(
        "logits", "logits", "candidate", "name", verdict, None, "a case", 1, 4, (2, 3), "float32", "float32", **sizes
    )


@pytest.mark.parametrize(
    ("inside", "ends", "coverage", "standing"),
    [
        ("rounding", "rounding", 1.0, "ok"),
        ("rounding", "wrong", 1.0, "results differ"),
        ("identical", "wrong", 0.0, "results differ"),
        ("wrong", "wrong", 1.0, "results differ"),
        ("wrong", "rounding", 1.0, "weights differ"),
        ("suspicious", "suspicious", 1.0, "ok"),
        ("rounding", "rounding", 0.5, "too little judged"),
    ],
)
def test_f4_results_have_the_first_and_the_last_word(
    inside: Verdict, ends: Verdict, coverage: float, standing: str
) -> None:
    found = decide(Findings("a", "b", {}, inside=inside, results=[result(ends)], coverage=coverage), Policy())
    assert found.standing == standing and (found.reason is None) == (standing == "ok")


def test_a_budget_comes_after_what_is_wrong_and_before_coverage() -> None:
    def standing(verdict: Verdict, snr: float, coverage: float) -> str:
        found = Findings("a", "b", {}, inside="rounding", results=[result(verdict, snr)], coverage=coverage)
        return found.conclude(Policy(min_snr=30.0)).standing

    assert standing("rounding", 20.0, 0.1) == "over budget"
    assert standing("wrong", 20.0, 0.1) == "results differ"
    assert standing("rounding", 40.0, 1.0) == "ok"


class Centered(nn.Module):
    """What is added to all of a row is gone after its mean is taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x))
        return self.second(h - h.mean(-1, keepdim=True))


class Guarded(Centered):
    """What is above 100 is doubled, and nothing is."""

    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x))
        return self.second(torch.where(x > 100, h * self.factor, h))


class Tripled(Guarded):
    factor = 3.0


class Renamed(nn.Module):
    """Right: the two layers have each other's names."""

    def __init__(self, own: Centered) -> None:
        super().__init__()
        self.first, self.second = own.second, own.first

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.second(x))
        return self.first(h - h.mean(-1, keepdim=True))


def checked(tmp_path: Path, candidate: nn.Module, baseline: type[nn.Module] = Centered) -> Comparison:
    torch.save({"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}, tmp_path / "x.pt")
    return glass.check(models.drawn(baseline), candidate=candidate, inputs=str(tmp_path / "x.pt"))


def test_a_mistake_that_these_inputs_do_not_excite_is_told_as_such_and_is_not_ok(tmp_path: Path) -> None:
    port = models.drawn(Guarded)
    port.__class__ = Tripled
    found = checked(tmp_path, port, Guarded)
    assert all(one.agrees for one in found.results)
    assert not found.ok and found.standing == "differs inside"
    assert str(found.not_ok_because).startswith("differs inside, not in the results: the first wrong op is ./mul.0")


def test_f6_modules_of_other_names_are_no_mistake(tmp_path: Path) -> None:
    found = checked(tmp_path, Renamed(models.drawn(Centered)))
    assert found.ok, found.not_ok_because


def test_a_training_run_says_why_it_is_not_ok() -> None:
    wrong = Pair(0, "a", "a", "name", 1.0, "wrong", "reverse replay", level="forward")
    told = TrainingFindings(pairs=[wrong]).conclude("a", "b", Policy())
    assert (told.ok, told.standing, told.too_little) == (False, "differs inside", False)
    little = TrainingFindings(wanted={"a", "b"}, judged={"a"}).conclude("a", "b", Policy())
    assert (little.ok, little.standing, little.too_little) == (False, "too little judged", True)
