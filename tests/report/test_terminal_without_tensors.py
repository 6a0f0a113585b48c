"""Answers without tensors have the form of the others: results, the next command, and 25 lines at most."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from glassengine.report.terminal_check import check
from glassengine.report.terminal_without_tensors import invariance
from glassengine.results import ResultComparison
from glassengine.results.without_tensors import (
    FirstOperation,
    Invariance,
    RolloutCause,
    RolloutComparison,
    RolloutToken,
    SwitchTried,
    Variation,
    What,
    concluded,
)
from tests.report.made_results import comparison

CHANGES: tuple[What, ...] = ("run", "batch", "padding", "length", "cache", "threads", "order", "compile", "attention")
COMMAND = ("check", "port.py:model", "--invariant", "all")


def screen(answer: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(answer)
    return console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined, no-any-return]


def variation(what: What, **more: Any) -> Variation:
    source = f"transformers/models/llama/modeling_llama_{what}.py:243"
    given: dict[str, Any] = {
        "verdict": "within rounding", "num_variants": 20, "num_different": 12, "variant": "alone, and at place 0 of 4",
        "num_tokens": 37, "max_abs_diff": 3.5e-6, "largest": 10.5, "noise_ratio": 0.59,
        "first": FirstOperation("mm", "model.layers.0.self_attn.q_proj", source, 0, True, 1e-6),
        "cause": f"another kernel for {what}: products of few rows have one of their own",
        "switch": "oneDNN's linear, at least 2 rows (the operation alone)",
        "tried": tuple(SwitchTried(f"torch.backends.mkldnn.flags({n})", n > 2, "operation") for n in range(4)),
    }  # fmt: skip
    return Variation(what, **(given | more))


def same(*changes: Variation) -> Invariance:
    environment = {"cpu": "AMD EPYC", "instruction_set": "AVX512", "threads": 2, "torch": "2.13.0"}
    return concluded("port.py:model", changes, environment)


@pytest.mark.parametrize("width", [80, 100])
def test_all_changes_of_a_model_fit_one_screen(width: int) -> None:
    lines = screen(invariance(same(*map(variation, CHANGES)), COMMAND), width)
    assert len(lines) <= 25 and max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert text.startswith("ok: rounding explains what run, batch, padding")
    assert "results 9 within rounding; 108 of 180 variants differ; no next token changes" in text
    assert all(any(line.startswith(f"{what} ") for line in lines) for what in CHANGES)
    assert "cause another kernel for run" in text and lines[-1].endswith("(--json has all)")


def test_what_is_beyond_rounding_comes_first_with_its_line_to_change() -> None:
    beyond = variation("order", verdict="beyond rounding", num_changed_tokens=3, max_abs_diff=float("nan"))
    lines = screen(invariance(same(*map(variation, CHANGES[:4]), beyond), COMMAND), 100)
    text = " ".join(" ".join(lines).split())
    assert lines[0].startswith("NOT OK: order: beyond rounding, first in mm in model.layers.0")
    assert "results 4 within rounding, 1 beyond rounding; 60 of 100 variants differ; 3 of 185 next tokens" in text
    next_line = "change transformers/models/llama/modeling_llama_order.py:243, then glass check port.py:model"
    assert f"next {next_line} --invariant all" in text
    assert "order: alone, and at place 0" in text and "cause another kernel for order" in text
    assert "not finite" in text and "nan" not in text


def test_changes_that_differ_for_one_reason_are_one_entry() -> None:
    first, cause = variation("batch").first, "another kernel"
    told = same(*(variation(what, first=first, cause=cause) for what in ("batch", "length")), variation("order"))
    lines = screen(invariance(told), 120)
    assert "batch, length: alone, and at place 0 of 4" in lines
    assert not any(line.startswith("next") for line in lines)


def test_what_was_not_decided_names_the_document() -> None:
    told = same(variation("batch", verdict="undecided", first=None, cause=None, switch=None, tried=()))
    text = " ".join(" ".join(screen(invariance(told, COMMAND), 80)).split())
    assert "next glass check port.py:model --invariant all --json result.json, and read .changes" in text


def gap(*causes: RolloutCause, **more: Any) -> RolloutComparison:
    worst = tuple(RolloutToken(0, place, 318, "the", -1.5 - place, -1.5) for place in range(1, 9))
    given: dict[str, Any] = {
        "format": "TRL", "num_samples": 4, "num_tokens": 96, "num_searched": 96, "num_runs": 3, "dtype": "float32",
        "mean": 0.1, "rms": 0.46, "largest": 0.91, "k3": 0.088, "mean_error": 1.2, "outside": 0.8, "positive": 0.9,
        "slope": 1.0, "num_impossible": 0, "causes": causes, "rest": 0.0, "rest_is": "too small to matter",
        "rounding": {"float32": 9.0}, "found": "mistake", "worst": worst,
    }  # fmt: skip
    return RolloutComparison(**(given | more))


def rollout(found: RolloutComparison, width: int = 80) -> list[str]:
    row = ResultComparison(
        "log-probabilities", "log-probabilities", "rollout", "name", "wrong", None, "rollout", 0, 1, (96,), "float32",
        "float64", 0.91, 4.98, None, None, None, 9.0,
    )  # fmt: skip
    result = dataclasses.replace(
        comparison([]), ok=False, rollout=found, results=(row,), notes=("a note",) * 3, baseline="policy",
        not_ok_because=found.in_words(), first_divergence=None,
        skipped=(), levels=(), granularity=(), inputs=(), origins=(), severity={},
    )  # fmt: skip
    return screen(check(result, ("check-rollout", "policy", "--rollout", "hot.json")), width)


def cause(setting: str, value: str, alike: int = 0) -> RolloutCause:
    told = tuple(f"another setting {n} of a long name, which explains the gap as well" for n in range(alike))
    return RolloutCause("semantics", setting, value, f"{setting} {value}", 0.5, alike=told)


def test_a_rollout_has_results_and_the_next_command() -> None:
    lines = rollout(gap(cause("temperature", "0.7"), cause("top_p", "0.9")))
    text = " ".join(" ".join(lines).split())
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    assert "results log-probabilities differ by 0.91 of 4.98; k3 KL 0.088 nats, 80.0% of the tokens outside" in text
    assert "next glass check-rollout policy --rollout hot.json --temperature 0.7" in text
    assert any("temperature 0.7" in line and "50%" in line for line in lines[2:])


def test_causes_stay_where_tokens_have_no_room() -> None:
    lines = rollout(gap(*(cause(f"setting {n}", "1", alike=2) for n in range(3))))
    assert len(lines) <= 25 and sum("so would" in line for line in lines) == 3
    assert "next     make both sides alike (setting 0 1), then glass" in "\n".join(lines)


@pytest.mark.parametrize(
    ("found", "following"),
    [("unknown", "--engine-dtype DTYPE, or have"), ("unexplained", "glass check policy --candidate ENGINE")],
)
def test_without_a_cause_the_next_step_is_what_would_decide(found: Any, following: str) -> None:
    text = " ".join(" ".join(rollout(gap(found=found, rest_is="as large as rounding in bfloat16"))).split())
    assert following in text
