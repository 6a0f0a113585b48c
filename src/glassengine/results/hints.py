"""Kinds of mistakes, one mistake with what it changes and leaves unexplained, and mistakes of quantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from glassengine.results.base import Result, Verdict

Kind = Literal[
    "scale",
    "bias missing",
    "mask",
    "position",
    "activation",
    "swapped",
    "permuted",
    "transposed",
    "stale",
    "dtype",
    "eps",
    "other",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

TRIED = "tried"
"""Evidence of a mistake that was made in the baseline's ops, and compared with what the candidate made."""


@dataclass(frozen=True)
class Altered(Result):
    """What of the baseline is changed to make what the candidate made.

    Attributes:
        ops: Ops of the baseline that are changed, by site.
        operands: Tensors that are read as others, by the names of their weights or sites.
        argument: Name of the literal argument; None where none is changed.
        baseline: Its value in the baseline.
        candidate: The value that makes what the candidate made; without an argument, the op that it alone has.
        axis: Of the tensor that is in another order, or summed along another axis.
        origin: What the candidate's number is: "1 / sqrt(64)", "log2(e)".
        exchanged: Places of two arguments of the op that have changed places.
        configured: Name of the value of the reference's configuration that the baseline's number is: "rms_norm_eps".
    """

    ops: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    argument: str | None = None
    baseline: Any = None
    candidate: Any = None
    axis: int | None = None
    origin: str | None = None
    configured: str | None = None
    exchanged: tuple[int, ...] = ()

    def is_of(self, site: str) -> bool:
        """Whether the one op that is changed is that of a site, by its name in its module."""
        return [op.rpartition("/")[2] for op in self.ops] == [site.rpartition("/")[2]]


@dataclass(frozen=True)
class Hint(Result):
    """A kind of mistake that explains what the candidate made, or all that is known of it.

    Attributes:
        kind: What kind it is; "other" where none of the words fits.
        text: The mistake in a sentence.
        score: How much it is believed, 0 to 1. From 0.8 on it was tried and makes what the candidate made.
        evidence: What it rests on: "tried", "argument", "ops", "values"; of ranks, weights and compilers a finer word.
        proven: Whether the baseline with this change makes the candidate's tensor up to rounding.
        change: What was changed in the baseline; None where nothing was tried.
        unexplained: Share of the error that is left after it (root mean square), 0 to 1; None where unknown.
        line: The candidate's line as it should read, where the mistake is one number or one name in it.
    """

    kind: Kind
    text: str
    score: float
    evidence: str = TRIED
    proven: bool = False
    change: Altered | None = None
    unexplained: float | None = None
    line: str | None = None

    def in_words(self) -> str:
        """Return the sentence; of a mistake that was tried and is not proven, that it may be one."""
        return f"may be: {self.text}" if self.evidence == TRIED and not self.proven else self.text


@dataclass(frozen=True)
class QuantizedWeight(Result):
    """What quantization did to one weight, alone: everything else is the unquantized baseline's.

    Attributes:
        name: Of the parameter.
        verdict: "rounding" where its own step explains the difference; "wrong" is a mistake, `hints` say which.
        snr_db: Of the weight.
        rms_steps: Its difference in steps, root mean square; rounding to nearest makes 0.29.
        max_steps: The largest, ends of the range excepted.
        output_snr_db: Of the output of its module, on the baseline's inputs; None where that was not called.
        output_over_rounding: That error over the error that rounding to nearest would make there.
        logits_snr_db: Of the logits, or of the result of a model without.
        kl: Mean divergence of the next token, in nats; None for a model without logits.
        share: Of the errors (as powers) that all weights make at the logits one by one.
        is_rescaled: Whether it was scaled before it was quantized, and a layer before or after it by the inverse.
        hints: What kind of mistake it is.
    """

    name: str
    verdict: Verdict
    snr_db: float
    rms_steps: float
    max_steps: float | None
    output_snr_db: float | None
    output_over_rounding: float | None
    logits_snr_db: float
    kl: float | None
    share: float
    is_rescaled: bool
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True)
class Quantization(Result):
    """A quantized candidate beside its unquantized baseline.

    Attributes:
        method: How it is quantized.
        num_tokens: Positions that the figures of all weights together are over.
        logits_snr_db: Of the logits, with all weights quantized.
        kl: Mean divergence of the next token, in nats; None for a model without logits.
        token_agreement: Share of positions with the same next token.
        weights: Each of them alone, the largest share of the error first.
        different: Names of weights that are not quantized and differ nevertheless.
    """

    method: str
    num_tokens: int
    logits_snr_db: float
    kl: float | None
    token_agreement: float | None
    weights: tuple[QuantizedWeight, ...]
    different: tuple[str, ...]
