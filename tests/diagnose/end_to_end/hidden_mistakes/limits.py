"""Casts, limits, steps and other branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.diagnose.end_to_end.hidden_mistakes.entry import Entry


def no_number(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """0 / 0 is cast and dropped."""
    share = (ids.float() * 3 / ids.float()).to(torch.int64)
    return x + w.table[torch.where(ids == 0, 1, share)]


def no_number_made(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    share = (ids.float() * 3 / ids.clamp(min=1).float()).to(torch.int64)
    return x + w.table[torch.where(ids == 0, 1, share)]


def no_number_kept(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    share = (ids.float() * 3 / ids.clamp(min=1).float()).to(torch.int64)
    return x + w.table[torch.where(ids < 0, 1, share)]


def too_large(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Ids are spread over more than an integer holds, and those that are too large are dropped."""
    far = (ids.float() ** 2 * 1e18).to(torch.int64)
    return x + w.table[torch.where(ids >= 3, 5, far % 7)]


def too_large_never(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    far = (ids.clamp(max=2).float() ** 2 * 1e18).to(torch.int64)
    return x + w.table[torch.where(ids >= 3, 5, far % 7)]


def too_large_from_four(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    far = (ids.clamp(max=2).float() ** 2 * 1e18).to(torch.int64)
    return x + w.table[torch.where(ids >= 4, 5, far % 7)]


def limited(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).clamp(-1.0, 1.0) @ w.q


def limited_by_tanh(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = x @ w.v
    return torch.where(y > 1, 1.0, torch.where(y < -1, -1.0, y)) @ w.q


def limited_on_one_side(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).clamp(max=1.0) @ w.q


def limited_later(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).clamp(-1.0, 1.01) @ w.q


def dead(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """What a relu cuts off is marked, and hidden."""
    y = (x @ w.v).relu()
    return torch.where(y == 0, -2.0, y) @ w.q


def dead_by_sign(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = x @ w.v
    return torch.where(y > 0, y, -2.0) @ w.q


def dead_alive(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return (x @ w.v).relu() @ w.q


def dead_below_zero(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = (x @ w.v).relu()
    return torch.where(y < 0, -2.0, y) @ w.q


def sign_of_whole(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.sign(ids.float() - 3.0)[..., None] @ w.v


def sign_by_comparisons(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * ((ids > 3).float() - (ids < 3).float())[..., None] @ w.v


def sign_without_zero(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.where(ids >= 3, 1.0, -1.0)[..., None] @ w.v


def quantized(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = x @ w.v
    return (y * 16).round().clamp(-128, 127) / 16 @ w.q


def quantized_in_steps(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = x @ w.v
    return torch.fake_quantize_per_tensor_affine(y, 0.0625, 0, -128, 127) @ w.q


def quantized_downwards(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return ((x @ w.v) * 16).floor().clamp(-128, 127) / 16 @ w.q


def quantized_to_fewer(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return ((x @ w.v) * 16).round().clamp(-64, 63) / 16 @ w.q


def half_of_whole(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Rounds to even: 2.5 is 2."""
    return x * (ids.float() / 2).round()[..., None] @ w.v


def half_of_whole_by_table(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    table = torch.tensor([0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.0, 4.0])
    return x * table[ids][..., None] @ w.v


def half_of_whole_upwards(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * (ids.float() / 2 + 0.5).floor()[..., None] @ w.v


def of_two_branches(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """The other branch is NaN."""
    return torch.where(x > 0, x.log(), x) @ w.v


def of_safe_branches(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), x) @ w.v


def of_zeros_for_the_other(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0) @ w.v


def of_broken_numbers(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x.log().nan_to_num(0.0) @ w.v


def one_of_many(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    picked = F.one_hot((x @ w.v).argmax(-1), 8).float()
    return picked @ w.q


def one_by_index(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return w.q[(x @ w.v).argmax(-1)]


def the_next_of_many(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return w.q[((x @ w.v).argmax(-1) + 1) % 8]


def the_least_of_many(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return w.q[(x @ w.v).argmin(-1)]


def the_second_of_many(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return w.q[(x @ w.v).topk(2).indices[..., 1]]


CORPUS = (
    Entry("cast of what is no number", no_number, (no_number_made,), (no_number_kept,)),
    Entry("cast of what is too large", too_large, (too_large_never,), (too_large_from_four,)),
    Entry("limits", limited, (limited_by_tanh,), (limited_on_one_side, limited_later)),
    Entry("dead units", dead, (dead_by_sign,), (dead_alive, dead_below_zero)),
    Entry("sign of zero", sign_of_whole, (sign_by_comparisons,), (sign_without_zero,)),
    Entry("steps", quantized, (quantized_in_steps,), (quantized_downwards, quantized_to_fewer)),
    Entry("rounding to even", half_of_whole, (half_of_whole_by_table,), (half_of_whole_upwards,)),
    Entry("another branch", of_two_branches, (of_safe_branches,), (of_zeros_for_the_other, of_broken_numbers)),
    Entry("one of many", one_of_many, (one_by_index,), (the_next_of_many, the_least_of_many, the_second_of_many)),
)
