"""What a number is: a size of the model or its root, a constant of mathematics, a whole number turned over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from glassengine.judge.hypotheses.trials.question import Question

_APART = 1e-6
"""Relative distance from which on two numbers are others."""
_LEAST_FREQUENCIES = 3
_EVEN = 1e-5
"""Spread of the factors, as a share: as float32 rounds them."""
_FAMOUS = (
    ("log2(e)", math.log2(math.e)),
    ("ln(2)", math.log(2)),
    ("log10(e)", math.log10(math.e)),
    ("ln(10)", math.log(10)),
    ("sqrt(2)", math.sqrt(2)),
    ("1 / sqrt(2)", math.sqrt(0.5)),
    ("sqrt(2 / pi)", math.sqrt(2 / math.pi)),
    ("pi", math.pi),
    ("e", math.e),
)


def origin_of(number: float, sizes: Iterable[int]) -> str | None:
    """Return what a number is called, as people would have written it; None where it is none of these.

    Args:
        number: A factor or another literal.
        sizes: Of axes of the tensors that it is used with.
    """
    if not math.isfinite(number) or any(abs(number - one) <= _APART * abs(one) for one in (0.0, 1.0, -1.0, 0.5, 2.0)):
        return None  # nobody has to be told what these are
    sign, size = ("-", -number) if number < 0 else ("", number)
    for name, value in _named(sizes):
        if abs(size - value) <= _APART * value:
            return sign + (f"({name})" if sign and " " in name else name)
    return None


def _named(sizes: Iterable[int]) -> Iterator[tuple[str, float]]:
    for width in sorted({size for size in sizes if size > 1}):
        yield f"1 / sqrt({width})", width**-0.5
        yield f"1 / {width}", 1 / width
        yield f"sqrt({width})", width**0.5
        if width > 4:
            yield f"{width - 1} / {width}", (width - 1) / width
            yield f"{width} / {width - 1}", width / (width - 1)
    yield from _FAMOUS


def origin_in(question: Question, number: float) -> str | None:
    """Return what a number is called where a tensor was flagged: by the sizes that are there, else by the model's."""
    near = _sizes(question.trial.values.values())
    return origin_of(number, near) or origin_of(number, _sizes(n.meta.get("val") for n in question.named.values()))


def _sizes(values: Iterable[Any]) -> set[int]:
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return {size for tensor in tensors for size in tensor.shape if isinstance(size, int)}


def base_of(value: torch.Tensor) -> float | None:
    """Return the theta of which n numbers (float64, in one axis) are powers -i / n; None where they are not."""
    flat = value.flatten()
    if flat.numel() < _LEAST_FREQUENCIES or flat.numel() != max(value.shape) or bool((flat <= 0).any()):
        return None
    steps = flat[1:] / flat[:-1]
    if float(steps.std()) > _EVEN * float(steps.abs().mean()) or float(steps[0]) >= 1:
        return None
    return float(float(steps.mean()) ** -len(flat))


def of_another_base(here: float, there: float) -> str:
    """Return how the mistake is reported that a base is another one."""
    return f"base of the frequencies (theta): {here:.6g} here, {there:.6g} in the candidate"
