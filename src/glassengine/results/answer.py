"""The head of an answer: the results end to end, how finely it was judged, where precision is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from glassengine.results.base import FLAGGED, Result, Verdict

if TYPE_CHECKING:
    import torch


Standing = Literal[
    "ok",
    "prompt differs",
    "results differ",
    "differs inside",
    "token changes",
    "weights differ",
    "over budget",
    "too little judged",
]
"""Why a comparison is ok or not; `docs/concepts.md` has the rule."""

LEAST_DB = 20.0
"""Signal-to-noise ratio below which no difference of results is called rounding: a tenth of the values."""

MOST_KL = 0.1
"""KL divergence in nats of a position from which on no difference of logits is called rounding."""

_MOST_ULP = 1e4
"""Difference above which a result is no longer called equal within rounding, however much the model amplifies that."""

MOST_OPS = 12
"""Most ops of a region that still count as judged finely: a norm or a rotation written by hand has as many."""


@dataclass(frozen=True)
class CaseInputs(Result):
    """What one case ran on.

    Attributes:
        case: Its name.
        num_steps: How many steps it has.
        inputs: Each input of the steps that are given.
        texts: Of a language model, what the first row reads in each step: text, or token ids without a tokenizer.
    """

    case: str
    num_steps: int
    inputs: tuple[InputUsed, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResultComparison(Result):
    """One result of the model on both sides, over all cases and steps; no inside tensor enters it.

    Attributes:
        name: Of the baseline's result: "logits", "output".
        candidate_name: Of the candidate's.
        level: Which implementation.
        method: "name"; "position" or, of a record, "shape" where the two sides use other names.
        verdict: Worst one, by the accumulated noise floor.
        reason: Set where something other than the size of the difference decides.
        case: In which the verdict and then the signal-to-noise ratio is worst.
        step: Likewise.
        num_steps: How many steps were compared.
        shape: In that step.
        dtype: Of the baseline's result.
        candidate_dtype: Of the candidate's.
        max_abs_diff: Largest difference; None where the sides cannot be subtracted.
        largest: Largest absolute value of the baseline in that step.
        ulp: Largest difference in units in the last place of `largest`, in the coarser dtype of the two.
        snr_db: Least signal-to-noise ratio of a step.
        cosine_similarity: Least of a step.
        noise_ratio: Largest ratio of error and noise floor.
        exempt: Share of the elements that do not count (ties, undefined values), padding aside.
        left_out: Share of the elements that are padding, or undefined in the baseline: they enter no figure.
        judged_by: "signal" where the candidate is quantized: rounding explains nothing then, and what is left of the
            signal counts.
        num_tokens: Of logits, how many positions were compared; 0 of other results.
        same_tokens: How many of them have the same likeliest token on both sides.
        mean_kl: KL divergence of the distributions, baseline to candidate, in nats; mean over the positions.
        max_kl: Likewise of the worst position.
        is_decided: False where the baseline's own rounding changes this result as much as the two sides differ, and
            the difference is too large to be called rounding.
        within: What explains a legal difference: "the engine's 8-bit activations".
    """

    name: str
    candidate_name: str
    level: str
    method: str
    verdict: Verdict
    reason: str | None
    case: str | None
    step: int
    num_steps: int
    shape: tuple[int, ...]
    dtype: str
    candidate_dtype: str
    max_abs_diff: float | None
    largest: float | None
    ulp: float | None = None
    snr_db: float | None = None
    cosine_similarity: float | None = None
    noise_ratio: float | None = None
    exempt: float = 0.0
    left_out: float = 0.0
    judged_by: Literal["noise floor", "signal"] = "noise floor"
    num_tokens: int = 0
    same_tokens: int = 0
    mean_kl: float | None = None
    max_kl: float | None = None
    is_decided: bool = True
    within: str = "rounding"

    @property
    def agrees(self) -> bool:
        """Whether rounding explains all of the difference; of a quantized candidate whether the signal is there."""
        return self.verdict not in FLAGGED

    @property
    def is_far_apart(self) -> bool:
        """Whether the two sides are too far apart to be called rounding, by signal or by distribution."""
        is_noise = self.snr_db is not None and self.snr_db < LEAST_DB
        return is_noise or (self.max_kl is not None and self.max_kl >= MOST_KL)

    @property
    def is_unexplained(self) -> bool:
        """Whether the noise floor would explain it, and it is too far apart for that: then nothing explains it."""
        return self.agrees and self.is_far_apart and not self.exempt and self.judged_by == "noise floor"

    @property
    def is_plural(self) -> bool:
        """Whether its name is one of several things: "logits"."""
        return self.name.endswith("s") and not self.name.endswith("ss")

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs: the verdict is by the program's own run, the figures by the unchanged baseline's."""
        return self.verdict == "identical" or (self.agrees and self.max_abs_diff == 0 and self.exempt == 0)

    def in_words(self) -> str:
        """Return how it agrees or differs: "logits differ by 0.18 of 1.39 (17 dB)"."""
        are = self.is_plural
        if self.is_identical:
            is_same = self.dtype == self.candidate_dtype
            return f"{self.name} {'are' if are else 'is'} {'bitwise identical' if is_same else 'equal'}"
        if self.agrees and self.exempt == 1:
            return f"{self.name} {'are' if are else 'is'} not judged: all of it depends on a tie"
        if self.agrees and self.judged_by == "noise floor" and not self.is_far_apart:
            size = self._size()
            if self.within == "rounding" and self.ulp is not None and self.ulp > _MOST_ULP:
                return f"{self.name} {'differ' if are else 'differs'} no more than rounding may change here: {size}"
            return f"{self.name} {'agree' if are else 'agrees'} within {self.within}" + (f": {size}" if size else "")
        if not self.is_decided and not self.max_abs_diff:
            return f"{self.name} {'are' if are else 'is'} {self.reason}"
        differs = f"{self.name} {'differ' if are else 'differs'}"
        is_text = self.dtype == "bool" and not self.shape  # or whatever else has no size
        if not self.max_abs_diff or self.largest is None or not math.isfinite(self.max_abs_diff) or is_text:
            return f"{differs}: {self.reason or 'values that are not finite'}"
        loss = "" if self.snr_db is None else f" ({self.snr_db:.0f} dB)"
        text = f"{differs} by {self.max_abs_diff:.3g} of {self.largest:.3g}{loss}"
        return text if self.is_decided and self.reason is None else f"{text}; {self.reason}"

    def _size(self) -> str:
        parts = []
        if self.max_abs_diff is not None and self.largest is not None:
            parts.append(f"largest difference {self.max_abs_diff:.2g} of {self.largest:.3g}")
        if self.ulp is not None:
            parts.append(f"{self.ulp:.2g} ulp")
        if self.snr_db is not None and math.isfinite(self.snr_db):
            parts.append(f"{self.snr_db:.0f} dB")
        return ", ".join(parts) or (self.reason or "")


