"""The answer of `glass check` fits one screen, however much there is to say."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import glassengine as glass
from glassengine.report.terminal_check import _about, check
from glassengine.results import Comparison, Hint, Skipped
from glassengine.testing import models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.up(x))


class Port(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.up(x) * 1.05)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    path = tmp_path_factory.mktemp("inputs") / "x.pt"
    torch.save({"x": torch.ones(2, 8)}, path)
    port = models.drawn(Net)
    port.__class__ = Port
    return glass.check(models.drawn(Net), candidate=port, inputs=str(path))


def screen(result: Comparison) -> list[str]:
    console = Console(file=io.StringIO(), width=100, markup=False, highlight=False)
    console.print(check(result))
    return console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined, no-any-return]


def test_it_names_both_sides_of_the_first_divergence(found: Comparison) -> None:
    text = "\n".join(screen(found))
    assert "first divergence: ./silu.0" in text
    assert found.first_divergence is not None
    assert found.first_divergence.source is not None and "silu(self.up(x))" in found.first_divergence.source
    assert found.first_divergence.candidate_source is not None
    assert "self.up(x) * 1.05" in found.first_divergence.candidate_source
    # Long lines are wrapped.
    assert "self.up(x)*1.05" in "".join(text.split())
    assert "baseline Net, candidate Port" in text


def test_it_fits_a_screen_of_24_rows(found: Comparison) -> None:
    first = found.first_divergence
    assert first is not None
    hints = tuple(Hint("scale", f"a guess number {i} " + "of some length " * 5, 0.5) for i in range(9))
    others = tuple(dataclasses.replace(first, site=f"layers.{i}.mlp/mul.0", step=i) for i in range(9))
    skipped = tuple(Skipped(f"s{i}", "candidate", f"reason {i % 7}") for i in range(50))
    crowded = dataclasses.replace(
        found,
        first_divergence=dataclasses.replace(first, hints=hints),
        origins=others,
        skipped=skipped,
        rungs=(*found.rungs, *found.rungs[:1]),
    )
    lines = screen(crowded)
    assert len(lines) <= 24, "\n".join(lines)
    assert all(len(line) <= 100 for line in lines)
    assert any("more lines (--json has all)" in line for line in lines)
    assert len(screen(found)) <= 24


def test_a_proof_is_a_mistake_with_its_line_and_what_is_less_is_left_out(found: Comparison) -> None:
    first = found.first_divergence
    assert first is not None
    proof = Hint("eps", "eps: 1e-06 here, 0.001 in the candidate", 1.0, proven=True, line="x = norm(x, 1e-06)")
    ops = Hint("other", "the baseline has add here, the candidate nothing", 0.6, evidence="ops")
    engine = Hint("other", "only the engine with debug outputs is wrong", 1.0, evidence="observer")
    origins = [dataclasses.replace(first, site=site, hints=(proof,)) for site in ("./norm1.0", "./norm2.0")]
    for others, shown in (((ops,), False), ((engine,), True)):
        named = dataclasses.replace(first, hints=(proof, *others))
        crowded = dataclasses.replace(found, first_divergence=named, origins=(named, *origins))
        lines = screen(crowded)
        assert "  mistake  eps: eps: 1e-06 here, 0.001 in the candidate" in lines
        assert "  line     x = norm(x, 1e-06)" in lines
        assert any(line.startswith("  hint") for line in lines) == shown
        assert "  also     the same mistake in 2 other places" in map(str, _about(crowded, named))
    guess = dataclasses.replace(first, hints=(dataclasses.replace(proof, proven=False), ops))
    lines = screen(dataclasses.replace(found, first_divergence=guess, origins=(guess,)))
    assert sum(line.startswith("  hint") for line in lines) == 2


class Above(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"above": x > 0, "more": x + 1}


class NotBelow(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"above": x >= 0, "more": x + 1}


def test_of_bools_it_says_how_many_differ_and_where(tmp_path: Path) -> None:
    inputs = torch.tensor([[1.0, -2.0, 0.0], [0.0, 3.0, -1.0]])
    torch.save({"x": inputs}, tmp_path / "x.pt")
    result = glass.check(Above(), candidate=NotBelow(), inputs=str(tmp_path / "x.pt"))
    expected = "2 of 6 torch.bool elements differ; first at [0, 2]: 1 for 0"
    assert expected in " ".join("\n".join(screen(result)).split())
    # Another case in which it is right does not make the error 0.
    wrong = next(pair for pair in result.pairs if pair.verdict == "wrong")
    right = dataclasses.replace(wrong, case="another", verdict="identical", noise_ratio=0.0, reason=None, figures=None)
    text = screen(dataclasses.replace(result, pairs=(right, *result.pairs)))
    assert expected in " ".join("\n".join(text).split())


def test_f16_a_wrong_result_whose_pairs_are_all_inherited_is_printed(found: Comparison) -> None:
    pairs = tuple(dataclasses.replace(pair, inherited=True) for pair in found.pairs)
    assert "first divergence: ./silu.0" in "\n".join(screen(dataclasses.replace(found, pairs=pairs)))
    assert "first divergence: ./silu.0" in "\n".join(screen(dataclasses.replace(found, pairs=())))


def test_it_begins_with_the_results_the_inputs_and_how_finely_was_judged(found: Comparison) -> None:
    head, _, results, inputs, judged = screen(found)[:5]
    assert head.startswith("NOT OK: output differs by 0.116 of 1.89 (24 dB); a tensor is wrong at ./silu.0")
    assert results == "results  output differs by 0.116 of 1.89 (24 dB) in inputs, step 0"
    assert inputs == "inputs   given: x float32[2, 8] all 1"
    assert judged == "judged   100% op by op of 2 float-valued sites"


def test_f41_what_judged_nothing_is_not_called_identical(found: Comparison) -> None:
    empty = dataclasses.replace(found.rungs[0], name="empty", num_judged=0, coverage=0.0, verdict="identical")
    lines = screen(dataclasses.replace(found, rungs=(empty,)))
    (line,) = [line for line in lines if line.strip().startswith("empty")]
    assert "nothing judged" in line and "identical" not in line and "%" not in line


def test_f43_too_little_is_not_called_identical(found: Comparison) -> None:
    because = "only 0% of the baseline's float-valued sites were judged (--min-coverage 0.9); the results agree"
    little = dataclasses.replace(
        found, verdict="identical", first_divergence=None, not_ok_because=because, too_little=True
    )
    text = " ".join("\n".join(screen(little)).split())
    assert text.startswith(f"NOT OK: too little was judged: {because}") and "bitwise identical" not in text
