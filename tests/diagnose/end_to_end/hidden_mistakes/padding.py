"""Padding in embeddings, pools and last tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.diagnose.end_to_end.hidden_mistakes.entry import HERE, Entry


def without_a_row(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    table = w.table * (torch.arange(16) != 0)[:, None]
    return x + F.embedding(ids, table, padding_idx=0)


def without_tokens(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.embedding(ids, w.table).masked_fill((ids == 0)[..., None], 0.0)


def with_the_row(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.embedding(ids, w.table, padding_idx=0)


def pooled(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    real = (ids != 0)[..., None].float()
    return (x * real).sum(1) / real.sum(1).clamp(min=1e-9) @ w.v


def pooled_by_products(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    real = (ids != 0).float()
    return (torch.einsum("bsd,bs->bd", x, real) / real.sum(1, keepdim=True)) @ w.v


def pooled_with_padding(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x.mean(1) @ w.v


def pooled_over_all(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x * (ids != 0)[..., None].float()).sum(1) / 8 @ w.v


def largest_of_real(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).masked_fill((ids == 0)[..., None], -1e9).amax(1)


def largest_by_infinity(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.where((ids != 0)[..., None], x @ w.v, float("-inf")).amax(1)


def largest_over_less(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).masked_fill((ids == 0)[..., None], -1e4).amax(1)


def largest_of_all(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).amax(1)


def largest_over_zeros(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v - 3.0).masked_fill((ids == 0)[..., None], 0.0).amax(1) + 3.0


def of_the_last(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(2), (ids != 0).sum(-1) - 1] @ w.v


def of_the_last_by_places(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    last = torch.where(ids != 0, HERE, -1).argmax(-1)
    return x.gather(1, last[:, None, None].expand(2, 1, 8)).squeeze(1) @ w.v


def of_the_last_column(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x[:, -1] @ w.v


def ignored(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Labels below 0 are ignored: gathered from 0, then dropped."""
    labels = ids - 4
    taken = (x @ w.v).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(labels >= 0, taken, 0.0).sum(-1)


def ignored_by_factor(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    labels = ids - 4
    taken = (F.one_hot(labels.clamp(min=0), 8) * (x @ w.v).log_softmax(-1)).sum(-1)
    return (taken * (labels >= 0)).sum(-1)


def not_ignored(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).log_softmax(-1).gather(-1, (ids - 4).clamp(min=0)[..., None]).squeeze(-1).sum(-1)


def ignored_too_many(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    labels = ids - 4
    taken = (x @ w.v).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(labels > 0, taken, 0.0).sum(-1)


CORPUS = (
    Entry("row of padding", without_a_row, (without_tokens,), (with_the_row,)),
    Entry("mean of real tokens", pooled, (pooled_by_products,), (pooled_with_padding, pooled_over_all)),
    Entry(
        "largest of real tokens",
        largest_of_real,
        (largest_by_infinity, largest_over_less),
        (largest_of_all, largest_over_zeros),
    ),
    Entry("last token", of_the_last, (of_the_last_by_places,), (of_the_last_column,)),
    Entry("ignored labels", ignored, (ignored_by_factor,), (not_ignored, ignored_too_many)),
)
