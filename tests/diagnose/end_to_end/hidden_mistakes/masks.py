"""Masks between windows, of the future and of padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.diagnose.end_to_end.hidden_mistakes.entry import HERE, LEAST, Entry, attended


def windows(shift: int, size: int = 4) -> Tensor:
    """Numbers of regions as shifted windows count them: whole numbers in float."""
    regions = torch.zeros(8)
    regions[size:-shift] = 1
    regions[-shift:] = 2
    return regions


def shifted(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    apart = windows(2)[None, :] - windows(2)[:, None]
    mask = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
    return attended(w, x, lambda s: s + mask)


def shifted_by_bools(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    same = windows(2)[None, :] == windows(2)[:, None]
    return attended(w, x, lambda s: s - 100.0 * (~same).float())


def shifted_without(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return attended(w, x, lambda s: s)


def shifted_by_one(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    apart = windows(1)[None, :] - windows(1)[:, None]
    return attended(w, x, lambda s: s + apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0))


def causal_by_numbers(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    ahead = HERE.float()[None, :] - HERE.float()[:, None]
    return attended(w, x, lambda s: torch.where(ahead > 0, -1e9, s))


def causal(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return attended(w, x, lambda s: s.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), float("-inf")))


def causal_late(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return attended(w, x, lambda s: s.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(1), float("-inf")))


def not_even_itself(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    ahead = HERE.float()[None, :] - HERE.float()[:, None]
    return attended(w, x, lambda s: torch.where((ahead >= 0) & (HERE[:, None] > 0), -1e9, s))


def near(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    behind = HERE.float()[:, None] - HERE.float()[None, :]
    return attended(w, x, lambda s: s.masked_fill((behind < 0) | (behind >= 3.0), LEAST))


def near_by_bands(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    seen = torch.ones(8, 8).tril() * torch.ones(8, 8).triu(-2)
    return attended(w, x, lambda s: s * seen + (1 - seen) * -1e9)


def near_of_four(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    behind = HERE.float()[:, None] - HERE.float()[None, :]
    return attended(w, x, lambda s: s.masked_fill((behind < 0) | (behind > 3.0), LEAST))


def padded(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    real = (ids != 0).float()
    return attended(w, x, lambda s: s + (1.0 - real)[:, None, :] * -10000.0)


def padded_to_infinity(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return attended(w, x, lambda s: s.masked_fill((ids == 0)[:, None, :], float("-inf")))


def not_padded(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return attended(w, x, lambda s: s)


def padded_on_the_left(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return attended(w, x, lambda s: s + (1.0 - (ids != 0).float()).flip(1)[:, None, :] * -10000.0)


def padded_queries(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return attended(w, x, lambda s: s + (1.0 - (ids != 0).float())[:, :, None] * -10000.0)


def both_masks(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    later = torch.zeros(8, 8).masked_fill(HERE[None, :] > HERE[:, None], LEAST)
    padding = torch.zeros(2, 1, 8).masked_fill((ids == 0)[:, None], LEAST)
    return attended(w, x, lambda s: s + (later + padding).clamp(min=LEAST))


def both_at_once(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    seen = (HERE[None, :] <= HERE[:, None]) & (ids != 0)[:, None]
    return attended(w, x, lambda s: torch.where(seen, s, -1e30))


def either_mask(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    seen = (HERE[None, :] <= HERE[:, None]) | (ids != 0)[:, None]
    return attended(w, x, lambda s: torch.where(seen, s, -1e30))


def from_the_left(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Rows of padding see no key at all."""
    seen = (HERE[None, :] <= HERE[:, None]) & (ids.flip(1) != 0)[:, None]
    return attended(w, x, lambda s: torch.where(seen, s, LEAST))


def from_the_left_by_adding(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    seen = (HERE[None, :] <= HERE[:, None]) & (ids.flip(1) != 0)[:, None]
    return attended(w, x, lambda s: s + (~seen).float() * -1e9)


def from_the_left_with_a_row_too_many(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    seen = (HERE[None, :] <= HERE[:, None]) & (ids.flip(1).roll(1, 1) != 0)[:, None]
    return attended(w, x, lambda s: torch.where(seen, s, LEAST))


def from_the_left_scaled(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    seen = (HERE[None, :] <= HERE[:, None]) & (ids.flip(1) != 0)[:, None]
    return attended(w, x, lambda s: torch.where(seen, s * 1.01, LEAST))


def in_blocks(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    block = (HERE.float() / 4).floor()
    return attended(w, x, lambda s: torch.where(block[None] == block[:, None], s, LEAST))


def in_blocks_of_whole_numbers(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    block = HERE // 4
    return attended(w, x, lambda s: s.masked_fill(block[None] != block[:, None], -1e9))


def in_rounded_blocks(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    block = (HERE.float() / 4).round()
    return attended(w, x, lambda s: torch.where(block[None] == block[:, None], s, LEAST))


def packed(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Several texts in a row: each 9 ends one."""
    text = torch.cumsum((ids == 9).float(), -1)
    return attended(w, x, lambda s: s.masked_fill(text[:, None] != text[:, :, None], LEAST))


def packed_by_counts(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    text = (ids == 9).long().cumsum(-1)
    return attended(w, x, lambda s: torch.where(text[:, None] == text[:, :, None], s, -1e9))


def packed_a_token_late(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    ends = (ids == 9).float()
    text = torch.cumsum(ends, -1) - ends
    return attended(w, x, lambda s: s.masked_fill(text[:, None] != text[:, :, None], LEAST))


CORPUS = (
    Entry("mask between shifted windows", shifted, (shifted_by_bools,), (shifted_without, shifted_by_one)),
    Entry("mask of the future", causal_by_numbers, (causal,), (causal_late, not_even_itself)),
    Entry("sliding window", near, (near_by_bands,), (near_of_four, causal)),
    Entry("padded keys", padded, (padded_to_infinity,), (not_padded, padded_on_the_left, padded_queries)),
    Entry("two masks added", both_masks, (both_at_once,), (either_mask, padded, causal)),
    Entry(
        "rows that see nothing",
        from_the_left,
        (from_the_left_by_adding,),
        (from_the_left_with_a_row_too_many, from_the_left_scaled),
    ),
    Entry("blocks", in_blocks, (in_blocks_of_whole_numbers,), (in_rounded_blocks,)),
    Entry("packed texts", packed, (packed_by_counts,), (packed_a_token_late,)),
)
