"""Memory that nothing wrote, caches, scattered and random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.diagnose.end_to_end.hidden_mistakes.entry import HERE, LEAST, Entry


def written_in_part(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    room = torch.empty(2, 12, 8)
    room[:, 2:10] = x
    return room[:, 2:10] @ w.v


def read_from_the_start(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    room = torch.empty(2, 12, 8)
    room[:, 2:10] = x
    return room[:, 1:9] @ w.v


def in_zeros(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(2, 12, 8).slice_scatter(x, 1, 2, 10)[:, 2:10] @ w.v


def filled(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    room = torch.empty(2, 8, 8)
    room[:, ::2] = x[:, :4]
    room[:, 1::2] = x[:, 4:]
    return room @ w.v


def interleaved(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([x[:, :4], x[:, 4:]], 2).flatten(1, 2) @ w.v


def filled_in_half(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    room = torch.empty(2, 8, 8)
    room[:, ::2] = x[:, :4]
    return room @ w.v


def cached(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Keys are written to slots 3 to 10 of 12; what is not written is not seen."""
    slots = torch.zeros(2, 12, 8).index_copy(1, HERE + 3, x @ w.k)
    seen = (torch.arange(12) >= 3) & (torch.arange(12) <= HERE[:, None] + 3)
    scores = (x @ w.q) @ slots.transpose(1, 2) / 8
    return scores.masked_fill(~seen, LEAST).softmax(-1) @ slots


def not_cached(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    keys = x @ w.k
    return ((x @ w.q) @ keys.transpose(1, 2) / 8).masked_fill(~torch.ones(8, 8).tril().bool(), -1e9).softmax(-1) @ keys


def cached_a_slot_late(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    slots = torch.zeros(2, 12, 8).index_copy(1, HERE + 4, x @ w.k)
    seen = (torch.arange(12) >= 3) & (torch.arange(12) <= HERE[:, None] + 3)
    return ((x @ w.q) @ slots.transpose(1, 2) / 8).masked_fill(~seen, LEAST).softmax(-1) @ slots


def cached_with_empty_slots(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    slots = torch.zeros(2, 12, 8).index_copy(1, HERE + 3, x @ w.k)
    seen = torch.arange(12) <= HERE[:, None] + 3
    return ((x @ w.q) @ slots.transpose(1, 2) / 8).masked_fill(~seen, LEAST).softmax(-1) @ slots


def added_up(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Tokens of one id are added up: an index is there several times."""
    return torch.zeros(2, 10, 8).scatter_add(1, ids[..., None].expand(2, 8, 8), x) @ w.v


def added_by_products(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (F.one_hot(ids, 10).float().transpose(1, 2) @ x) @ w.v


def written_over(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(2, 10, 8).scatter(1, ids[..., None].expand(2, 8, 8), x) @ w.v


def behind_noise(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x + torch.rand_like(x)) @ w.v


def behind_noise_transposed(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x + torch.rand_like(x)) @ w.v.t()


def behind_noise_as_linear(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.matmul(x + torch.rand_like(x), w.v)


def dropped_nothing(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return F.dropout(x @ w.v, 0.5, training=False)


def dropped_away(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x @ w.v


def scaled_for_dropout(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v) * 0.5


CORPUS = (
    Entry("memory that is not read", written_in_part, (in_zeros,), (read_from_the_start,)),
    Entry("memory that is filled", filled, (interleaved,), (filled_in_half,)),
    Entry("slots of a cache", cached, (not_cached,), (cached_a_slot_late, cached_with_empty_slots)),
    Entry("scattered twice", added_up, (added_by_products,), (written_over,)),
    Entry("random numbers", behind_noise, (behind_noise_as_linear,), (behind_noise_transposed,)),
    Entry("dropout", dropped_nothing, (dropped_away,), (scaled_for_dropout,)),
)
