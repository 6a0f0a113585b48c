"""The answer of `glass check` fits one screen, however much there is to say."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import glassengine as glass
from glassengine.report.terminal_check import _about, check
from glassengine.results import Comparison, Divergence, Hint, Quantization, QuantizedWeight, Skipped
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


def test_an_answer_names_both_sides_of_the_first_divergence(found: Comparison) -> None:
    text = "\n".join(screen(found))
    assert "first divergence: ./silu.0" in text
    assert found.first_divergence is not None
    assert found.first_divergence.source is not None and "silu(self.up(x))" in found.first_divergence.source
    assert found.first_divergence.candidate_source is not None
    assert "self.up(x) * 1.05" in found.first_divergence.candidate_source
    # Long lines are wrapped.
    assert "self.up(x)*1.05" in "".join(text.split())
    assert "compared Net (baseline) with Port (candidate)" in text


def test_an_answer_fits_a_screen_of_25_rows(found: Comparison) -> None:
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
        levels=(*found.levels, *found.levels[:1]),
    )
    lines = screen(crowded)
    assert len(lines) <= 25, "\n".join(lines)
    assert all(len(line) <= 100 for line in lines)
    assert not any("more lines" in line for line in lines), "a screen does not end in the middle"
    assert any("more origins (--json has all)" in line for line in lines)
    assert len(screen(found)) <= 25


@pytest.mark.parametrize("width", [80, 100])
def test_f78_lines_are_wrapped_at_words_below_their_text_and_name_the_next_command(
    found: Comparison, width: int
) -> None:
    first = found.first_divergence
    assert first is not None
    told = " ".join(["words that tell something"] * 6)
    hint = Hint("scale", told, 0.9)
    crowded = dataclasses.replace(found, first_divergence=dataclasses.replace(first, hints=(hint,)))
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(check(crowded, ["check", "net.py:net", "--candidate", "port.py:port"]))
    lines = console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined]
    assert len(lines) <= 25 and all(len(line) <= width for line in lines)
    assert lines[1].startswith("results ") and lines[2].startswith("next     change ")
    at = next(place for place, line in enumerate(lines) if line.startswith("  hint"))
    rest = [lines[at + offset] for offset in range(1, 2)]
    assert all(line.startswith(" " * 11) and line.strip().split()[0] in told.split() for line in rest)


def test_a_proof_is_a_mistake_with_its_line_and_what_is_less_is_left_out(found: Comparison) -> None:
    first = found.first_divergence
    assert first is not None
    proof = Hint(
        "eps", "eps: 1e-06 in the baseline, 0.001 in the candidate", 1.0, proven=True, line="x = norm(x, 1e-06)"
    )
    ops = Hint("other", "the baseline has add, the candidate nothing", 0.6, evidence="ops")
    engine = Hint("other", "only the engine with debug outputs is wrong", 1.0, evidence="observer")
    origins = [dataclasses.replace(first, site=site, hints=(proof,)) for site in ("./norm1.0", "./norm2.0")]
    for others, shown in (((ops,), False), ((engine,), True)):
        named = dataclasses.replace(first, hints=(proof, *others))
        crowded = dataclasses.replace(found, first_divergence=named, origins=(named, *origins))
        lines = screen(crowded)
        assert "  mistake  eps: eps: 1e-06 in the baseline, 0.001 in the candidate" in lines
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
    expected = "2 of 6 torch.bool elements differ; first at [0, 2]: baseline 0 | candidate 1"
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


def test_an_answer_begins_with_results_inputs_and_coverage(found: Comparison) -> None:
    head, *rest = screen(found)
    assert head.startswith("NOT OK: up/linear.0 in the baseline, up/linear.0 * 1.05 in the candidate (proven)")
    assert "results  output differs by 0.116 of 1.89 (24 dB) in inputs, step 0" in rest[:2]
    assert "compared Net (baseline) with Port (candidate)" in rest[:4]
    assert "inputs   given: x float32[2, 8] all 1" in rest
    assert "judged   2 float tensors: 100% op by op" in rest


def test_an_answer_says_why_no_result_is_compared(found: Comparison) -> None:
    without = dataclasses.replace(found, results=())
    assert "results  not compared: the candidate has none of the baseline" in screen(without)
    random = Skipped("output", "both", "not compared end to end: every run draws new random numbers")
    lines = screen(dataclasses.replace(without, skipped=(random,)))
    assert "results  not compared end to end: every run draws new random numbers" in lines


def test_f41_what_judged_nothing_is_not_called_identical(found: Comparison) -> None:
    empty = dataclasses.replace(found.levels[0], name="empty", num_judged=0, coverage=0.0, verdict="identical")
    lines = screen(dataclasses.replace(found, levels=(empty,)))
    (line,) = [line for line in lines if line.strip().startswith("empty")]
    assert "nothing judged" in line and "identical" not in line and "%" not in line


def test_f43_too_little_is_not_called_identical(found: Comparison) -> None:
    because = "only 0% of the baseline's float-valued sites were judged (--min-coverage 0.9); the results agree"
    little = dataclasses.replace(
        found, verdict="identical", first_divergence=None, not_ok_because=because, too_little=True
    )
    text = " ".join("\n".join(screen(little)).split())
    assert text.startswith(f"NOT OK: too little was judged: {because}") and "bitwise identical" not in text


def weight(name: str, share: float, **changes: Any) -> QuantizedWeight:
    figures: dict[str, Any] = {"snr_db": 20.0, "rms_steps": 0.29, "max_steps": 0.5, "output_snr_db": 21.0}
    figures |= {"output_over_rounding": 1.0, "logits_snr_db": 30.0, "kl": 0.001, "is_rescaled": False}
    return QuantizedWeight(name=name, share=share, **({"verdict": "rounding"} | figures | changes))


def comparison(weights: list[QuantizedWeight], **changes: Any) -> Comparison:
    found = Quantization("gptq", 25, 11.0, 0.03, 0.5, tuple(weights), ())
    origins = tuple(
        Divergence(
            "weights", 0, f"{w.name}:param", None, f"{w.name}:param", None, w.verdict, None, None, None, None, w.hints
        )
        for w in weights
        if w.verdict == "wrong"
    )
    values: dict[str, Any] = {"baseline": "a", "candidate": "b", "ok": not origins, "verdict": "rounding"}
    values |= {
        "first_divergence": None,
        "origins": origins,
        "counts": {},
        "pairs": (),
        "skipped": (),
        "environment": {},
    }
    return Comparison(**(values | {"coverage": 1.0, "quantization": found} | changes))


def drawn(result: Comparison) -> list[str]:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(check(result))
    return console.export_text().splitlines()


def test_many_layers_fit_one_screen() -> None:
    weights = [weight(f"model.layers.{n}.self_attn.q_proj.weight", 0.005) for n in range(200)]
    hints = (Hint("other", "64 of 64 groups are moved by +1 steps: their zero is another", 0.9),)
    weights[150] = dataclasses.replace(weights[150], verdict="wrong", hints=hints)
    lines = drawn(comparison(weights, not_ok_because="1 weights differ by more than quantization explains"))
    assert len(lines) <= 25
    first = next(line for line in lines if "q_proj" in line)
    assert first.split()[0] == "150.self_attn.q_proj" and first.endswith("MISTAKE      ")
    assert any(line.startswith("model.layers.150.self_attn.q_proj.weight: 64 of 64 groups") for line in lines)
    left = next(line for line in lines if "more" in line and "..." in line)
    shown = sum("q_proj" in line for line in lines) - 1
    assert f"... and {200 - shown} more" in left and f"{(200 - shown) * 0.5:.1f}%" in left


def test_many_mistakes_fit_too() -> None:
    hints = (Hint("other", "all groups are moved", 0.9),)
    weights = [weight(f"layers.{n}.weight", 0.01, verdict="wrong", hints=hints) for n in range(100)]
    lines = drawn(comparison(weights, skipped=(Skipped("x", "baseline", "why"),)))
    assert len(lines) <= 25
    assert any("and 96 more (--json has all)" in line for line in lines)
    assert lines[-1].startswith("not judged: 1 weights")


def test_figures_that_are_none_or_no_numbers() -> None:
    changes = {"snr_db": math.inf, "output_snr_db": None, "kl": None, "output_over_rounding": None}
    found = comparison([weight("a.weight", 0.0, **changes), weight("b.weight", 0.0, snr_db=-math.inf)])
    assert found.quantization is not None
    without = dataclasses.replace(found.quantization, kl=None, token_agreement=None, logits_snr_db=-math.inf)
    text = "\n".join(drawn(dataclasses.replace(found, quantization=without)))
    assert "inf" in text and "-inf dB at 25 positions" in text and "KL 0" not in text


def test_long_names_take_more_rows() -> None:
    names = [f"language_model.layers.{n}.block_sparse_moe.experts.gate_up_proj" for n in range(50)]
    lines = drawn(comparison([weight(name, 0.02) for name in [*names, "lm_head"]]))
    assert len(lines) <= 25
