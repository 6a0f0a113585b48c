"""The result of a rollout beside its checkpoint: the gap, its causes with their shares, and the worst tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glassengine.results.base import Result

CauseKind = Literal["tokens", "semantics", "weights", "configuration", "precision", "routes", "kernel"]


@dataclass(frozen=True)
class RolloutCause(Result):
    """One cause of the gap between the log-probabilities of an engine and those of the checkpoint.

    Attributes:
        kind: "tokens", "semantics" (what is reported), "weights", "configuration", "precision", "routes", "kernel".
        setting: What differs: "temperature".
        value: Of the engine: "0.7".
        text: What the engine does, in words.
        share: Of the mean gap, by Shapley's rule; it may be negative where causes cancel.
        is_rounding: Whether it changes the last digits only, legally.
        alike: Other changes that explain the gap as well, in words.
    """

    kind: CauseKind
    setting: str
    value: str
    text: str
    share: float
    is_rounding: bool = False
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutToken(Result):
    """A token with its two log-probabilities.

    Attributes:
        sample: Number of its sample in the file, from 0.
        place: In the response, from 0.
        token: Its id.
        text: The token; None without a tokenizer.
        engine: What the engine reported.
        trainer: What the checkpoint gives.
    """

    sample: int
    place: int
    token: int
    text: str | None
    engine: float
    trainer: float


@dataclass(frozen=True)
class RolloutComparison(Result):
    """Log-probabilities that an engine reported, beside those of the checkpoint.

    Attributes:
        format: Of the file.
        num_samples: How many responses.
        num_tokens: How many tokens were compared.
        num_searched: Of how many of them the causes were searched.
        num_runs: Runs of the model.
        dtype: Of the checkpoint's run.
        mean: Mean of the gap, engine minus trainer.
        rms: Root of its mean square.
        largest: Largest absolute value.
        k3: Mean of r - 1 - log r, r = exp(trainer - engine): estimates KL(engine, trainer) in nats.
        mean_error: exp of the mean absolute gap.
        outside: Share of tokens whose ratio of probabilities is outside of [0.9, 1.1].
        positive: Share of tokens that the engine calls likelier.
        slope: Of the engine's values over the trainer's; None where the trainer's are all the same.
        num_impossible: Tokens that have no finite value on one side.
        causes: The largest share first.
        rest: Share of the mean gap that the causes leave.
        rest_is: What the rest is, in words: "rounding in bfloat16".
        rounding: Dtype -> size of the rest over the size of rounding in it.
        found: Whether the gap is "none", "rounding", "mistake", "unexplained" or "unknown": undecided.
        worst: Tokens with the largest gaps.
        curve: Pairs of the two log-probabilities (trainer, engine) of at most 600 tokens, in order of the trainer's.
        versions: Versions of the weights that the file names.
    """

    format: str
    num_samples: int
    num_tokens: int
    num_searched: int
    num_runs: int
    dtype: str
    mean: float
    rms: float
    largest: float
    k3: float
    mean_error: float
    outside: float
    positive: float
    slope: float | None
    num_impossible: int
    causes: tuple[RolloutCause, ...]
    rest: float
    rest_is: str
    rounding: dict[str, float]
    found: Literal["none", "rounding", "mistake", "unexplained", "unknown"]
    worst: tuple[RolloutToken, ...]
    curve: tuple[tuple[float, float], ...] = ()
    versions: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Return the answer in a sentence."""
        rest = f"the rest ({self.rest:.0%}) is {self.rest_is}"
        told = "; ".join(f"{one.text} ({one.share:.0%} of the gap)" for one in self.causes)
        told += "; they cancel in part" if any(one.share < 0 for one in self.causes) else ""
        if self.found == "none":
            return "engine and trainer report the same log-probabilities"
        if self.found == "rounding":
            return f"this gap is {self.rest_is}" if not told else f"this gap is rounding: {told}; {rest}"
        if self.found == "unknown":
            return f"undecided: the gap is {self.rest_is}"
        what = "this gap is a mistake"
        return f"{what}: {told}; {rest}" if told else f"{what}: {self.rest_is}"
