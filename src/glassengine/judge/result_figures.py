"""How far two results are apart: plain figures of two tensors, which know nothing of a judge.

Both sides of a result are what the models returned. Padding, and rows that nothing defines, are left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from glassengine.blocks import agree
from glassengine.numerics.metrics.drift import decibels, loss_of
from glassengine.results import FLAGGED, VERDICTS, ResultComparison


@dataclass(frozen=True)
class ResultFigures:
    """Figures of a result in one step, named as in `ResultComparison`; None where the two cannot be subtracted."""

    max_abs_diff: float | None = None
    largest: float | None = None
    ulp: float | None = None
    snr_db: float | None = None
    cosine_similarity: float | None = None
    left_out: float = 0.0
    num_tokens: int = 0
    same_tokens: int = 0
    mean_kl: float | None = None
    max_kl: float | None = None


def result_figures(
    baseline: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None = None, *, are_logits: bool = False
) -> ResultFigures:
    """Return how far a result is from the baseline's.

    Args:
        baseline: Any shape and dtype; logits are [..., V].
        value: The candidate's.
        valid: Bool mask that broadcasts against the baseline: which elements count; None for all.
        are_logits: Whether the last axis scores the tokens of a vocabulary.
    """
    if baseline.shape != value.shape or baseline.is_complex() or value.is_complex():
        return ResultFigures()
    b, c = baseline.double(), value.double()
    counted = torch.ones_like(b, dtype=torch.bool) if valid is None else valid.expand(b.shape)
    left_out = 1 - float(counted.double().mean()) if counted.numel() else 0.0
    same = agree(b, c) | ~counted
    if bool((~same & ~(b.isfinite() & c.isfinite())).any()):
        return ResultFigures(math.inf, None, None, -math.inf, None, left_out)
    tokens = _tokens(b, c, counted) if are_logits else {}
    counted = counted & b.isfinite() & c.isfinite()
    b, c = torch.where(counted, b, 0.0), torch.where(counted, c, 0.0)
    if not b.numel():
        return ResultFigures(0.0, 0.0, 0.0, math.inf, 1.0)
    error, largest = c - b, float(b.abs().max())
    worst = float(error.abs().max())
    if not (baseline.is_floating_point() and value.is_floating_point()):
        return ResultFigures(worst, largest, left_out=left_out)
    noise, signal = float(error.square().sum()), float(b.square().sum())
    norms = math.sqrt(signal) * float(c.norm())
    return ResultFigures(
        worst,
        largest,
        worst / _unit(largest, baseline, value) if largest else None,
        decibels(loss_of(noise, signal)),
        1.0 if not noise else float((b * c).sum()) / norms if norms else 0.0,
        left_out,
        **tokens,
    )


def _tokens(baseline: torch.Tensor, value: torch.Tensor, counted: torch.Tensor) -> dict[str, Any]:
    """Return what two sets of logits [..., V] say of the next token, at all positions that count; KL in nats."""
    rows = counted.any(-1)
    b, c = baseline[rows], value[rows]
    if not len(b):
        return {}
    ours, theirs = b.log_softmax(-1), c.log_softmax(-1)
    # A token that one side masks out has no probability there: 0 * inf counts for nothing.
    kl = (ours.exp() * (ours - theirs)).masked_fill(ours.isneginf(), 0.0).sum(-1)
    same = int((b.argmax(-1) == c.argmax(-1)).sum())
    return {"num_tokens": len(b), "same_tokens": same, "mean_kl": float(kl.mean()), "max_kl": float(kl.max())}


def _unit(largest: float, *sides: torch.Tensor) -> float:
    """Return a unit in the last place of `largest` in the coarser dtype of the two."""
    eps = max(torch.finfo(side.dtype).eps for side in sides)
    return float(eps * 2.0 ** math.floor(math.log2(largest)))


def merged(results: Iterable[ResultComparison]) -> tuple[ResultComparison, ...]:
    """Return one entry for each result of each rung, of entries for other steps."""
    found: dict[tuple[str, str], ResultComparison] = {}
    for one in results:
        place = (one.rung, one.name)
        found[place] = worse(found[place], one) if place in found else one
    return tuple(found.values())


def worse(one: ResultComparison, other: ResultComparison) -> ResultComparison:
    """Return the worse of two steps of a result, with the extremes of both."""

    def key(found: ResultComparison) -> tuple[float, ...]:
        noise_ratio = math.inf if found.noise_ratio is None and found.verdict in FLAGGED else found.noise_ratio or 0.0
        loss = math.inf if found.snr_db is None else -found.snr_db
        return (VERDICTS.index(found.verdict), loss, noise_ratio, found.max_abs_diff or 0.0)

    return replace(
        max((one, other), key=key),
        num_steps=one.num_steps + other.num_steps,
        num_tokens=one.num_tokens + other.num_tokens,
        same_tokens=one.same_tokens + other.same_tokens,
        mean_kl=_mean((one.mean_kl, one.num_tokens), (other.mean_kl, other.num_tokens)),
        max_kl=max((kl for kl in (one.max_kl, other.max_kl) if kl is not None), default=None),
        is_decided=one.is_decided and other.is_decided,
        snr_db=_least(one.snr_db, other.snr_db),
        noise_ratio=max((r for r in (one.noise_ratio, other.noise_ratio) if r is not None), default=None),
        cosine_similarity=_least(one.cosine_similarity, other.cosine_similarity),
        left_out=(one.left_out * one.num_steps + other.left_out * other.num_steps) / (one.num_steps + other.num_steps),
        exempt=(one.exempt * one.num_steps + other.exempt * other.num_steps) / (one.num_steps + other.num_steps),
    )


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)


def _mean(*weighted: tuple[float | None, int]) -> float | None:
    known = [(value, number) for value, number in weighted if value is not None and number]
    return sum(value * number for value, number in known) / sum(number for _, number in known) if known else None
