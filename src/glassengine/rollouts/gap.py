"""The gap between engine and trainer for each token, under settings that may explain it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glassengine.rollouts.reported import Logits, Tokens
from glassengine.rollouts.samples import Sample
from glassengine.rollouts.settings import RolloutSettings
from glassengine.rollouts.trainer import Trainer

MOST_GAP = 20.0
"""Nats of a token that one side cannot have."""
_MOST_BYTES = 1 << 30
_FREE_SHARE = 0.75
"""Share of the tokens that count where routers are free: a route that flips changes a token altogether."""


class Gap:
    """Engine minus trainer of the tokens of some samples.

    Args:
        trainer: The model.
        samples: Some.
        base: Settings of the trainer.
    """

    def __init__(self, trainer: Trainer, samples: Sequence[Sample], base: RolloutSettings) -> None:
        self.trainer, self.samples, self.base = trainer, list(samples), base
        self.tokens = Tokens(self.samples)
        self.is_free = bool(trainer.gates) and not all(one.routes is not None for one in samples)
        self._logits: OrderedDict[tuple[Any, ...], Logits] = OrderedDict()
        self._losses: dict[RolloutSettings, float] = {}
        self._most = max(3, _MOST_BYTES // (24 * max(1, len(self.tokens.ids) * trainer.vocab_size)))

    def logits(self, settings: RolloutSettings) -> Logits:
        """Return the logits of a run; the last ones are held."""
        key = settings.of_run
        if key not in self._logits:
            with torch.no_grad():
                values = self.trainer.logits(self.samples, settings)
            self._logits[key] = Logits(values, self.tokens, self.trainer.eos)
            while len(self._logits) > self._most:
                self._logits.popitem(last=False)
        self._logits.move_to_end(key)
        return self._logits[key]

    def values(self, settings: RolloutSettings) -> Tensor:
        """Return what an engine with these settings reports."""
        with torch.no_grad():
            return self.logits(settings).reported(settings)

    def of(self, settings: RolloutSettings) -> Tensor:
        """Return the gap of the tokens that both sides have; one that only the engine can have counts as `MOST_GAP`."""
        values = self.values(settings)
        found = (self.tokens.engine - values)[self.tokens.engine.isfinite() & ~values.isnan()]
        return found.nan_to_num(MOST_GAP, MOST_GAP, -MOST_GAP).clamp(-MOST_GAP, MOST_GAP)

    def loss(self, settings: RolloutSettings) -> float:
        """Return the mean absolute gap; of the smaller ones where routers are free."""
        if settings not in self._losses:
            found = self.of(settings).abs()
            if self.is_free and settings.routes == "own":
                found = found.sort().values[: max(1, int(len(found) * _FREE_SHARE))]
            self._losses[settings] = float(found.mean()) if len(found) else MOST_GAP
        return self._losses[settings]
