"""One form for the rollouts of all frameworks: token ids, reported log-probabilities, masks, routes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import CorruptError

_MOST_ID = 1 << 31


@dataclass(frozen=True)
class Sample:
    """One prompt with one response.

    Attributes:
        prompt: Token ids.
        response: Token ids: generated ones, and those of tools between them.
        logprobs: What the engine reported for each token of the response, in float64; NaN where it reported nothing.
        routes: Experts of each token but the last one: [tokens - 1, layers, k], or flat; None where unknown.
        kept: The tokens that sampling kept, for each token of the response; None where unknown.
        turn: Version of the weights, as the file words it.
    """

    prompt: list[int]
    response: list[int]
    logprobs: Tensor
    routes: Tensor | None = None
    kept: list[list[int]] | None = None
    turn: str | None = None


@dataclass(frozen=True)
class Rollout:
    """What a file holds.

    Attributes:
        format: Its name: "verl", "TRL", ...
        samples: In the order of the file.
        temperature: That the file states; None where it states none.
        notes: What was left out, and why.
    """

    format: str
    samples: list[Sample]
    temperature: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens with a log-probability."""
        return sum(int(one.logprobs.isfinite().sum()) for one in self.samples)

    @property
    def versions(self) -> list[str]:
        """All versions of the weights, in order."""
        return sorted({one.turn for one in self.samples if one.turn is not None})


def sample(
    prompt: Iterable[Any],
    response: Iterable[Any],
    logprobs: Iterable[Any],
    mask: Sequence[Any] | None = None,
    **more: Any,
) -> Sample:
    """Return a sample of plain numbers.

    Args:
        prompt: Token ids.
        response: Token ids.
        logprobs: One a token of the response; None where there is none.
        mask: Zero for tokens that the engine did not generate.
        more: Other attributes.

    Raises:
        CorruptError: These are no token ids, or the numbers of values differ.
    """
    ours, theirs = ids(prompt), ids(response)
    values = [math.nan if value is None else number(value) for value in logprobs]
    if len(values) != len(theirs) or (mask is not None and len(mask) != len(theirs)):
        got = f"{len(theirs)} tokens, {len(values)} log-probabilities"
        raise CorruptError(
            "a sample has another number of log-probabilities than tokens",
            got=got if mask is None else f"{got}, a mask of {len(mask)}",
            hint="a server that joins tokens to characters leaves some out: ask it for token ids",
        )
    if mask is not None:
        values = [value if keep else math.nan for value, keep in zip(values, mask, strict=True)]
    found = torch.tensor(values, dtype=torch.float64)
    return Sample(ours, theirs, torch.where(found.isfinite(), found, math.nan), **more)


def ids(values: Iterable[Any]) -> list[int]:
    """Return token ids.

    Raises:
        CorruptError: Something else is there.
    """
    found = [int(value) if isinstance(value, (int, float)) and value == int(value) else -1 for value in values]
    if any(not 0 <= value < _MOST_ID for value in found):
        raise CorruptError("token ids are whole numbers from 0", got="another value")
    return found


def number(value: Any) -> float:
    """Return a number.

    Raises:
        CorruptError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CorruptError("a log-probability is a number", got=type(value).__name__)
    return float(value)
