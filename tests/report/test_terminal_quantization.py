"""A quantized candidate fits one screen: mistakes first, then what costs most, whatever the names and figures."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

from rich.console import Console

from glassengine.report.terminal_check import check
from glassengine.results import Comparison, Divergence, Hint, Quantization, QuantizedWeight, Skipped


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
    assert len(lines) <= 24
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
    assert len(lines) <= 24
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
    assert len(lines) <= 24
