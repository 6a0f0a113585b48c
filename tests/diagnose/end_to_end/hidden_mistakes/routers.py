"""Routers and sorted tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.diagnose.end_to_end.hidden_mistakes.entry import HERE, Entry


def of_experts(w: Any, x: Tensor, shares: Tensor) -> Tensor:
    """Dense: every expert computes every token. shares [B, S, E]."""
    return torch.einsum("bsd,edo,bse->bso", x, w.experts, shares)


def routed(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    values, picks = (x @ w.gate.t()).softmax(-1).topk(2)
    values = values / values.sum(-1, keepdim=True)
    found = torch.einsum("bsd,bskdo->bsko", x, w.experts[picks])
    return (found * values[..., None]).sum(2)


def routed_densely(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    logits = x @ w.gate.t()
    values, picks = logits.topk(2)
    return of_experts(w, x, torch.zeros_like(logits).scatter(-1, picks, values.softmax(-1)))


def routed_without_norm(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    shares = (x @ w.gate.t()).softmax(-1)
    values, picks = shares.topk(2)
    return of_experts(w, x, torch.zeros_like(shares).scatter(-1, picks, values))


def routed_to_the_next(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    logits = x @ w.gate.t()
    values, picks = logits.topk(2)
    return of_experts(w, x, torch.zeros_like(logits).scatter(-1, (picks + 1) % 4, values.softmax(-1)))


def routed_to_one(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    logits = x @ w.gate.t()
    values, picks = logits.topk(1)
    return of_experts(w, x, torch.zeros_like(logits).scatter(-1, picks, values.softmax(-1)))


def routed_to_the_worst(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    logits = x @ w.gate.t()
    values, picks = logits.topk(2, largest=False)
    return of_experts(w, x, torch.zeros_like(logits).scatter(-1, picks, values.softmax(-1)))


def in_groups(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Only experts of the better group of two are chosen from."""
    scores = (x @ w.gate.t()).sigmoid()
    best = scores.unflatten(-1, (2, 2)).amax(-1).argmax(-1, keepdim=True)
    mine = torch.zeros(2, 8, 2).scatter(-1, best, 1.0).repeat_interleave(2, -1)
    values, picks = scores.masked_fill(mine == 0, float("-inf")).topk(1)
    return of_experts(w, x, torch.zeros_like(scores).scatter(-1, picks, values))


def in_groups_by_bools(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    scores = (x @ w.gate.t()).sigmoid()
    group = scores.unflatten(-1, (2, 2)).amax(-1)
    mine = (group == group.amax(-1, keepdim=True)).repeat_interleave(2, -1)
    kept = torch.where(mine, scores, 0.0)
    return of_experts(w, x, torch.where(kept == kept.amax(-1, keepdim=True), kept, 0.0))


def in_interleaved_groups(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    scores = (x @ w.gate.t()).sigmoid()
    best = scores.unflatten(-1, (2, 2)).amax(-1).argmax(-1, keepdim=True)
    mine = torch.zeros(2, 8, 2).scatter(-1, best, 1.0).repeat(1, 1, 2)
    values, picks = scores.masked_fill(mine == 0, float("-inf")).topk(1)
    return of_experts(w, x, torch.zeros_like(scores).scatter(-1, picks, values))


def sorted_by_expert(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    picks = (rows @ w.gate.t()).argmax(-1)
    order = picks.argsort(stable=True)
    done = torch.einsum("td,tdo->to", rows[order], w.experts[picks[order]])
    return torch.zeros_like(done).index_copy(0, order, done).view(2, 8, 8)


def by_expert(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    logits = x @ w.gate.t()
    return of_experts(w, x, F.one_hot(logits.argmax(-1), 4).float())


def left_sorted(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    picks = (rows @ w.gate.t()).argmax(-1)
    order = picks.argsort(stable=True)
    return torch.einsum("td,tdo->to", rows[order], w.experts[picks[order]]).view(2, 8, 8)


def sorted_back_wrong(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    picks = (rows @ w.gate.t()).argmax(-1)
    order = picks.argsort(stable=True)
    return torch.einsum("td,tdo->to", rows[order], w.experts[picks[order]])[order].view(2, 8, 8)


def with_room(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """An expert takes its first five tokens and drops the others."""
    rows = x.flatten(0, 1)
    mine = F.one_hot((rows @ w.gate.t()).argmax(-1), 4).float()
    place = mine.cumsum(0) * mine
    return of_experts(w, x, (mine * (place <= 5.0)).view(2, 8, 4))


def with_room_by_numbers(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    mine = F.one_hot((x @ w.gate.t()).argmax(-1), 4).flatten(0, 1)
    before = mine.cumsum(0) - mine
    return of_experts(w, x, torch.where((mine == 1) & (before < 5), 1.0, 0.0).view(2, 8, 4))


def with_room_for_four(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    mine = F.one_hot((rows @ w.gate.t()).argmax(-1), 4).float()
    return of_experts(w, x, (mine * (mine.cumsum(0) * mine < 5.0)).view(2, 8, 4))


def in_a_stable_order(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort(dim=-1, stable=True)
    return x.gather(1, order[..., None].expand(2, 8, 8)) @ w.v


def in_order_of_place(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    order = (ids * 8 + HERE).argsort(dim=-1)
    return x[torch.arange(2)[:, None], order] @ w.v


def equals_backwards(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    order = (ids * 8 + 7 - HERE).argsort(dim=-1)
    return x[torch.arange(2)[:, None], order] @ w.v


def at_the_first_end(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """CLIP: the state of the first token that ends a text; 9 appears twice."""
    return x[torch.arange(2), (ids == ids.amax(-1, keepdim=True)).int().argmax(-1)] @ w.v


def at_the_first_end_by_counts(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    ends = (ids == ids.amax(-1, keepdim=True)).long()
    first = ends * (ends.cumsum(-1) == 1)
    return (x * first[..., None]).sum(1) @ w.v


def at_the_last_end(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.arange(2), 7 - (ids == ids.amax(-1, keepdim=True)).flip(-1).int().argmax(-1)] @ w.v


CORPUS = (
    Entry(
        "router",
        routed,
        (routed_densely,),
        (routed_without_norm, routed_to_the_next, routed_to_one, routed_to_the_worst),
    ),
    Entry("groups of experts", in_groups, (in_groups_by_bools,), (in_interleaved_groups,)),
    Entry("tokens sorted by expert", sorted_by_expert, (by_expert,), (left_sorted, sorted_back_wrong)),
    Entry("capacity of experts", with_room, (with_room_by_numbers,), (with_room_for_four, by_expert)),
    Entry("stable order", in_a_stable_order, (in_order_of_place,), (equals_backwards,)),
    Entry("first of equals", at_the_first_end, (at_the_first_end_by_counts,), (at_the_last_end,)),
)
