"""Results first: what both sides return is compared end to end, whatever the inside says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.judge.end_to_end import EndToEnd, Severity, result_figures
from glassengine.numerics.verdict import Reference
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program
from glassengine.progress import Event, Work
from glassengine.results import Comparison, ResultComparison
from glassengine.testing import models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.down(nn.functional.silu(self.up(x)))}


class Renamed(Net):
    """Right, and returns a plain tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.up(x)
        return self.down(hidden * torch.sigmoid(hidden))


class Scaled(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.down(nn.functional.silu(self.up(x)) * 1.05)}


def checked(tmp_path: Path, candidate: type[nn.Module], baseline: type[nn.Module] = Net, **options: Any) -> Comparison:
    torch.save({"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(0))}, tmp_path / "x.pt")
    ours = models.drawn(baseline)
    port = models.drawn(baseline)
    port.__class__ = candidate
    return glass.check(ours, candidate=port, inputs=str(tmp_path / "x.pt"), **options)


def of(result: Comparison, level: str) -> ResultComparison:
    return next(found for found in result.results if found.level == level)


def test_f4_the_results_are_compared_end_to_end(tmp_path: Path) -> None:
    right = checked(tmp_path, Net)
    assert right.ok and right.standing == "ok"
    assert [(found.name, found.level, found.agrees) for found in right.results] == [
        ("logits", "program", True),
        ("logits", "candidate", True),
        ("logits", "candidate, untouched", True),
    ]
    assert of(right, "candidate, untouched").in_words() == "logits are bitwise identical"
    wrong = checked(tmp_path, Scaled)
    assert not wrong.ok and wrong.standing == "results differ"
    assert wrong.not_ok_because is not None and wrong.not_ok_because.startswith("logits differ by")
    found = of(wrong, "candidate, untouched")
    assert found.max_abs_diff is not None and found.snr_db is not None and found.ulp is not None
    assert found.max_abs_diff > 1e-3 and found.snr_db < 60 and found.ulp > 1000
    assert wrong.to_dict()["results"][0]["name"] == "logits"


def test_f41_one_case_is_one_case(tmp_path: Path) -> None:
    said: list[Event] = []
    checked(tmp_path, Net, progress=said.append)
    assert Work.JUDGING.says("judging 1 case") in said


def test_f30_a_result_of_another_name_is_compared_by_its_place(tmp_path: Path) -> None:
    result = checked(tmp_path, Renamed)
    found = of(result, "candidate, untouched")
    assert (found.method, found.candidate_name, found.agrees) == ("position", "output", True)
    assert result.ok, result.not_ok_because


def test_the_inputs_are_in_the_answer(tmp_path: Path) -> None:
    (case,) = checked(tmp_path, Net).to_dict()["inputs"]
    (used,) = case["inputs"]
    assert (used["name"], used["origin"], used["shape"]) == ("x", "given", [3, 8])


class Unrounded(nn.Module):
    """What a mask hides in the baseline: other elements of the result hang on a tie."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x > y, x * 2, y * 3)


class Chosen(Unrounded):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x > y, x * 2, y * 3.5)


@pytest.mark.parametrize("candidate", [Unrounded, Chosen])
def test_f1_a_tie_that_both_sides_decided_alike_excuses_no_result(candidate: type[nn.Module], tmp_path: Path) -> None:
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(1)) + 1
    torch.save({"x": x, "y": x * (1 + 2**-23)}, tmp_path / "x.pt")
    result = glass.check(Unrounded(), candidate=candidate(), inputs=str(tmp_path / "x.pt"))
    found = of(result, "candidate")
    assert found.agrees == result.ok == (candidate is Unrounded), found


def reference(tied: Tensor | None) -> Reference:
    exact = torch.linspace(1, 2, 32, dtype=torch.float64).reshape(4, 8)
    return Reference(exact, exact.float(), [exact], dtype=torch.float32, valid=None, tied=tied)


def test_results_below_a_tie_are_exempt_where_the_choice_differs() -> None:
    program = one_layer()
    value = reference(None).native.clone()
    value[0] *= 1.5
    tied = torch.zeros(4, 8, dtype=torch.bool)
    tied[0] = True
    for may_tie in (True, False):
        ends = EndToEnd(program, "candidate")
        node = program.output_nodes["output"]
        ends.compare(node, reference(tied), {"output": value}, {}, where=("a case", 0), may_tie=may_tie)
        (found,) = ends.compared
        assert found.agrees == may_tie
        assert found.exempt == (0.25 if may_tie else 0.0)


def test_what_a_run_that_chose_otherwise_explains_is_called_so() -> None:
    program, tied = one_layer(), torch.ones(4, 8, dtype=torch.bool)
    exact = reference(None).exact
    other = Reference(exact, exact.float(), [exact * 1.001], dtype=torch.float32, valid=None, tied=tied)
    for value, said in ((exact * 1.002, "within what a tie inside may change: "), (exact, "within rounding: ")):
        ends = EndToEnd(program, "candidate")
        given = {"output": value.float() * (1 + 1e-7)}
        ends.compare(program.output_nodes["output"], other, given, {}, where=("a case", 0), may_tie=False)
        (found,) = ends.compared
        assert found.agrees and said in found.in_words()


def one_layer() -> Program:
    return export_module(nn.Linear(8, 8).eval(), [{"input": torch.ones(4, 8)}])


def test_agreement_and_kl() -> None:
    severity = Severity()
    logits = torch.randn(3, 50)
    severity.add(logits, logits.clone(), 1e-6, "case, step 0")
    found = severity.to_dict()
    assert (found["num_tokens"], found["token_agreement"], found["first_changed_token"]) == (3, 1.0, None)
    assert severity.num_bitwise == 3 and abs(found["mean_kl"]) < 1e-12
    severity.add(logits, logits * 1.3, 1e-6, "case, step 1")
    assert severity.max_kl > 1e-3


def test_rows_without_a_likeliest_token_are_no_tokens() -> None:
    logits = torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(0))
    logits[0, 1], logits[1, 2], logits[1, 3, :4] = torch.nan, -torch.inf, -torch.inf
    found = result_figures(logits, logits * (1 + 1e-3), are_logits=True)
    assert (found["num_tokens"], found["same_tokens"]) == (6, 6) and found["max_kl"] < 1e-4
    severity = Severity()
    severity.add(logits[1], logits[1] * (1 + 1e-3), 1e-6, "case, step 0")
    assert severity.num_tokens == 3 and severity.to_dict()["mean_kl"] < 1e-4
    severity.add(logits[0], logits[0].nan_to_num(1.0), 1e-6, "case, step 1")  # a token where the baseline has none
    assert severity.num_tokens == 7 and severity.num_agreeing == 6
    severity = Severity()
    severity.add(logits[1], logits[1] * torch.nan, 1e-6, "case, step 0")
    assert severity.to_dict()["mean_kl"] is None and severity.to_dict()["max_kl"] is None


def test_a_changed_token_with_a_margin_is_named_and_a_tie_is_not() -> None:
    baseline = torch.tensor([[1.0, 0.9, 0.0]])
    changed = torch.tensor([[0.9, 1.0, 0.0]])
    severity = Severity()
    severity.add(baseline, changed, 0.05, "case, step 2")
    assert severity.num_ties == 1 and severity.first_change is None
    severity.add(baseline, changed, 0.005, "case, step 3")
    assert severity.first_change == "case, step 3, row 0: token 1 for 0 (margin 0.1)"
    assert severity.to_dict()["token_agreement"] == 0.5


class Hidden(nn.Module):
    """Attends to what a mask shows: nothing, in the second row."""

    def __init__(self, least: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.least = nn.Linear(8, 8), least

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        scores = self.proj(x) @ x.transpose(1, 2)
        return scores.masked_fill(~shown[:, None], self.least).softmax(-1) @ x


def test_results_that_are_nan_on_both_sides_are_not_ok() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(-1) / (x - x).sum(-1)

    result = glass.check(Broken(), candidate=Broken(), inputs={"x": torch.zeros(3, 4)})
    assert not result.ok and result.too_little
    assert "is not judged: the baseline has NaN everywhere" in str(result.not_ok_because)


def test_nan_where_the_baseline_has_numbers_is_not_ok() -> None:
    shown = torch.ones(2, 5, dtype=torch.bool)
    shown[1] = False
    given = {"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)), "shown": shown}
    least = float(torch.finfo(torch.float32).min)
    result = glass.check(Hidden(least), candidate=Hidden(float("-inf")), inputs=given)
    assert not result.ok
    assert any("NaN where the baseline has numbers" in found.in_words() for found in result.results)
    assert glass.check(Hidden(least), candidate=Hidden(-1e9), inputs=given).ok


class Drawn(nn.Module):
    """Random elements of what is not masked are dropped, and pairs are summed along an axis."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x * (torch.rand_like(x) >= 0.3) * mask
        if mask.sum() < 0:  # looks at a value, so that its ops are written down from one run
            y = -y
        return torch.einsum(self.equation, y, y)


def test_what_is_right_beside_a_draw_says_nothing_of_what_is_below_it() -> None:
    mask = torch.ones(1, 7, 7, 1)
    mask[:, 6], mask[:, :, 6] = 0.0, 0.0
    right, wrong = Drawn("bkid,bkjd->bijd").eval(), Drawn("bikd,bjkd->bijd").eval()
    given = {"x": torch.randn(1, 7, 7, 4), "mask": mask}
    assert glass.check(right, candidate=Drawn("bkid,bkjd->bijd").eval(), inputs=given).ok
    found = glass.check(right, candidate=wrong, inputs=given)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.hints[0].text.startswith("dims of permute")


class DropsNothing(nn.Module):
    """A dropout by hand that is off, and a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand_like(x) >= 0.0) * self.factor


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_results_below_a_dropout_of_nothing_are_compared(factor: float) -> None:
    given = {"x": torch.randn(3, 8)}
    found = glass.check(DropsNothing(2.0).eval(), candidate=DropsNothing(factor).eval(), inputs=given)
    assert found.results and found.ok == (factor == 2.0)
    assert all(result.agrees for result in found.results if result.level == "candidate") == (factor == 2.0)
