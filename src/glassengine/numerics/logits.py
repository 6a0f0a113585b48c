"""Compares two sets of logits as distributions of the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.blocks import BLOCK_ELEMENTS, widen
from glassengine.blocks.pieces import one_thread


@one_thread()
def compare_logits(baseline: Tensor, candidate: Tensor) -> tuple[float, float] | None:
    """Return divergence and agreement of two sets of logits, in float64 and a few rows at a time.

    The first is the mean of KL(softmax(baseline) || softmax(candidate)) in nats, the second the share of rows whose
    likeliest token is the candidate's, ties included. Rows without a distribution on some side (NaN, +inf, all -inf)
    do not count; None where no row is left.

    Args:
        baseline: Logits, real, shape `[rows, vocab_size]`.
        candidate: The same shape; any real dtype.
    """
    at_once = max(1, BLOCK_ELEMENTS // baseline.shape[-1])
    kl, same, num_rows = 0.0, 0, 0
    for b_RV, c_RV in zip(*(torch.split(x.detach(), at_once) for x in (baseline, candidate)), strict=True):
        wide = [widen(x.to("cpu")) for x in (b_RV, c_RV)]
        logs = [x.log_softmax(-1) for x in wide]
        # Every element of a row without a distribution becomes NaN.
        defined_R = ~(logs[0][:, 0].isnan() | logs[1][:, 0].isnan())
        b_RV, c_RV, log_p_RV, log_q_RV = (x[defined_R] for x in (*wide, *logs))
        p_RV = log_p_RV.exp()
        # A token of probability 0 contributes nothing, however unlikely it is on the other side.
        kl += float(torch.where(p_RV > 0, p_RV * (log_p_RV - log_q_RV), 0.0).sum(-1).clamp(min=0.0).sum())
        chosen_R = c_RV.gather(-1, b_RV.argmax(-1, keepdim=True))[:, 0]
        same += int((chosen_R >= c_RV.amax(-1)).sum())
        num_rows += len(p_RV)
    return (kl / num_rows, same / num_rows) if num_rows else None
