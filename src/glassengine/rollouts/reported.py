"""Computes what an engine reports for its tokens, given logits and the settings of its sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glassengine.rollouts.samples import Sample
from glassengine.rollouts.settings import RolloutSettings

_MOST_DECIMALS = 5
Heated = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Rank of each token, its log-probability, sums of probabilities in order; probabilities that decide, their sums."""


class Tokens:
    """The tokens of the responses of some samples, one after the other.

    Args:
        samples: Some.

    Attributes:
        ids: Of each token.
        engine: What was reported for it; NaN where nothing was.
        sample_of: Number of its sample.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.ids = torch.tensor([token for one in samples for token in one.response])
        self.engine = torch.cat([one.logprobs for one in samples])
        sizes = [len(one.response) for one in samples]
        self.sample_of = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(sizes))
        self._before: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def decimals(self) -> int | None:
        """Digits after the point that all values have at most; None where they have more than a file is cut to."""
        values = self.engine[self.engine.isfinite()]
        return next((n for n in range(1, _MOST_DECIMALS + 1) if bool((values == values.round(decimals=n)).all())), None)

    def before(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, token, count) of what each response holds before each place; count 0: only the prompt has it."""
        if self._before is None:
            rows: list[int] = []
            tokens: list[int] = []
            counts: list[int] = []
            row = 0
            for one in self.samples:
                seen = dict.fromkeys(one.prompt, 0)
                for token in one.response:
                    rows += [row] * len(seen)
                    tokens += seen.keys()
                    counts += seen.values()
                    seen[token] = seen.get(token, 0) + 1
                    row += 1
            self._before = torch.tensor(rows), torch.tensor(tokens), torch.tensor(counts)
        return self._before


class Logits:
    """Logits before the token of each place, with their order, which no temperature changes.

    Args:
        values: A row a place.
        tokens: Which token follows.
        eos: Tokens that end a sequence.
    """

    def __init__(self, values: Tensor, tokens: Tokens, eos: Sequence[int] = ()) -> None:
        self.values, self.tokens, self.eos = values.double(), tokens, list(eos)
        self._sorted: tuple[tuple[Any, ...], Tensor, Tensor] | None = None
        self._penalized: tuple[tuple[Any, ...], Tensor] | None = None
        self._held: tuple[tuple[float, str], Heated] | None = None

    def reported(self, settings: RolloutSettings) -> Tensor:
        """Return what an engine with these settings reports; NaN where nothing is, -inf where it cannot sample."""
        values, ids = self.values, self.tokens.ids[:, None]
        if settings.has_penalties:
            penalties = settings.repetition, settings.presence, settings.frequency
            if self._penalized is None or self._penalized[0] != penalties:
                self._penalized = penalties, self._with_penalties(settings)
            values = self._penalized[1]
        if settings.eos == "suppressed" and self.eos:
            values = values.index_fill(1, torch.tensor(self.eos), -math.inf)
        own = values.gather(1, ids)[:, 0]
        if settings.kept == "file":
            found = own / settings.temperature - self._of_kept(values / settings.temperature)
        elif settings.keeps_all:
            found = own / settings.temperature
            found = found if settings.kind == "raw logit" else found - (values / settings.temperature).logsumexp(-1)
        else:
            found = _truncated(*self._heated(values, settings), settings)
        return self._shifted(_of_kind(found, settings.kind), settings.shift)

    def _with_penalties(self, settings: RolloutSettings) -> Tensor:
        rows, tokens, counts = self.tokens.before()
        old = self.values[rows, tokens]
        new = torch.where(old > 0, old / settings.repetition, old * settings.repetition)
        new = new - settings.presence * (counts > 0) - settings.frequency * counts
        return self.values.index_put((rows, tokens), new)

    def _of_kept(self, values: Tensor) -> Tensor:
        sets = [kept for one in self.tokens.samples for kept in (one.kept or [[]] * len(one.response))]
        found = [values[row, torch.tensor(kept)].logsumexp(0) if kept else values[row].logsumexp(0)
                 for row, kept in enumerate(sets)]  # fmt: skip
        return torch.stack(found)

    def _heated(self, values: Tensor, settings: RolloutSettings) -> Heated:
        """Return what all sets of kept tokens have in common; that of the last temperature is held."""
        key = settings.repetition, settings.presence, settings.frequency, settings.eos
        if self._sorted is None or self._sorted[0] != key:
            order, places = values.sort(dim=-1, descending=True, stable=True)
            self._sorted, self._held = (key, order, (places == self.tokens.ids[:, None]).int().argmax(-1)), None
        at = settings.temperature, settings.order
        if self._held is None or self._held[0] != at:
            self._held = at, _heated(*self._sorted[1:], settings)
        return self._held[1]

    def _shifted(self, found: Tensor, shift: int) -> Tensor:
        if not shift:
            return found
        moved = found.roll(shift)
        same = self.tokens.sample_of.roll(shift) == self.tokens.sample_of
        edge = torch.arange(len(found))
        same &= (edge >= shift) if shift > 0 else (edge < len(found) + shift)
        return torch.where(same, moved, math.nan)


def _heated(order: Tensor, rank: Tensor, settings: RolloutSettings) -> Heated:
    heated = order / settings.temperature
    log_p = heated - heated.logsumexp(-1, keepdim=True)
    total = log_p.exp().cumsum(-1)
    if settings.order == "temperature last":
        deciding = order.log_softmax(-1).exp()
        return rank, log_p.gather(1, rank[:, None])[:, 0], total, deciding, deciding.cumsum(-1)
    return rank, log_p.gather(1, rank[:, None])[:, 0], total, log_p.exp(), total


def _truncated(rank: Tensor, own: Tensor, total: Tensor, p: Tensor, sums: Tensor, settings: RolloutSettings) -> Tensor:
    """Return log-probabilities where only a first part of the tokens, likeliest first, is kept.

    The first token that is left out counts as kept: rounding decides between it and the last one that is.
    """
    size = total.shape[-1]
    num_kept = torch.full_like(rank, min(settings.top_k or size, size))
    if settings.top_p < 1:
        wanted = settings.top_p * sums.gather(1, num_kept[:, None] - 1)
        num_kept = torch.minimum(num_kept, torch.searchsorted(sums.detach(), wanted.detach())[:, 0] + 1)
    if settings.min_p:
        least = (settings.min_p * p[:, :1]).detach()
        num_kept = torch.minimum(num_kept, torch.searchsorted(-p.detach(), -least, right=True)[:, 0])
    is_next = rank == num_kept
    num_kept = num_kept + is_next.to(num_kept)
    mass = total.gather(1, num_kept.clamp(min=1)[:, None] - 1)[:, 0]
    return torch.where(rank < num_kept, own - mass.log(), -math.inf)


def _of_kind(found: Tensor, kind: str) -> Tensor:
    if kind == "logarithm to base 2":
        return found / math.log(2)
    if kind == "logarithm to base 10":
        return found / math.log(10)
    if kind == "probability":
        return found.exp()
    if kind.endswith("decimals"):
        return found.round(decimals=int(kind.split()[2]))
    if kind.startswith("rounded"):
        dtype = torch.bfloat16 if kind.endswith("bfloat16") else torch.float16
        return found.to(dtype).double()
    return found
