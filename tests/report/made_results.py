"""Results for reports, made without models: of every size, and with names that somebody chose to do harm."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from glassengine.results import (
    CaseInputs,
    Comparison,
    Divergence,
    ElementDifference,
    Figures,
    Hint,
    InputUsed,
    LevelResult,
    Pair,
    ResultComparison,
    Skipped,
    SliceMaxima,
    TensorValues,
    UlpDistance,
    Verdict,
    counts_of,
)

VALUES = TensorValues(
    (ElementDifference((0, 3, 1), 0.25, 0.27),),
    UlpDistance(56, 0, 12345, (0, 3, 1), (40, 9, 0, 7)),
    (SliceMaxima(1, 7, 1, (0.0, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0)),),
)
OPS = ("self_attn.q_proj/linear.0", "self_attn/scaled_dot_product_attention.0", "mlp/mul.0", "mlp.down_proj")
SOURCE = "modeling_llama.py:251: attn = sdpa(q, k, v, scale=self.scaling)"
TEXTS = ("The value of an expression", " is", " the", " result")
PORT = "port.py:40: attn = sdpa(q, k, v, scale=1 / 5.1)"


def figures(size: float, *, nonfinite: int = 0) -> Figures:
    return Figures(
        num_elements=64, num_different=9, max_abs_diff=size, mean_abs_diff=size / 9, rms_diff=size / 3,
        max_rel_diff=size, mean_rel_diff=size / 9, cosine_similarity=0.999, snr_db=-20 * math.log10(size),
        worst_index=(0, 3, 1), baseline_at_worst=0.25, candidate_at_worst=0.25 + size,
        num_nonfinite_mismatch=nonfinite, num_beyond_tolerance=9, rtol=1.3e-6, atol=1e-5,
    )  # fmt: skip


def pair(step: int, site: str, verdict: Verdict, ratio: float | None, **more: Any) -> Pair:
    dtype = "int64" if site.endswith("mul.0") else "float32"
    told = {
        "dtype": dtype,
        "shape": (1, 7, 8),
        "method": "name",
        "confidence": 1.0,
        "judged_by": "reverse replay",
        "level": "candidate",
        **more,
    }
    return Pair(step, site, told.pop("candidate_site", site), verdict=verdict, noise_ratio=ratio, **told)


def layered(*, layers: int = 6, steps: int = 4, guilty: int | None = 2, prefix: str = "model.layers") -> list[Pair]:
    """Return pairs of a model whose layer `guilty` introduces an error that all later ones inherit."""
    found = []
    for step in range(steps):
        for layer in range(layers):
            for place, op in enumerate(OPS):
                site, after = f"{prefix}.{layer}.{op}", guilty is not None and (layer, place) > (guilty, 1)
                if (layer, place) == (guilty, 1):
                    found.append(
                        pair(step, site, "wrong", 3110.0, bound_ratio=41.0, figures=figures(0.02), values=VALUES)
                    )
                elif after:
                    found.append(pair(step, site, "wrong", 80.0, inherited=True, figures=figures(0.01)))
                else:
                    verdict: Verdict = "identical" if place == 0 else "rounding"
                    found.append(pair(step, site, verdict, 0.4 if place else 0.0))
    return found


def comparison(pairs: list[Pair] | None = None, **more: Any) -> Comparison:
    """Return a comparison of `pairs`; the first that is wrong is its first divergence."""
    pairs = layered() if pairs is None else pairs
    wrong = next((one for one in pairs if one.verdict == "wrong" and not one.inherited), None)
    first = None
    if wrong is not None:
        hint = Hint("scale", "the scale is 0.196078 instead of 0.176777", 0.98)
        first = Divergence(
            wrong.level, wrong.step, wrong.site, "sdpa_2", wrong.candidate_site, SOURCE, "wrong", wrong.noise_ratio,
            41.0, 3e-3, 1e-8, hints=(hint,), candidate_source=PORT,
        )  # fmt: skip
    used = InputUsed("input_ids", 0, "given", "", "int64", (1, 7), 3, 80, 7)
    told: dict[str, Any] = {
        "baseline": "examples/tiny-llama",
        "candidate": "port.py:model",
        "ok": wrong is None,
        "verdict": "rounding" if wrong is None else "wrong",
        "first_divergence": first,
        "origins": () if first is None else (first,),
        "counts": counts_of(pairs, unmatched_baseline=1, unmatched_candidate=0, not_recorded=0),
        "pairs": tuple(pairs),
        "skipped": (Skipped("lm_head/view.0", "baseline", "a view"),),
        "environment": {
            "baseline": {"versions": {"torch": "2.13.0", "python": "3.11.7"}, "flags": [f"f{n}" for n in range(9)]},
            "candidate": {"versions": {"torch": "2.12.1", "python": "3.11.7"}, "flags": [f"f{n}" for n in range(10)]},
        },
        "coverage": 0.98,
        "levels": (
            LevelResult("candidate", "model", "port.py:model", "wrong", "judged op by op", len(pairs), 0.98, first),
        ),
        "not_ok_because": None if wrong is None else f"the logits differ: the first wrong op is {wrong.site}",
        "results": (
            ResultComparison(
                "logits", "logits", "candidate", "name", "wrong" if wrong else "rounding", None, "prompts", 0, 4,
                (1, 7, 99), "float32", "float32", 0.3, 8.2, 9e4, 30.0, 0.99, 900.0,
            ),
        ),
        "severity": {
            "candidate": {
                "num_tokens": 4, "token_agreement": 1.0, "num_ties": 0, "mean_kl": 1e-4, "max_kl": 3e-4,
                "first_changed_token": None,
            }
        },
        "inputs": (CaseInputs("prompts", 4, (used,), TEXTS),),
        "generates": True,
        "reads": {after.site: (before.site,) for before, after in itertools.pairwise(pairs)},
        **more,
    }  # fmt: skip
    return Comparison(**told)


HOSTILE = (
    "</script><img src=x onerror=window.hacked=1>",
    "model.\u202elayers.\u20669\u2069.evil",
    'model."><svg onload=window.hacked=1>',
    "a" * 10_000,
    "model.{{7*7}}.${7*7}.`x`",
    "model.\x00\x1b[31m\u200b\ufeff\r\nnew",
    "__proto__.constructor.toString",
    "glassReport(1)//--><!--",
    "model.\U0001f600.\U000e0041",
)


def hostile() -> Comparison:
    """Return a comparison in which every text is meant to break the page."""
    pairs = [pair(0, name, "wrong", 9.0, level=name, case=name, reason=name, candidate_site=name) for name in HOSTILE]
    found = comparison(pairs)
    assert found.first_divergence is not None
    first = dataclasses.replace(
        found.first_divergence, source=f"{HOSTILE[0]}:1: {HOSTILE[2]}", candidate_source=f"{HOSTILE[1]}: {HOSTILE[0]}",
        hints=(Hint(HOSTILE[0], HOSTILE[0] + HOSTILE[1], 1.0),),
    )  # fmt: skip
    environment = {"baseline": {name: name for name in HOSTILE}, "candidate": dict.fromkeys(HOSTILE, HOSTILE[0])}
    return dataclasses.replace(
        found,
        baseline=HOSTILE[0],
        candidate=HOSTILE[1],
        first_divergence=first,
        environment=environment,
        skipped=tuple(Skipped(name, "both", name) for name in HOSTILE),
        notes=HOSTILE,
        not_ok_because=HOSTILE[0],
    )
