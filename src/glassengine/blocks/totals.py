"""How two tensors differ, added up in one pass of bounded memory.

`sums.Totals.add` is the definition, in torch and float64. On the CPU most pieces go through `arithmetic` instead, which
returns the same sums of a piece and declines the pieces it is not meant for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassengine.blocks import pieces
from glassengine.blocks.arithmetic import Arithmetic, arithmetic_for
from glassengine.blocks.merging import Difference, Sums
from glassengine.blocks.pieces import BLOCK_ELEMENTS, blocks, flat, one_thread, resolved, widen
from glassengine.blocks.sums import Totals

_SAME_IN_NUMPY = ("float32", "float64", "float16", "int32", "int16", "int8", "uint8", "bool")
_PLAIN = {
    **{getattr(torch, name): name for name in _SAME_IN_NUMPY},
    **dict.fromkeys((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz), "float32"),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz, torch.uint16), "float32"),
    torch.uint32: "float64",
}
"""Dtypes whose pieces `arithmetic` takes -> the dtype of numpy that holds them."""


def difference(
    baseline: Tensor, candidate: Tensor, *, rtol: float, atol: float, device: str | torch.device = "cpu"
) -> Difference:
    """Return the raw sums of `candidate - baseline` in one pass.

    Sums are good to 1e-6 relative (of tensors of fewer than 256 elements, or of a dtype that float32 does not hold:
    1e-12), and dot products to that of the product of the norms. Counts, `max_abs` and `worst` are exact.

    Args:
        baseline: Any dtype and strides.
        candidate: The same shape as `baseline`.
        rtol: Relative tolerance of `num_beyond`: elements with `|c - b| > atol + rtol * |b|`.
        atol: Absolute tolerance of `num_beyond`.
        device: Where the arithmetic runs; it must know float64.

    Raises:
        ValueError: The shapes differ.
    """
    if 0 < baseline.numel() <= BLOCK_ELEMENTS and torch.device(device).type == "cpu":
        same = _same(baseline, candidate)
        if same is not None:
            return same
    return _difference(baseline, candidate, rtol, atol, device)


def _same(b: Tensor, c: Tensor) -> Difference | None:
    """Return what `difference` does of two small tensors of one dtype that are equal and finite: most of most sides."""
    if b.dtype != c.dtype or b.shape != c.shape or not (b.is_cpu and c.is_cpu):
        return None
    raw, other = (flat(resolved(side)) for side in (b, c))
    if not torch.equal(raw.view(torch.uint8), other.view(torch.uint8)):
        return None
    values = widen(raw).numpy()
    squares = float(np.vdot(values, values).real)
    if not math.isfinite(squares):
        return None
    count = len(values)
    nothing = {"num_different": 0, "num_mismatched": 0, "num_beyond": 0, "sum_abs": 0.0, "sum_squares": 0.0}
    largest = {"max_abs": 0.0, "sum_rel": 0.0, "max_rel": 0.0, "worst": None}
    return Difference(
        num_elements=count,
        num_finite=count,
        num_nonzero=int(np.count_nonzero(values)),
        dot=squares,
        baseline_squares=squares,
        candidate_squares=squares,
        baseline_at_worst=None,
        candidate_at_worst=None,
        **nothing,  # type: ignore[arg-type]
        **largest,  # type: ignore[arg-type]
    )


@one_thread()
def _difference(
    baseline: Tensor, candidate: Tensor, rtol: float, atol: float, device: str | torch.device
) -> Difference:
    total: Sums | None = None
    dtypes = {_PLAIN.get(side.dtype) for side in (baseline, candidate)}
    quick: tuple[Arithmetic, ...] = ()
    if torch.device(device).type == "cpu" and None not in dtypes:
        known = {np.dtype(name) for name in dtypes if name is not None}
        quick = arithmetic_for(known, baseline.numel(), pieces.BLOCK_ELEMENTS, rtol, atol)
    with np.errstate(all="ignore"):
        for start, (b, c) in blocks(baseline, candidate, device=device):
            part, above = None, 0.0 if total is None else total.max_abs
            if quick:
                x, y = _array(b), _array(c)
            for arithmetic in quick:
                if (part := arithmetic.partial(start, x, y, above=above)) is not None:
                    break
            if part is None:
                totals = part = Totals()
                totals.add(start, b, c, rtol, atol)
            if total is None:
                total = part
            else:
                total.merge(part)
    total = total or Sums()
    return Difference(baseline.numel(), **vars(total))


def _array(piece: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a piece for `arithmetic`: float8 and bfloat16 as the float32 numbers that they are."""
    name = _PLAIN[piece.dtype]
    found: np.ndarray[Any, np.dtype[Any]] = (
        piece if str(piece.dtype) == f"torch.{name}" else piece.to(getattr(torch, name))
    ).numpy()
    return found
