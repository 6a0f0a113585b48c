"""Facts about a tensor that a program's graph states, beside its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from glassengine.results import ExemptionReason


@dataclass(frozen=True)
class KnownValues:
    """Of one tensor.

    Attributes:
        exempt: Reason -> bool mask, to broadcast against the tensor, of elements that do not count.
        hidden: Bool mask, in its shape, of elements that hide a place from a softmax, which is all that reads the
            tensor: any number that hides is as good. None where there are none.
        is_exact: Rounding has no part in it: every right implementation has these very values.
        settled: Of an op that chooses: node that it reads -> values of it, NaN where rounding has a part.
    """

    exempt: Mapping[ExemptionReason, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    is_exact: bool = False
    settled: Mapping[str, Tensor] = field(default_factory=dict)


NOTHING = KnownValues()
