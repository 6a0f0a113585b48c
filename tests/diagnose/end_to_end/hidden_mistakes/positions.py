"""Positions and buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.diagnose.end_to_end.hidden_mistakes.entry import HERE, Entry, attended


def bucketed(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """T5: the logarithm of 0 is cast, and dropped."""
    behind = (HERE[:, None] - HERE[None, :]).clamp(min=0)
    far = 2 + (torch.log(behind.float() / 2) / torch.log(torch.tensor(4.0)) * 2).to(torch.int64)
    bucket = torch.where(behind < 2, behind, far.clamp(max=5))
    return attended(w, x, lambda s: s + w.table[bucket, 0])


def bucketed_from_one(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    behind = (HERE[:, None] - HERE[None, :]).clamp(min=0)
    far = 2 + (torch.log(behind.clamp(min=1).float() / 2) / torch.log(torch.tensor(4.0)) * 2).to(torch.int64)
    bucket = torch.where(behind < 2, behind, torch.minimum(far, torch.full_like(far, 5)))
    return attended(w, x, lambda s: s + w.table[bucket, 0])


def bucketed_too_near(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    behind = (HERE[:, None] - HERE[None, :]).clamp(min=0)
    far = 2 + (torch.log(behind.float() / 2) / torch.log(torch.tensor(3.0)) * 2).to(torch.int64)
    bucket = torch.where(behind < 2, behind, far.clamp(max=5))
    return attended(w, x, lambda s: s + w.table[bucket, 0])


def bucketed_with_what_is_dropped(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    behind = (HERE[:, None] - HERE[None, :]).clamp(min=0)
    far = 2 + (torch.log(behind.clamp(min=1).float() / 2) / torch.log(torch.tensor(4.0)) * 2).to(torch.int64)
    bucket = torch.where(behind < 1, behind, far.clamp(max=5, min=0))
    return attended(w, x, lambda s: s + w.table[bucket, 0])


def relative(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    distance = (HERE[None, :] - HERE[:, None]).clamp(-3, 3) + 3
    return attended(w, x, lambda s: s + w.table[distance, 1])


def relative_by_numbers(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    distance = torch.maximum(torch.minimum(HERE[None, :] - HERE[:, None], torch.tensor(3)), torch.tensor(-3))
    return attended(w, x, lambda s: s + F.embedding(distance + 3, w.table)[..., 1])


def relative_backwards(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    distance = (HERE[:, None] - HERE[None, :]).clamp(-3, 3) + 3
    return attended(w, x, lambda s: s + w.table[distance, 1])


def relative_cut_short(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    distance = (HERE[None, :] - HERE[:, None]).clamp(-2, 2) + 3
    return attended(w, x, lambda s: s + w.table[distance, 1])


def counted(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Positions by the tokens that are no padding (RoBERTa)."""
    real = (ids != 0).int()
    return x + F.embedding((torch.cumsum(real, 1).type_as(real) * real).long(), w.table)


def counted_by_places(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + w.table[torch.where(ids != 0, HERE + 1, 0)]


def counted_from_zero(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + w.table[torch.where(ids != 0, HERE, 0)]


def counted_through_padding(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + w.table[(HERE + 1).expand(2, 8)]


def on_boundaries(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + w.table[torch.bucketize(ids.float(), torch.tensor([2.0, 3.0, 5.0, 8.0]))]


def on_boundaries_by_counts(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + w.table[(ids.float()[..., None] > torch.tensor([2.0, 3.0, 5.0, 8.0])).sum(-1)]


def on_the_right_of_boundaries(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + w.table[(ids.float()[..., None] >= torch.tensor([2.0, 3.0, 5.0, 8.0])).sum(-1)]


def upsampled(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    place = (HERE.float() * 0.5).floor().long()
    return x[:, place] @ w.v


def upsampled_by_repeating(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x[:, :4].repeat_interleave(2, 1) @ w.v


def upsampled_to_nearest(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x[:, (HERE.float() * 0.5).round().long()] @ w.v


CORPUS = (
    Entry("buckets", bucketed, (bucketed_from_one,), (bucketed_too_near, bucketed_with_what_is_dropped)),
    Entry("relative positions", relative, (relative_by_numbers,), (relative_backwards, relative_cut_short)),
    Entry("counted positions", counted, (counted_by_places,), (counted_from_zero, counted_through_padding)),
    Entry("boundaries", on_boundaries, (on_boundaries_by_counts,), (on_the_right_of_boundaries,)),
    Entry("nearest neighbors", upsampled, (upsampled_by_repeating,), (upsampled_to_nearest,)),
)