@dataclass(frozen=True)
class Granularity(Result):
    """How finely the float-valued sites of the baseline were judged on one level; the shares add up to 1.

    Attributes:
        level: Which one.
        num_sites: Float-valued op sites of the baseline.
        op_by_op: Share judged one by one.
        in_regions: Share judged where a region of at most `MOST_OPS` ops ends.
        in_large_regions: Share judged where a larger region ends.
        results_only: Share that nothing but the results speaks for.
        largest_region: Ops of the largest region, views aside; 0 where there is none.
        largest_region_end: Site at which it ends.
    """

    level: str
    num_sites: int
    op_by_op: float
    in_regions: float
    in_large_regions: float
    results_only: float
    largest_region: int = 0
    largest_region_end: str | None = None


@dataclass(frozen=True)
class DriftRow(Result):
    """How far a tensor of a candidate of lower precision is from the baseline's, over all cases and steps.

    Attributes:
        site: Of the baseline, in order of execution.
        candidate_site: Of the candidate.
        kind: "module", "op" or "result".
        num_tensors: How many were compared.
        snr_db: Signal-to-noise ratio.
        cosine_similarity: Over all of them.
        introduced_db: Signal-to-noise ratio of the error made since the tensors above it; None where unknown.
        share: Of the loss (noise over signal) that all rows of its kind introduce; None where unknown.
    """

    site: str
    candidate_site: str
    kind: str
    num_tensors: int
    snr_db: float
    cosine_similarity: float
    introduced_db: float | None = None
    share: float | None = None


