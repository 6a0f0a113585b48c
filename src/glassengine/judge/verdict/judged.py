"""One tensor of a side with its judgement, and the figures that go with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from glassengine.judge.exclusions.in_step import CHOICES
from glassengine.judge.exclusions.unread import Differing
from glassengine.judge.replay.expected import Replayed
from glassengine.numerics.counted import is_finite
from glassengine.numerics.exemptions import PADDING, TIES, Masks
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.metrics.elements import tensor_values
from glassengine.numerics.metrics.measure import measure
from glassengine.numerics.metrics.tolerance import tolerance
from glassengine.numerics.verdict import Reference
from glassengine.results import Figures, TensorValues

_COMPENSATED = 3.0
MOST_WITH_VALUES = 64
_MOST_ELEMENTS = 1 << 24
"""Of a tensor whose elements are shown."""


@dataclass(frozen=True)
class Judged:
    """A tensor, its judgement, and whether its op introduced the error (None: only the graph can tell).

    `predicted` is what the op should have made where it was replayed, `inherited` gives the RMS of what the op's inputs
    carried in, and `local` the judgement of the op alone.
    """

    tensor: torch.Tensor
    judgement: Judgement
    introduced: bool | None
    inherited: Callable[[], float | None] = lambda: None
    local: Judgement | None = None
    is_clean: bool = False
    contradicts: bool = False
    exempt: Masks = field(default_factory=dict)
    differing: Differing | None = None
    predicted: torch.Tensor | None = None


def figures_of(baseline: torch.Tensor, candidate: torch.Tensor) -> Figures | None:
    """Return how far two tensors are apart by the tolerances of their dtypes; None where their shapes differ."""
    if baseline.shape != candidate.shape:
        return None
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (baseline, candidate)]
    allowed = tolerance(*names)
    return measure(baseline, candidate, rtol=allowed.rtol, atol=allowed.atol)


class FirstValues:
    """Elements and axes of the first tensors that are wrong."""

    def __init__(self) -> None:
        self._num = 0

    def of(self, reference: Reference, candidate: torch.Tensor) -> TensorValues | None:
        """Return those of a tensor, where it counts; None of a late, large or differently shaped one."""
        baseline, self._num = reference.native, self._num + 1
        is_large = candidate.numel() > _MOST_ELEMENTS
        if self._num > MOST_WITH_VALUES or is_large or baseline.shape != candidate.shape:
            return None
        if reference.valid is not None:
            candidate = torch.where(reference.valid, candidate, baseline.to(candidate.dtype))
        return tensor_values(baseline, candidate)


def is_compensated(local: Judgement, accumulated: Judgement, reference: Reference, tensor: torch.Tensor) -> bool:
    """Whether the op was only fed and written another way (a scale moved into its input, say).

    An error that the op really introduced is in its result; here the result is closer to the baseline than that.
    """
    # If everything depends on a tie, no error was counted; a candidate that chose as the baseline did has none.
    of_result = reference.distance(tensor) if reference.is_silent else accumulated.rms_error
    if local.rms_error is None or of_result is None:
        return False
    return local.rms_error > _COMPENSATED * of_result


def padding_differs(tensor: torch.Tensor, reference: Reference) -> bool:
    """Whether a tensor is another one than the reference where that is padding."""
    # Other exclusions are followed to their end: nothing that counts depends on them.
    padding = reference.known.exempt.get(PADDING)
    if padding is None or tensor.shape != reference.exact.shape:
        return False
    return bool(((tensor != reference.native) & padding).any())


def inherited_in(found: Replayed, reference: Reference) -> float | None:
    """Return the RMS of what the inputs of an op carried in, from its result on these; None if unknown."""
    predicted = found.predicted
    if predicted.shape != reference.exact.shape or not predicted.is_floating_point():
        return None
    square = (predicted - reference.exact).square_()
    if not is_finite(square):
        square.nan_to_num_(0.0, 0.0, 0.0)
    return float(square.mean().sqrt()) if square.numel() else 0.0


def exempt_by_replay(found: Replayed, accumulated: Masks, tensor: torch.Tensor) -> Masks:
    """Return, by reason, the elements that do not count of a tensor whose op was replayed.

    The replay starts from what the candidate chose and drew, so choices above the op leave nothing out.

    Args:
        found: By the replay; it may have masks of its own.
        accumulated: What the reference leaves out.
        tensor: The candidate's.
    """
    if found.exempt is not None:
        return found.exempt
    masks = {reason: mask for reason, mask in accumulated.items() if reason not in CHOICES}
    # The op itself chose otherwise among values that rounding cannot tell apart.
    if found.judgement.is_tie and tensor.shape == found.predicted.shape:
        masks[TIES] = tensor != found.predicted
    return masks
