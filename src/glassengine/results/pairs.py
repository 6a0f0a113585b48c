"""Tensors that were judged one by one, how many of each kind there are, and how many tokens agree."""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import msgspec

from glassengine.results.base import FLAGGED, VERDICTS, Lazy, Result, Verdict
from glassengine.results.figures import Figures, Summary, TensorValues

_TOGETHER = 256
"""Pairs that are compressed together."""
_MOST_OPEN = 32
"""Of these, how many are kept open: who looks at a step looks at all of it, several times."""

BY_GRID = "step of the quantization"

Tally = Counter[tuple[Verdict, str, bool]]
"""Verdict, what it rests on, whether its error was passed on -> how many pairs."""


@dataclass(frozen=True)
class Pair(Result):
    """One tensor of the baseline judged against one of the candidate.

    Attributes:
        step: 0 is the prefill, or the only forward.
        site: Of the baseline.
        candidate_site: Of the candidate.
        method: How the two were paired: "name", "name+fingerprint", "alias", "map", "output", "consumer", "content" (by
            what they compute), "region" (an op that the candidate does not have, judged where its region ends).
        confidence: Of the pairing, 0 to 1.
        verdict: "identical", "rounding", "suspicious" or "wrong".
        judged_by: What the verdict rests on: "reverse replay", "segment", "noise floor", "given tolerance", "tolerance
            (uncalibrated)", "bound of a sum" (of the terms of ranks) or "shape".
        figures: The difference; None where it was not worth measuring.
        noise_ratio: Error over the noise floor, in the worst slice.
        bound_ratio: Error over the rounding bound, of the worst element.
        level: Which implementation, of several.
        case: Name of the batch of prompts or inputs.
        inherited: Whether the error was carried in by the inputs.
        reason: What decided, where it was not the two ratios.
        baseline: Statistics of the baseline's tensor, where they were asked for.
        candidate: Statistics of the candidate's.
        abs_error: Statistics of |c - b|.
        rel_error: Statistics of |c - b| / |b|.
        rank: Process that had the tensor.
        dtype: Of the baseline's tensor, where known.
        shape: Likewise.
        values: Of the first that made an error, in a check; what `glass report` shows of its elements and axes.
    """

    step: int
    site: str
    candidate_site: str
    method: str
    confidence: float
    verdict: Verdict
    judged_by: str
    figures: Figures | None = None
    noise_ratio: float | None = None
    bound_ratio: float | None = None
    level: str | None = None
    case: str | None = None
    inherited: bool = False
    reason: str | None = None
    baseline: Summary | None = None
    candidate: Summary | None = None
    abs_error: Summary | None = None
    rel_error: Summary | None = None
    rank: int = 0
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    values: TensorValues | None = None

    @classmethod
    def of_weight(
        cls,
        name: str,
        verdict: Verdict,
        noise_ratio: float | None,
        reason: str | None,
        *,
        level: str,
        judged_by: str = BY_GRID,
        candidate_site: str | None = None,
    ) -> Pair:
        """Return the pair of a weight of a quantized candidate.

        Args:
            name: Of the baseline's parameter.
            verdict: On it.
            noise_ratio: Its error in steps of its grid, root mean square.
            reason: What is wrong with it.
            level: Which implementation.
            judged_by: What the verdict rests on.
            candidate_site: Of the candidate; None for the baseline's.
        """
        site = f"{name}:param"
        return cls(
            0,
            site,
            candidate_site or site,
            "name",
            1.0,
            verdict,
            judged_by,
            noise_ratio=noise_ratio,
            level=level,
            reason=reason,
        )


