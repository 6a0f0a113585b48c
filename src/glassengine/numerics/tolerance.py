"""Dtype-aware tolerances: what counts as rounding when nothing better is known.

The numbers are the defaults of `torch.testing.assert_close`. They know neither the depth of the computation nor its
noise floor, which is why a verdict that rests on them calls itself uncalibrated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Tolerance(NamedTuple):
    """`|c - b| <= atol + rtol * |b|` is called rounding."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)

# float8 has no entry in torch.testing: one unit in the last place, and the smallest subnormal.
_TOLERANCES = {
    "float8_e4m3fn": Tolerance(0.125, 2.0**-9),
    "float8_e4m3fnuz": Tolerance(0.125, 2.0**-10),
    "float8_e5m2": Tolerance(0.25, 2.0**-16),
    "float8_e5m2fnuz": Tolerance(0.25, 2.0**-17),
    "bfloat16": Tolerance(1.6e-2, 1e-5),
    "float16": Tolerance(1e-3, 1e-5),
    "float32": Tolerance(1.3e-6, 1e-5),
    "complex32": Tolerance(1e-3, 1e-5),
    "complex64": Tolerance(1.3e-6, 1e-5),
    "float64": Tolerance(1e-7, 1e-7),
    "complex128": Tolerance(1e-7, 1e-7),
}

FEWEST_VALUES = 8
"""Values that must use the last bits of a coarse dtype: ones, halves and whole numbers are numbers of any."""
LAST_BITS = {"bfloat16": 5, "float16": 8}
"""Bits of a mantissa that fewer numbers have than those of the dtype: three less."""


def is_inexact(dtype: str) -> bool:
    """Return whether values of this torch dtype name are rounded: floating point or complex."""
    return dtype in _TOLERANCES


def tolerance(baseline: str, candidate: str, *, rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """Return the tolerance for a pair of dtypes: the looser of the two.

    Integers and bools are exact at any tolerance: a token id that is "nearly right" is wrong.

    Args:
        baseline: torch dtype name, e.g. "bfloat16".
        candidate: torch dtype name.
        rtol: Used instead of the dtypes' relative tolerance, where it is not exact.
        atol: Used instead of the dtypes' absolute tolerance, where it is not exact.
    """
    sides = [_TOLERANCES.get(dtype, EXACT) for dtype in (baseline, candidate)]
    if all(side == EXACT for side in sides):
        return EXACT
    return Tolerance(
        max(side.rtol for side in sides) if rtol is None else rtol,
        max(side.atol for side in sides) if atol is None else atol,
    )


def precision_of(tensor: Tensor) -> str:
    """Return the coarsest dtype that holds all values of a tensor, if they use its last bits; else its own."""
    import torch

    own = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in (torch.float32, torch.float64):
        return own
    values = tensor.detach()[tensor.isfinite()]
    for coarse, bits in LAST_BITS.items():
        if torch.equal(values.to(getattr(torch, coarse)).to(values.dtype), values):
            mantissa = torch.frexp(values)[0] * 2**bits
            return coarse if int((mantissa != mantissa.round()).sum()) >= FEWEST_VALUES else own
    return own
