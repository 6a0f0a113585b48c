"""What is left out of the judgement of a side: what a list says of it, and what a replay leaves out."""

from __future__ import annotations

import torch

from glassengine.judge.exclusions.hidden_rows import HiddenRows
from glassengine.judge.exclusions.undefined_casts import UndefinedCasts
from glassengine.numerics.exemptions import TIES, Masks

TEXTS = {one.kind: one.reason for one in (UndefinedCasts, HiddenRows)}
"""Reasons in the list of skipped tensors; padding and ties are listed separately."""


def exempt_by_replay(
    own: Masks | None, accumulated: Masks, is_tie: bool, tensor: torch.Tensor, predicted: torch.Tensor
) -> Masks:
    """Return what a tensor was not judged by whose op was replayed: ties above it do not matter there.

    Args:
        own: What the replay left out, where it has masks of its own.
        accumulated: What the reference leaves out.
        is_tie: Whether the op itself chose otherwise among close values.
        tensor: The candidate's.
        predicted: What the op makes of the candidate's own values.
    """
    if own is not None:
        return own
    found = {reason: mask for reason, mask in accumulated.items() if reason != TIES}
    if is_tie and tensor.shape == predicted.shape:
        found[TIES] = tensor != predicted
    return found
