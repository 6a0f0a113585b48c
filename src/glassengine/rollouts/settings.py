"""Everything that an engine may do otherwise than the trainer, as one record of settings, and words for each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from glassengine.results.without_tensors import CauseKind


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

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def keeps_all(self) -> bool:
        """Whether no token is left out."""
        return not self.top_k and self.top_p >= 1 and not self.min_p


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
