"""Results about quantized candidates."""

from __future__ import annotations

from dataclasses import dataclass

from glassengine.results.base import Result, Verdict
from glassengine.results.hints import Hint


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
