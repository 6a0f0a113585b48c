"""Compares two sets of logits as distributions: next token, divergence, perplexity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from glassengine.blocks import BLOCK_ELEMENTS, widen
from glassengine.blocks.pieces import one_thread
from glassengine.results import LogitsDifference

IGNORED = -100
"""The target of a position that does not count, as in `torch.nn.functional.cross_entropy`."""


@one_thread()
def compare_logits(
    baseline: Tensor, candidate: Tensor, *, k: int = 5, targets: Tensor | None = None
) -> LogitsDifference:
    """Return agreement, divergence and perplexities of two sets of logits, in float64 and a few rows at a time.

    Args:
        baseline: Logits, real, shape `[..., vocab_size]`.
        candidate: The same shape; any real dtype.
        k: How many of the likeliest tokens `topk_agreement` looks at; at most the vocabulary.
        targets: Token ids that came next, shape `[...]`; -100 does not count. Needed for perplexities.

    Raises:
        ValueError: Shapes that do not belong together, a complex dtype, no vocabulary, or a target outside of it.
    """
    shape = tuple(baseline.shape)
    if shape != tuple(candidate.shape):
        raise ValueError(f"shapes differ: {list(shape)} and {list(candidate.shape)}")
    if not shape or shape[-1] == 0 or baseline.is_complex() or candidate.is_complex():
        raise ValueError(f"no logits: {baseline.dtype}{list(shape)} and {candidate.dtype}{list(candidate.shape)}")
    if targets is not None and tuple(targets.shape) != shape[:-1]:
        raise ValueError(f"targets have shape {list(targets.shape)}, the rows of the logits {list(shape[:-1])}")
    if k < 1:
        raise ValueError(f"k must be at least 1: {k}")
    k = min(k, shape[-1])
    total = _Total(k)
    wanted = None if targets is None else targets.reshape(-1).to("cpu", torch.int64)
    if wanted is not None and bool(((wanted != IGNORED) & ((wanted < 0) | (wanted >= shape[-1]))).any()):
        raise ValueError(f"targets outside of the vocabulary of {shape[-1]}")
    for start, b, c in _rows(baseline, candidate):
        total.add(start, widen(b.to("cpu")), widen(c.to("cpu")), None if wanted is None else wanted[start:])
    return total.result(shape)


def _rows(baseline: Tensor, candidate: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (number of the first row, rows of both sides as `[rows, vocab_size]`) of about a block."""
    baseline, candidate = (x.detach().reshape(1, -1) if x.dim() == 1 else x.detach() for x in (baseline, candidate))
    *outer, _, vocab_size = baseline.shape
    at_once = max(1, BLOCK_ELEMENTS // vocab_size)
    start = 0
    for index in itertools.product(*map(range, outer)):
        for b, c in zip(*(torch.split(x[index], at_once) for x in (baseline, candidate)), strict=True):
            yield start, b, c
            start += b.shape[0]


class _Total:
    """Running sums over rows; shapes below: R rows, V tokens."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.num_rows = self.num_defined = self.num_targets = 0
        self.top1 = self.topk = self.kl = self.baseline_nll = self.candidate_nll = 0.0
        self.max_kl = -math.inf
        self.worst: int | None = None

    def add(self, start: int, b_RV: Tensor, c_RV: Tensor, targets: Tensor | None) -> None:
        self.num_rows += b_RV.shape[0]
        log_p_RV, log_q_RV = b_RV.log_softmax(-1), c_RV.log_softmax(-1)
        # A row with NaN, +inf or nothing but -inf has no distribution; every element of it becomes NaN.
        defined_R = ~(log_p_RV[:, 0].isnan() | log_q_RV[:, 0].isnan())
        rows = defined_R.nonzero()[:, 0]
        if not rows.numel():
            return
        b_RV, c_RV, log_p_RV, log_q_RV = (x[rows] for x in (b_RV, c_RV, log_p_RV, log_q_RV))
        p_RV = log_p_RV.exp()
        # A token of probability 0 contributes nothing, however unlikely it is on the other side.
        kl_R = torch.where(p_RV > 0, p_RV * (log_p_RV - log_q_RV), 0.0).sum(-1).clamp(min=0.0)
        self.num_defined += rows.numel()
        self.kl += float(kl_R.sum())
        if float(kl_R.max()) > self.max_kl:
            self.max_kl = float(kl_R.max())
            self.worst = start + int(rows[kl_R.argmax()])
        likeliest_Rk = b_RV.topk(self.k, dim=-1).indices
        limit_Rk = c_RV.topk(self.k, dim=-1).values
        chosen_Rk = c_RV.gather(-1, likeliest_Rk)
        self.top1 += float((chosen_Rk[:, 0] >= limit_Rk[:, 0]).sum())
        self.topk += float((chosen_Rk >= limit_Rk[:, -1:]).sum()) / self.k
        if targets is not None:
            wanted_R = targets[rows]
            counted = wanted_R != IGNORED
            wanted_R1 = wanted_R[counted].unsqueeze(-1)
            self.num_targets += wanted_R1.numel()
            self.baseline_nll -= float(log_p_RV[counted].gather(-1, wanted_R1).sum())
            self.candidate_nll -= float(log_q_RV[counted].gather(-1, wanted_R1).sum())

    def result(self, shape: tuple[int, ...]) -> LogitsDifference:
        n = self.num_defined
        worst = None
        if self.worst is not None:
            worst = (
                tuple(int(i) for i in torch.unravel_index(torch.tensor(self.worst), shape[:-1])) if shape[:-1] else ()
            )
        return LogitsDifference(
            num_rows=self.num_rows,
            num_undefined=self.num_rows - n,
            vocab_size=shape[-1],
            k=self.k,
            top1_agreement=self.top1 / n if n else None,
            topk_agreement=self.topk / n if n else None,
            mean_kl=self.kl / n if n else None,
            max_kl=self.max_kl if n else None,
            worst_row=worst,
            num_targets=self.num_targets,
            baseline_perplexity=_perplexity(self.baseline_nll, self.num_targets),
            candidate_perplexity=_perplexity(self.candidate_nll, self.num_targets),
        )


def _perplexity(nll: float, num_targets: int) -> float | None:
    """Return exp of the mean negative log likelihood; beyond the range of float64 it is inf."""
    if not num_targets:
        return None
    mean = nll / num_targets
    return math.exp(mean) if mean < 709 else math.inf
