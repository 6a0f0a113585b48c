"""The gap between engine and trainer for each token, under settings that may explain it; and whether it is rounding.

No run in a dtype makes the roundings of another engine again, so the size decides: that of the rest of the gap, over
what an engine in a dtype and the trainer differ by from float64, here, on these tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassengine.rollouts.formats import Sample
from glassengine.rollouts.settings import Logits, RolloutSettings, Tokens
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


_MOST, _TIGHT = 1.6, 1.3
"""Largest size of a gap over that of rounding; measured ones are 0.4 to 1.15."""
_LEAST = 0.5
"""Smallest size of a gap that is rounding in a dtype with fewer digits than the trainer's."""
_MOST_LEAN = 5.0
"""Most standard errors that rounding leans to one side, or along the log-probability."""
_ALIKE = 1.5
_REPORTED = 2.0**-22
"""Error of a log-probability that an engine computes in float32, from float32 logits."""
_ORDER = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class PrecisionGap:
    """What the rest of a gap is.

    Attributes:
        dtype: Rounding in this one explains it; None where none does.
        ratios: Dtype -> size of the rest over that of rounding.
        leans: Whether the gap has a direction, which rounding has not.
        is_wide: Whether rounding flips routes of experts, so that a mistake may hide in it.
    """

    dtype: str | None
    ratios: dict[str, float]
    leans: bool
    is_wide: bool

    @property
    def is_between(self) -> bool:
        """Whether it is smaller than rounding in a coarser dtype: a part of an engine in that dtype may make it."""
        return self.dtype is None and not self.leans and min(self.ratios.values()) < _LEAST

    @property
    def is_tight(self) -> bool:
        """Whether a mistake of a size that matters has no room in it."""
        return self.dtype is not None and self.ratios[self.dtype] <= _TIGHT


def judge_rest(gap: Gap, settings: RolloutSettings, engine_dtype: str | None) -> PrecisionGap:
    """Return which rounding the gap is that settings leave.

    Args:
        gap: The gap.
        settings: Of the engine.
        engine_dtype: The only dtype that the engine may have; None for any.
    """
    is_free = gap.is_free and settings.routes == "own"
    settings = settings.but(dtype=None)
    plain = gap.values(settings)
    exact = gap.values(settings.but(dtype="float64"))
    known = gap.tokens.engine.isfinite() & plain.isfinite() & exact.isfinite()
    rest, own = (gap.tokens.engine - plain)[known], (plain - exact)[known]
    ratios: dict[str, float] = {}
    leaning: dict[str, float] = {}
    variants = {dtype: settings.but(dtype=dtype) for dtype in _ORDER}
    if gap.trainer.dtype == "float32" and settings.cache is None and gap.trainer.keeps_keys:
        variants |= {f"{dtype} of keys and values": settings.but(cache=dtype) for dtype in _ORDER[1:]}
    for dtype, variant in variants.items():
        rounded = gap.values(variant)[known] - exact[known]
        rounded = rounded[rounded.isfinite()]
        leaning[dtype] = _lean(rounded, exact[known]) if len(rounded) == len(rest) else 0.0
        size = math.hypot(_size(rounded, is_free), _size(own, is_free), _REPORTED)
        ratios[dtype] = _size(rest, is_free) / size if size else (0.0 if not rest.any() else math.inf)
    own_dtype = gap.trainer.dtype if gap.trainer.dtype in _ORDER else _ORDER[0]
    # Kernels may round to one side in float32, and no mistake is that small.
    is_large = ratios[own_dtype] > (_MOST if own_dtype == "float32" else 1)
    lean = _lean(rest, plain[known]) if is_large else 0.0
    # The trainer's own first: of a trainer in bfloat16, an engine in float32 differs as much as one in bfloat16.
    order = [own_dtype, *(dtype for dtype in ratios if dtype != own_dtype)]
    fitting = [dtype for dtype in order if engine_dtype in (None, dtype) and _fits(dtype, own_dtype, ratios)]
    # Weights that are rounded alike lean alike.
    found = next((dtype for dtype in fitting if lean <= max(_MOST_LEAN, _ALIKE * leaning[dtype])), None)
    leans = found is None and lean > _MOST_LEAN
    is_wide = is_free and found not in (None, "float32")
    if is_wide and found is not None:
        # Medians tell what most tokens have; those with other experts may not be more or larger than by rounding.
        rounded = (gap.values(variants[found]) - exact)[known].nan_to_num(0.0, 0.0, 0.0)
        size = math.hypot(_size(rounded, False), _size(own, False))
        is_wide = not (1 / _TIGHT <= ratios[found] <= _TIGHT and _size(rest, False) <= _MOST * size)
    return PrecisionGap(found, ratios, leans, is_wide)


def rounding_floor(gap: Gap, settings: RolloutSettings) -> float:
    """Return the mean gap that rounding in the trainer's own dtype makes between two engines."""
    own, exact = gap.values(settings), gap.values(settings.but(dtype="float64"))
    known = own.isfinite() & exact.isfinite()
    if not known.any():
        return 0.0
    own, exact = own[known], exact[known]
    return max(math.sqrt(2) * float((own - exact).abs().mean()), _REPORTED)


def _fits(dtype: str, own: str, ratios: dict[str, float]) -> bool:
    is_coarser = dtype not in _ORDER or _ORDER.index(dtype) > _ORDER.index(own)
    return ratios[dtype] <= _MOST and (not is_coarser or ratios[dtype] >= _LEAST)


def _size(values: Tensor, is_free: bool) -> float:
    """Return the root of the mean square; the median where few values are far larger than the others."""
    if not len(values):
        return 0.0
    return float(values.abs().median()) if is_free else float(values.square().mean().sqrt())


def _lean(rest: Tensor, trainer: Tensor) -> float:
    """Return how many standard errors mean and slope of a gap are from 0, of values that are cut at four deviations."""
    if len(rest) < 8 or not rest.any():
        return 0.0
    cut = 6 * float(rest.abs().median())
    rest = rest.clamp(-cut, cut) if cut else rest
    error = float(rest.std()) / math.sqrt(len(rest))
    centered = trainer - trainer.mean()
    length = float(centered.square().sum())
    slope = 0.0 if not length else float((centered * rest).sum()) / length
    of_slope = float((rest - rest.mean()).std()) / math.sqrt(length) if length else math.inf
    return max(abs(float(rest.mean())) / error if error else math.inf, abs(slope) / of_slope if of_slope else 0.0)
