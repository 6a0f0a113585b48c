"""The gap between engine and trainer for each token, explained by settings of the engine, or judged as rounding.

The search tries one change of the settings after the other, several states at a time. No run in a dtype makes the
roundings of another engine again, so the size decides: that of the rest of the gap, over what an engine in a dtype and
the trainer differ by from float64, here, on these tokens.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassengine.rollouts.formats import Sample
from glassengine.rollouts.settings import CHOICES, CONTINUOUS, SINGLE, TOKENS, Logits, RolloutSettings, Tokens, changed
from glassengine.rollouts.trainer import Trainer, configurations

MOST_GAP = 20.0
"""Nats of a token that one side cannot have."""
_MOST_BYTES = 1 << 30
_FREE_SHARE = 0.75
"""Share of the tokens that count where routers are free: a route that flips changes a token altogether."""


class Gap:
    """Engine minus trainer of the tokens of some samples."""

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
_DTYPES = ("float32", "float16", "bfloat16")


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
    variants = {dtype: settings.but(dtype=dtype) for dtype in _DTYPES}
    if gap.trainer.dtype == "float32" and settings.cache is None and gap.trainer.keeps_keys:
        variants |= {f"{dtype} of keys and values": settings.but(cache=dtype) for dtype in _DTYPES[1:]}
    for dtype, variant in variants.items():
        rounded = gap.values(variant)[known] - exact[known]
        rounded = rounded[rounded.isfinite()]
        leaning[dtype] = _lean(rounded, exact[known]) if len(rounded) == len(rest) else 0.0
        size = math.hypot(_size(rounded, is_free), _size(own, is_free), _REPORTED)
        ratios[dtype] = _size(rest, is_free) / size if size else (0.0 if not rest.any() else math.inf)
    own_dtype = gap.trainer.dtype if gap.trainer.dtype in _DTYPES else _DTYPES[0]
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
    is_coarser = dtype not in _DTYPES or _DTYPES.index(dtype) > _DTYPES.index(own)
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


_MOST_CAUSES, _MOST_STATES = 3, 3
_LEAST_GAIN = 0.8
"""A change counts where it leaves less than this of the gap."""
_ALMOST_ALL = 0.05
"""The same where rounding alone explains the gap."""
_SAME = 1.1
"""Losses that differ by less are equal, and the simpler change is taken."""
_ORDER = (
    "tokens", "shift", "kind", "eos", "kept", "temperature", "repetition", "top_k", "top_p", "min_p", "presence",
    "frequency", "order", "weights", "config", "routes", "quantized", "head", "cache", "batch", "attention", "scale",
)  # fmt: skip
_TEMPERATURES = tuple(0.3 + 0.05 * step for step in range(25))
_GOLDEN = (math.sqrt(5) - 1) / 2
_PROBES = 6
_TENSORS = 3


@dataclass(frozen=True)
class GapExplanation:
    """What explains a gap.

    Attributes:
        settings: Of the engine.
        loss: What they leave.
        alike: Other settings that leave as little.
    """

    settings: RolloutSettings
    loss: float
    alike: tuple[RolloutSettings, ...] = ()


def search(
    gap: Gap,
    start: RolloutSettings,
    first: RolloutSettings,
    floor: float,
    is_rounding: Callable[[RolloutSettings], bool],
) -> GapExplanation:
    """Return the settings that explain a gap best.

    Args:
        gap: The gap.
        start: Settings of the trainer.
        first: The same, with what is known of the engine.
        floor: Mean gap that rounding in the trainer's own dtype makes.
        is_rounding: Whether settings leave no more than rounding.
    """
    states: list[RolloutSettings] = [first]
    alike: tuple[RolloutSettings, ...] = ()
    # Of many changes some one has the direction of what rounding did: only one that leaves nothing is believed.
    is_enough = is_rounding(first)
    least_gain = _ALMOST_ALL if is_enough else _LEAST_GAIN
    for number in range(_MOST_CAUSES):
        best = gap.loss(states[0])
        if best <= 1.5 * floor or (number and is_rounding(states[0])):
            break
        tries = {one for state in states for one in _tries(gap, state, start, not is_enough)}
        kept: dict[frozenset[str], RolloutSettings] = {}
        for one in sorted(tries, key=lambda one: (max(gap.loss(one), floor), _rank(one, start))):
            kept.setdefault(frozenset(changed(one, start)), one)
            if len(kept) == 2 * _MOST_STATES:
                break
        refitted = sorted({_refitted(gap, one, start) for one in kept.values()}, key=gap.loss)
        if not refitted or gap.loss(refitted[0]) > least_gain * best or best - gap.loss(refitted[0]) < floor / 3:
            break
        # Those that leave as little as the best: of these the one with the fewest and likeliest changes.
        as_good = [one for one in refitted if _is_same(gap, one, refitted[0], floor)]
        simplest = min(as_good, key=lambda one: (_rank(one, start), gap.loss(one)))
        states = [simplest, *(one for one in refitted if one != simplest)][:_MOST_STATES]
        if number == 0:
            alike = tuple(one for one in refitted if one != simplest and _is_same(gap, one, simplest, floor))
    best_of = _pruned(gap, states[0], start, floor)
    return GapExplanation(best_of, gap.loss(best_of), alike if len(changed(best_of, start)) == 1 else ())


def _is_same(gap: Gap, one: RolloutSettings, other: RolloutSettings, floor: float) -> bool:
    return gap.loss(one) <= max(_SAME * gap.loss(other), 1.5 * floor)


def _rank(one: RolloutSettings, start: RolloutSettings) -> tuple[int, ...]:
    names = changed(one, start)
    return len(names), *sorted(map(_ORDER.index, names))


def _pruned(gap: Gap, found: RolloutSettings, start: RolloutSettings, floor: float) -> RolloutSettings:
    """Return settings without the changes that explain nothing beside the others."""
    for name in sorted(changed(found, start), key=_ORDER.index, reverse=True):
        fewer = found.but(**{name: getattr(start, name)})
        if fewer != start and _is_same(gap, fewer, found, floor):
            found = fewer
    return found


def _tries(gap: Gap, state: RolloutSettings, start: RolloutSettings, has_scales: bool) -> Iterator[RolloutSettings]:
    """Yield settings with one more change, or two where each alone hides the other."""
    known = changed(state, start)

    def new(**changes: Any) -> Iterator[RolloutSettings]:
        one = state.but(**changes)
        if not known.keys() & changes.keys() and one != state:
            yield one

    has_kept = all(one.kept is not None for one in gap.samples)
    for name, choices in {**SINGLE, **CHOICES}.items():
        for value in choices if name != "kept" or has_kept else ():
            yield from new(**{name: value})
    for name in CONTINUOUS.keys() - known.keys():
        yield from new(**{name: _best(gap, state, name, *CONTINUOUS[name])})
    if "temperature" not in known:
        cuts = [(name, value) for name, choices in CHOICES.items() if name not in known for value in choices]
        for temperature, order in itertools.product(_TEMPERATURES, ("temperature first", "temperature last")):
            joint = [state.but(temperature=temperature, order=order, **{name: value}) for name, value in cuts]
            if joint:
                yield min(joint, key=gap.loss)
    yield from (one for changes in _runs(gap) for one in new(**changes))
    if gap.tokens.decimals is not None:
        yield from new(kind=f"rounded to {gap.tokens.decimals} decimals")
    if has_scales:
        yield from (one for changes in _scaled(gap, state) for one in new(**changes))


def _runs(gap: Gap) -> Iterator[dict[str, Any]]:
    """Yield the changes that need a run of the model each."""
    trainer = gap.trainer
    yield from ({"tokens": how} for how in TOKENS if trainer.is_possible(gap.samples, how))
    yield from ({"weights": name} for name in trainer.other_weights)
    yield from ({"config": one} for one in configurations(trainer.module))
    yield from ({"quantized": how} for how in ("fp8", "int8", "int4"))
    for dtype in ("bfloat16", "float16"):
        if dtype != trainer.dtype:
            yield {"head": dtype}
            if trainer.keeps_keys:
                yield {"cache": dtype}
    yield from ({"attention": name} for name in trainer.kernels)
    yield {"batch": 1}
    if trainer.gates and any(one.routes is not None for one in gap.samples):
        yield {"routes": "file"}


def _scaled(gap: Gap, state: RolloutSettings) -> Iterator[dict[str, Any]]:
    """Yield tensors that are scaled: those whose direction, by a backward, the gap has, and the best factor."""
    module = gap.trainer.module
    if state.weights != "own" or state.quantized or state.scale is not None:
        return
    names = {name: one for name, one in module.named_parameters() if one.is_floating_point()}
    before = {name: one.requires_grad for name, one in names.items()}
    rest = (gap.tokens.engine - gap.values(state)).nan_to_num(0.0, 0.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    try:
        for one in names.values():
            one.requires_grad_(True)
        with torch.enable_grad():
            logits = Logits(gap.trainer.logits(gap.samples, state), gap.tokens, gap.trainer.eos)
            found = logits.reported(state)
        found = torch.where(found.isfinite(), found, 0.0)

        def toward(direction: torch.Tensor) -> dict[str, float]:
            grads = torch.autograd.grad(found, list(names.values()), direction, retain_graph=True, allow_unused=True)
            return {
                name: 0.0 if grad is None else float((grad.double() * one.detach().double()).sum())
                for (name, one), grad in zip(names.items(), grads, strict=True)
            }

        along = toward(rest)
        size = dict.fromkeys(names, 0.0)
        for _ in range(_PROBES):
            signs = (torch.randint(0, 2, rest.shape, generator=generator) * 2 - 1).double()
            for name, value in toward(signs).items():
                size[name] += value * value / _PROBES
    finally:
        for name, one in names.items():
            one.requires_grad_(before[name])
    steps = {name: along[name] / size[name] for name in names if size[name] > 0}
    for name in sorted(steps, key=lambda name: -along[name] * steps[name])[:_TENSORS]:
        factor = 1 + max(-0.9, min(3.0, steps[name]))
        best = _golden(_scaled_loss(gap, state, name), factor - 0.3, factor + 0.3, 7)
        near = round(best, 2)
        if near <= 0:
            continue
        yield {"scale": (name, best)}
        yield {"scale": (name, near)}


def _scaled_loss(gap: Gap, state: RolloutSettings, name: str) -> Callable[[float], float]:
    return lambda factor: gap.loss(state.but(scale=(name, factor)))


def _best(gap: Gap, state: RolloutSettings, name: str, low: float, high: float) -> float:
    """Return the best value of a continuous setting: a grid first, then by golden section around its best."""
    width = (high - low) / 10
    steps = (low + width * step for step in range(11))
    best = min(steps, key=lambda value: gap.loss(state.but(**{name: value})))
    return _best_near(gap, state, name, best, width)


def _golden(loss: Callable[[float], float], low: float, high: float, steps: int) -> float:
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(right)
    return left if at_left < at_right else right


def _refitted(gap: Gap, found: RolloutSettings, start: RolloutSettings) -> RolloutSettings:
    """Return the settings with each value once more, given the others."""
    names = changed(found, start)
    cuts = [name for name in CHOICES if name in names]
    hot = [name for name in CONTINUOUS if name in names]
    if not cuts and len(hot) < 2 and "config" not in names and "scale" not in names:
        return found
    for _ in range(2 if len(names) > 1 else 1):
        for name in hot:
            value = getattr(found, name)
            width = 0.1 * (CONTINUOUS[name][1] - CONTINUOUS[name][0])
            options = [found.but(**{cut: near}) for cut in cuts for near in _near(cut, getattr(found, cut))] or [found]
            fitted = [
                one.but(**{name: _best_near(gap, one, name, value, width)}) for one in sorted(options, key=gap.loss)[:4]
            ]
            found = min([found, *fitted], key=gap.loss)
        for cut in cuts:
            found = min([found, *(found.but(**{cut: near}) for near in _near(cut, getattr(found, cut)))], key=gap.loss)
    if found.scale is not None and len(names) > 1:
        name, factor = found.scale
        best = _golden(_scaled_loss(gap, found, name), factor - 0.15, factor + 0.15, 8)
        options = [found.but(scale=(name, value)) for value in (round(best, 2), best)]
        found = min([*options, found], key=gap.loss)
    return found


def _best_near(gap: Gap, state: RolloutSettings, name: str, value: float, width: float) -> float:
    def loss(x: float) -> float:
        return gap.loss(state.but(**{name: x}))

    low, high = CONTINUOUS[name]
    found = _golden(loss, max(low, value - width), min(high, value + width), 10)
    near = round(found, 2)
    return near if loss(near) <= 1.02 * loss(found) + 1e-9 else found


def _near(name: str, value: Any) -> list[Any]:
    """Return values of a setting around one, round ones first."""
    choices = sorted(CHOICES[name], key=lambda one: abs(one - value))[:4]
    if name == "top_k":
        return [*choices, *(one for one in range(value - 3, value + 4) if one > 0)]
    step = 0.01 if name == "top_p" else 0.005
    return [*choices, *(round(value + step * n, 4) for n in (-2, -1, 1, 2) if 0 < value + step * n < 1)]


def shares(gap: Gap, found: RolloutSettings, start: RolloutSettings) -> tuple[dict[str, float], float]:
    """Return the share of each change in the mean gap by Shapley's rule, and what all of them leave."""
    start = start.but(order=found.order)  # which changes nothing by itself
    names = list(changed(found, start))
    most = gap.loss(start)

    def loss(some: frozenset[str]) -> float:
        return gap.loss(start.but(**{name: getattr(found, name) for name in some}))

    total = dict.fromkeys(names, 0.0)
    orders = list(itertools.permutations(names))
    for order in orders:
        for at, name in enumerate(order):
            before = frozenset(order[:at])
            total[name] += (loss(before) - loss(before | {name})) / len(orders) / max(most, 1e-300)
    return total, loss(frozenset(names)) / max(most, 1e-300)
