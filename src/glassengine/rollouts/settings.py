"""Everything that an engine may do otherwise than the trainer, as one record of settings; words and effect of each.

The effect is computed from logits: what an engine with these settings reports for its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from glassengine.results.without_tensors import CauseKind
from glassengine.rollouts.formats import Sample


@dataclass(frozen=True)
class RolloutSettings:
    """How log-probabilities are made. The defaults are the trainer's: the model as it is, and plain log-softmax.

    Attributes:
        tokens: What the engine reads in place of the prompt of the file.
        weights: Which weights: "own", or the directory of others.
        scale: A tensor of the weights, and the factor that it is scaled by.
        config: A setting of the model, and its value.
        quantized: What matrices are rounded to: "fp8", "int8", "int4".
        head: Dtype of the product with the head alone.
        cache: Dtype of keys and values.
        routes: Whose experts: "own", or "file".
        attention: Implementation as transformers calls it; None for the model's.
        batch: Sequences that run together.
        dtype: Of all of the model; None for the trainer's.
        shift: Places that a reported value stands after its token.
        kind: What is reported in place of a natural logarithm of a probability.
        eos: Whether the end of the sequence may be sampled.
        temperature: Logits are divided by it.
        repetition: Logits of tokens that were there before are divided by it, or multiplied where negative.
        presence: Is subtracted of tokens that were generated before.
        frequency: Is subtracted once for each time.
        top_k: How many of the likeliest tokens are kept; 0 for all.
        top_p: Mass of the likeliest tokens that are kept.
        min_p: Least share of the largest probability that is kept.
        order: Whether the temperature is applied before tokens are left out: "temperature first", or "last".
        kept: Whose set of kept tokens: "all", or "file".
    """

    tokens: str = "as in the file"
    weights: str = "own"
    scale: tuple[str, float] | None = None
    config: tuple[str, float] | None = None
    quantized: str | None = None
    head: str | None = None
    cache: str | None = None
    routes: str = "own"
    attention: str | None = None
    batch: int = 8
    dtype: str | None = None
    shift: int = 0
    kind: str = "log-probability"
    eos: str = "allowed"
    temperature: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    order: str = "temperature first"
    kept: str = "all"

    def but(self, **changes: Any) -> RolloutSettings:
        """Return the same settings with some changes."""
        return replace(self, **changes)

    @property
    def of_run(self) -> tuple[Any, ...]:
        """What needs a run of the model of its own."""
        return tuple(getattr(self, name) for name in _OF_RUN)


_OF_RUN = (
    "tokens", "weights", "scale", "config", "quantized", "head", "cache", "routes", "attention", "batch", "dtype",
)  # fmt: skip

KIND_OF: dict[str, CauseKind] = {
    "tokens": "tokens", "weights": "weights", "scale": "weights", "config": "configuration", "quantized": "precision",
    "head": "precision", "cache": "precision", "dtype": "precision", "routes": "routes", "attention": "kernel",
    "batch": "kernel",
}  # fmt: skip
"""Setting -> kind of the cause; those that are not there are semantics of log-probabilities."""

ROUNDING = frozenset({"head", "cache", "dtype", "attention", "batch"})
"""Settings that legally change the last digits. A log-probability that is reported in fewer digits is one as well."""

CONTINUOUS = {"temperature": (0.2, 2.5), "repetition": (1.0, 1.8), "presence": (0.0, 2.0), "frequency": (0.0, 1.5)}
"""Setting -> range of values that are tried; they are refined."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "top_k": (1, 2, 3, 4, 5, 8, 10, 15, 20, 25, 30, 40, 50, 60, 64, 80, 100, 128, 200, 256),
    "top_p": (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "min_p": (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3),
}
"""Setting -> values that are tried."""
SINGLE: dict[str, tuple[Any, ...]] = {
    "shift": (1, -1),
    "kind": (
        "raw logit", "logarithm to base 2", "logarithm to base 10", "probability", "rounded to bfloat16",
        "rounded to float16",
    ),
    "eos": ("suppressed",),
    "kept": ("file",),
}  # fmt: skip
"""Setting -> values that need no run of the model."""
TOKENS = (
    "without its first token", "with the begin token twice", "without its last token", "without its last 2 tokens",
    "without its last 3 tokens", "without its last 4 tokens", "its last 4 tokens", "its last 8 tokens",
    "its last 16 tokens", "its last 32 tokens",
)  # fmt: skip


def is_rounding(name: str, value: Any) -> bool:
    """Whether a changed setting is legal rounding."""
    return name in ROUNDING or (name == "kind" and str(value).startswith("rounded"))


def changed(settings: RolloutSettings, base: RolloutSettings) -> dict[str, Any]:
    """Return the settings that differ."""
    return {
        one.name: getattr(settings, one.name)
        for one in fields(RolloutSettings)
        if getattr(settings, one.name) != getattr(base, one.name)
    }


def in_words(name: str, value: Any) -> str:
    """Return what an engine with a changed setting does."""
    if name == "scale":
        return f"{value[0]} is {value[1]:.4g} times the checkpoint's"
    if name == "config":
        return f"{value[0]} is {value[1]:g}" if value[1] else f"{value[0]} is left out"
    number = f"{value:.4g}" if isinstance(value, float) else str(value)
    if name == "order":
        return f"the temperature is applied {'after' if value.endswith('last') else 'before'} tokens are left out"
    texts = {
        "tokens": f"the engine reads the prompt {number}",
        "weights": f"the engine has the weights of {number}",
        "quantized": f"matrices are rounded to {number}",
        "head": f"the head runs in {number}",
        "cache": f"keys and values are kept in {number}",
        "dtype": f"the engine runs in {number}",
        "routes": "the engine takes other experts: those of the file",
        "attention": f"another attention kernel: {number}",
        "batch": f"another batch: {number} at a time",
        "shift": f"values stand {abs(value) if isinstance(value, int) else 0} place "
        + ("after" if isinstance(value, int) and value > 0 else "before")
        + " their tokens",
        "kind": f"values are of another kind: {number}",
        "eos": "the end of the sequence cannot be sampled",
        "kept": "probabilities are those of the kept set in the file",
    }
    names = {"repetition": "repetition penalty", "presence": "presence penalty", "frequency": "frequency penalty"}
    return texts.get(name) or f"{names.get(name, name)} {number}"


_MOST_DECIMALS = 5
Heated = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Rank of each token, its log-probability, sums of probabilities in order; probabilities that decide, their sums."""


class Tokens:
    """The tokens of the responses of some samples, one after the other.

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
        if settings.repetition != 1 or settings.presence != 0 or settings.frequency != 0:
            penalties = settings.repetition, settings.presence, settings.frequency
            if self._penalized is None or self._penalized[0] != penalties:
                self._penalized = penalties, self._with_penalties(settings)
            values = self._penalized[1]
        if settings.eos == "suppressed" and self.eos:
            values = values.index_fill(1, torch.tensor(self.eos), -math.inf)
        own = values.gather(1, ids)[:, 0]
        if settings.kept == "file":
            found = own / settings.temperature - self._of_kept(values / settings.temperature)
        elif not settings.top_k and settings.top_p >= 1 and not settings.min_p:
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