ExemptionReason = Literal[
    "padding",
    "unwritten memory",
    "masked rows",
    "undefined casts",
    "ties",
    "below ties or padding",
    "random",
    "unread",
    "written in another gauge",
]


@dataclass(frozen=True)
class Exemption(Result):
    """Elements that a comparison left out for one reason, over all cases and steps of the level that was judged finest.

    Attributes:
        reason: "padding" (tokens and cache slots that hold nothing), "unwritten memory", "masked rows" (attention that
            sees no key), "undefined casts" (NaN or too large a number to an integer dtype), "ties" (a choice between
            values that differ by less than rounding), "below ties or padding" (a whole tensor with unknown
            elements that depend on them), "random" (other in each run), "unread" (later ops leave
            these elements out, with any values), "written in another gauge" (later ops take back how these differ, with
            any values).
        num_elements: How many.
        share: Of all elements that the two sides have in common.
        num_tensors: How many tensors have such elements.
        largest_site: Of the tensor that has most of them.
    """

    reason: ExemptionReason
    num_elements: int
    share: float
    num_tensors: int
    largest_site: str


Origin = Literal["given", "made up", "in the file", "built-in prompts", "recorded"]

MOST_COUNTED = 1 << 20
"""Elements of a tensor that distinct values are counted in; of a longer one only the first of them."""


@dataclass(frozen=True)
class InputUsed(Result):
    """One input of one step.

    Attributes:
        name: As the program calls it: "x", "pair[0]", "options.scale".
        step: Of the case, from 0.
        origin: Where it comes from.
        recipe: How it was made, in words; "" where it was not made up.
        dtype: torch dtype name; of a non-tensor, the name of its Python type.
        shape: Sizes; None for a non-tensor.
        minimum: Least finite value; None where there is none.
        maximum: Largest finite value.
        num_distinct: How many values there are, NaN counted once; of the first `MOST_COUNTED` elements.
        value: Of a non-tensor, as Python writes it.
    """

    name: str
    step: int
    origin: Origin
    recipe: str
    dtype: str
    shape: tuple[int, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    num_distinct: int | None = None
    value: str | None = None

    @property
    def is_made_up(self) -> bool:
        """Whether its values were made for the check."""
        return self.origin == "made up"


def input_used(name: str, value: Any, *, step: int, origin: Origin, recipe: str = "") -> InputUsed:
    """Return the record of an input."""
    import torch

    if not isinstance(value, torch.Tensor):
        return InputUsed(name, step, origin, recipe, type(value).__name__, value=repr(value)[:200])
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(int(size) for size in value.shape)
    if value.device.type == "meta" or not value.numel():
        return InputUsed(name, step, origin, recipe, dtype, shape, num_distinct=None if value.numel() else 0)
    return InputUsed(name, step, origin, recipe, dtype, shape, *_range(value.detach()))


def _range(value: torch.Tensor) -> tuple[float | None, float | None, int]:
    """Return (minimum, maximum, number of distinct values) of a tensor that has elements."""
    import torch

    flat = value.cpu().flatten()
    flat = torch.view_as_real(flat.resolve_conj()).flatten() if flat.is_complex() else flat
    # Narrow kinds of numbers have few kernels; float64 holds every value of the others, and int64 itself is kept.
    wide = flat.double() if flat.is_floating_point() else flat.long()
    finite = wide[wide.isfinite()]
    num_nan = int(wide.isnan().any())
    head = wide[:MOST_COUNTED]
    distinct = int(torch.unique(head[~head.isnan()]).numel()) + num_nan
    if not finite.numel():
        return None, None, distinct
    return float(finite.min()), float(finite.max()), distinct
