"""Facts about a tensor beside its value: its kind of numbers, and what the program's graph states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassengine.results import ExemptionReason


def in_kind(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a value as ops read it that expect `dtype`: floats of any size as they are, another kind as this one."""
    is_alike = value.is_floating_point() == dtype.is_floating_point and value.is_complex() == dtype.is_complex
    if value.dtype is dtype or (is_alike and (dtype.is_floating_point or dtype.is_complex)):
        return value
    return (value.real if value.is_complex() and not dtype.is_complex else value).to(dtype)


def other_kind(candidate: torch.Tensor, baseline: torch.Tensor) -> str | None:
    """Say that a candidate has whole numbers, floats or complex numbers where the baseline has others."""
    kinds = [(value.is_floating_point(), value.is_complex()) for value in (candidate, baseline)]
    names = [str(value.dtype).removeprefix("torch.") for value in (candidate, baseline)]
    return None if kinds[0] == kinds[1] else f"{names[0]} where the baseline has {names[1]}"


def unequal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where two tensors of any kinds have other values."""
    if one.is_complex() or other.is_complex():
        return torch.ne(one.to(torch.complex128), other.to(torch.complex128))
    left, right = (value.double() if value.is_floating_point() else value.long() for value in (one, other))
    return torch.ne(left, right)


def parts(value: torch.Tensor) -> torch.Tensor:
    """Return a value with real and imaginary part along one more axis."""
    wide = value if value.dtype is torch.complex128 else value.to(torch.complex64)
    return torch.view_as_real(wide.resolve_conj())  # a conjugate is only marked as one


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