class Packed(Lazy[Pair]):
    """Pairs in a tenth of their memory; equal to any other sequence of the same ones.

    Attributes:
        tally: Of all of them.
    """

    def __init__(self) -> None:
        self.tally: Tally = Counter()
        self._verdicts = bytearray()
        self._packed: list[bytes] = []
        self._last: list[Pair] = []
        self._changed: dict[int, Pair] = {}
        self._open: dict[int, list[Pair]] = {}

    def append(self, pair: Pair) -> None:
        """Add a pair."""
        self.tally[_tallied(pair)] += 1
        self._verdicts.append(VERDICTS.index(pair.verdict))
        self._last.append(pair)
        if len(self._last) == _TOGETHER:
            self._packed.append(zlib.compress(msgspec.msgpack.encode(self._last), 1))
            self._last = []

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._verdicts)

    def __iter__(self) -> Iterator[Pair]:
        """Yield all."""
        return map(self._item, range(len(self)))

    def __setitem__(self, place: int, pair: Pair) -> None:
        """Replace a pair; one of few."""
        self.tally[_tallied(self[place])] -= 1
        self.tally[_tallied(pair)] += 1
        self._verdicts[place] = VERDICTS.index(pair.verdict)
        self._changed[place] = pair

    def flagged(self) -> list[int]:
        """Return the places of those that are suspicious or wrong."""
        least = VERDICTS.index(FLAGGED[0])
        return [place for place, verdict in enumerate(self._verdicts) if verdict >= least]

    def _item(self, place: int) -> Pair:
        if place in self._changed:
            return self._changed[place]
        number, at = divmod(place, _TOGETHER)
        if number == len(self._packed):
            return self._last[at]
        found = self._open.get(number)
        if found is None:
            if len(self._open) == _MOST_OPEN:
                del self._open[next(iter(self._open))]
            found = self._open[number] = _decoder().decode(zlib.decompress(self._packed[number]))
        return found[at]


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[list[Pair]]:
    return msgspec.msgpack.Decoder(list[Pair])


def _tallied(pair: Pair) -> tuple[Verdict, str, bool]:
    return pair.verdict, pair.judged_by, pair.inherited


def tally_of(pairs: Sequence[Pair]) -> Tally:
    """Return how many pairs there are of each kind."""
    return pairs.tally if isinstance(pairs, Packed) else Counter(map(_tallied, pairs))


def severity(pair: Pair) -> tuple[float, ...]:
    """Return a key that sorts pairs: by verdict, then different shapes before non-finite before size of the error."""
    rank = float(VERDICTS.index(pair.verdict))
    if pair.figures is None:
        return (rank, 1.0)
    size = -math.inf if math.isnan(pair.figures.snr_db) else -pair.figures.snr_db
    return (rank, 0.0, float(pair.figures.num_nonfinite_mismatch > 0), size)


class Counts(TypedDict):
    """How many tensors were compared, by verdict, and how many could not be.

    Attributes:
        compared: Pairs; the four verdicts add up to it.
        identical: Of these.
        rounding: Of these.
        suspicious: Of these.
        wrong: Of these.
        inherited: Pairs whose error was carried in by the inputs.
        unmatched_baseline: Tensors of the baseline without a counterpart.
        unmatched_candidate: Tensors of the candidate without a counterpart.
        not_recorded: Tensors of which no values were recorded.
        missing_steps: Steps that only one side has.
    """

    compared: int
    identical: int
    rounding: int
    suspicious: int
    wrong: int
    inherited: int
    unmatched_baseline: int
    unmatched_candidate: int
    not_recorded: int
    missing_steps: int


class TokenAgreement(TypedDict):
    """How much a disagreement of the logits of the last position matters to the user of the model.

    Attributes:
        num_tokens: Over all steps.
        token_agreement: Share of tokens that are the same, ties included; null without tokens.
        num_ties: Tokens that differ because rounding decides between two.
        mean_kl: Mean divergence of the next token, in nats, where both sides have finite logits; null where none has.
        max_kl: Likewise of the worst step.
        first_changed_token: Case, step, row and both tokens.
    """

    num_tokens: int
    token_agreement: float | None
    num_ties: int
    mean_kl: float | None
    max_kl: float | None
    first_changed_token: str | None


def counts_of(
    pairs: Sequence[Pair],
    *,
    unmatched_baseline: int,
    unmatched_candidate: int,
    not_recorded: int,
    missing_steps: int = 0,
) -> Counts:
    """Return the counts that every comparison has: of `pairs` by verdict, and of what could not be paired."""
    tally = tally_of(pairs)
    found: dict[str, int] = {
        "compared": len(pairs),
        **{name: sum(n for (own, _, _), n in tally.items() if own == name) for name in VERDICTS},
        "inherited": sum(n for (_, _, is_inherited), n in tally.items() if is_inherited),
        "unmatched_baseline": unmatched_baseline,
        "unmatched_candidate": unmatched_candidate,
        "not_recorded": not_recorded,
        "missing_steps": missing_steps,
    }
    return cast("Counts", found)


def added(first: Counts, second: Counts) -> Counts:
    """Return the counts of two parts of one comparison."""
    left, right = (cast("Mapping[str, int]", counts) for counts in (first, second))
    return cast("Counts", {name: number + right[name] for name, number in left.items()})
