"""In which dtype values were rounded, whatever dtype holds them: float32 is what files without bfloat16 have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_FEWEST = 8
"""Values that must use the last bits of a coarse dtype: ones, halves and whole numbers are numbers of any."""
_BITS = {"bfloat16": 5, "float16": 8}
"""Bits of a mantissa that fewer numbers have than those of the dtype: three less."""


def precision_of(tensor: Tensor) -> str:
    """Return the coarsest dtype that holds all values of a tensor, if they use its last bits; else its own."""
    import torch

    own = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in (torch.float32, torch.float64):
        return own
    values = tensor.detach()[tensor.isfinite()]
    for coarse, bits in _BITS.items():
        if torch.equal(values.to(getattr(torch, coarse)).to(values.dtype), values):
            mantissa = torch.frexp(values)[0] * 2**bits
            return coarse if int((mantissa != mantissa.round()).sum()) >= _FEWEST else own
    return own
