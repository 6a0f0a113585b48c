"""Recipes: what the values of one input are, by what the forward does with it.

No axis of what is made is symmetric: to reverse, shift or permute it makes another input. Values are random but the
same every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from glassengine.program.inputs.observe import Use

_MOST_IDS = 1 << 30
_NUMBERS = 1000
"""Whole numbers that are calculated with are below it: times of day, steps of diffusion."""
_PIXELS = 1 / 50
"""A forward that begins with a smaller factor, or with an offset beyond `_PIXELS_OFFSET`, takes pixels up to 255."""
_PIXELS_OFFSET = 50


@dataclass(frozen=True)
class WantedInput:
    """One input to be made: its torch dtype and sizes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers, or true and false."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Made:
    """The values of one input, and how they were made."""

    value: torch.Tensor
    recipe: str


def make(spec: WantedInput, use: Use, step: int, generator: torch.Generator) -> Made:
    """Return values for one input of one step.

    Args:
        spec: Its dtype and sizes.
        use: What the forward does with it.
        step: Number of the step: masks differ between steps.
        generator: Of random numbers.
    """
    maker = _Maker(spec, use, step, generator)
    return maker.whole() if spec.is_whole else maker.floating()


def plainest(spec: WantedInput, number: int, generator: torch.Generator) -> Made:
    """Return values that few models refuse: small random numbers, and `number` wherever numbers are whole."""
    if spec.is_whole:
        return Made(torch.full(spec.shape, number, dtype=spec.dtype), f"all {number}: the model accepts no other value")
    return Made(torch.randn(spec.shape, generator=generator).to(spec.dtype), "random, normal")


def has_masks(spec: WantedInput, use: Use) -> bool:
    """Whether an input is a mask, so that it has to be seen with and without padding."""
    return _Maker(spec, use, 0, torch.Generator()).is_mask


class _Maker:
    def __init__(self, spec: WantedInput, use: Use, step: int, generator: torch.Generator) -> None:
        self._spec, self._use, self._step, self._generator = spec, use, step, generator

    @property
    def is_mask(self) -> bool:
        """Whether the input says what counts."""
        spec, use = self._spec, self._use
        if spec.dtype is torch.bool:
            return True
        if not spec.is_whole:
            return spec.numel > 1 and not use.is_data and bool(use.constants or (use.is_mask and use.hides))
        if use.bound is not None or self._is_choice or self._is_lengths or spec.dtype is torch.uint8:
            return False
        return use.is_mask or bool(use.constants) or use.is_summed

    @property
    def _is_choice(self) -> bool:
        return self._spec.numel == 1 and any(abs(number) > 1 for number in self._use.constants)

    @property
    def _is_lengths(self) -> bool:
        return bool(self._use.ranges) and len([size for size in self._spec.shape if size > 1]) <= 1

    def whole(self) -> Made:
        """Return whole numbers, or true and false."""
        spec, use = self._spec, self._use
        if self.is_mask:
            return self._mask()
        if use.bound is not None:
            return self._ids(use.bound)
        if self._is_choice:
            return self._choice()
        if self._is_lengths:
            return self._lengths(max(1, min(use.ranges) + 1))
        if spec.dtype is torch.uint8:
            return Made(self._structured(0, 255).round().to(spec.dtype), "pixels from 0 to 255, in no way symmetric")
        if use.is_number and spec.shape and spec.shape[-1] > 1:
            return self._positions()
        most = min(_NUMBERS, torch.iinfo(spec.dtype).max)
        return Made(self._random(0, most), f"random whole numbers below {most}")

    def floating(self) -> Made:
        """Return floating-point numbers."""
        spec, use = self._spec, self._use
        if self._is_choice:
            return self._choice()
        if self.is_mask:
            return self._mask()
        if spec.dtype.is_complex:
            return Made(torch.randn(spec.shape, dtype=spec.dtype, generator=self._generator), "random, normal")
        if use.convolved is not None and use.convolved[0] >= 2 and len(spec.shape) >= 3:
            low, high, words = self._range_of_images()
            return Made(self._structured(low, high).to(spec.dtype), f"image of {words}, in no way symmetric")
        if use.convolved is not None and len(spec.shape) >= 2 and max(spec.shape) == spec.shape[-1]:
            return Made(self._sound().to(spec.dtype), "sound: a rising tone and noise, between -1 and 1")
        drawn = torch.randn(spec.shape, generator=self._generator, dtype=torch.float64)
        if use.is_positive and not use.is_data:
            return Made((drawn.abs() + 0.1).to(spec.dtype), "random, positive")
        return Made(drawn.to(spec.dtype), "random, normal")

    def _random(self, low: int, high: int) -> torch.Tensor:
        """Return whole numbers from `low` to below `high`, several of them in every row."""
        spec = self._spec
        drawn = torch.randint(low, max(high, low + 1), spec.shape, generator=self._generator)
        if high - low > 1 and drawn.dim() and drawn.shape[-1] > 1:
            ends = drawn[..., 0] == drawn[..., -1]
            # The first and the last of a row differ, so that a row that is reversed is another one.
            drawn[..., 0] = torch.where(ends, (drawn[..., 0] - low + 1) % (high - low) + low, drawn[..., 0])
        return drawn.to(spec.dtype)

    def _ids(self, bound: int) -> Made:
        spec = self._spec
        bound = min(bound, _MOST_IDS, torch.iinfo(spec.dtype).max)
        words = f"indices, several values a row, below {bound}"
        ids = self._random(0, bound)
        pads = sorted(int(number) for number in self._use.equal_to if 0 <= number < bound and number.is_integer())
        if pads and bound > 4 and ids.dim() >= 2 and ids.shape[-1] > 3 and self._step % 2 == 0:
            for pad in pads[:4]:
                ids = torch.where(ids == pad, (ids + 1) % bound, ids)
            row = ids.reshape(-1, ids.shape[-1])[-1]
            number = max(1, len(row) // 4)
            row[len(row) - number :] = pads[0]
            words += f"; {pads[0]}, which the model compares them with, at the end of the last row"
        return Made(ids, words)

    def _positions(self) -> Made:
        spec = self._spec
        gaps = torch.randint(1, 3, spec.shape, generator=self._generator)
        gaps[..., 0] = 0
        most = self._use.bound
        positions = gaps.cumsum(-1)
        positions = positions if most is None else positions.clamp(max=most - 1)
        return Made(positions.to(spec.dtype), "positions: increasing, by one or two")

    def _lengths(self, longest: int) -> Made:
        places = torch.arange(self._spec.numel).reshape(self._spec.shape)
        lengths = (longest - 2 * ((places + self._step) % 2) - places // 2).clamp(min=1)
        return Made(lengths.to(self._spec.dtype), f"lengths: different ones, up to {longest}")

    def _choice(self) -> Made:
        numbers = sorted((n for n in self._use.constants if n == n and abs(n) != math.inf), reverse=True)
        number = numbers[self._step % len(numbers)]
        listed = ", ".join(f"{n:g}" for n in numbers[:5])
        value = torch.full(self._spec.shape, number, dtype=torch.float64).to(self._spec.dtype)
        return Made(value, f"one of the numbers that the model compares it with: {listed}")

    def _mask(self) -> Made:
        """Zeros and ones: padding on the right, none, padding on the left, by row and step; no row without a one."""
        spec = self._spec
        mask = torch.ones(spec.shape, dtype=torch.int64)
        words = "ones and zeros"
        if not spec.shape:
            return Made(torch.full((), (self._step + 1) % 2).to(spec.dtype), words)
        size = spec.shape[-1]
        rows = mask.reshape(-1, size)
        if len(spec.shape) >= 3:
            drawn = torch.rand(rows.shape, generator=self._generator) < 0.7
            places = torch.arange(len(rows)) % size
            drawn[torch.arange(len(rows)), places] = True
            return Made(drawn.reshape(spec.shape).to(spec.dtype), f"{words} at random, a one in every row")
        if len(spec.shape) == 1 and size > 1:
            rows[0, 1 + self._step % (size - 1)] = 0
            return Made(mask.to(spec.dtype), f"{words}: one zero")
        for number, row in enumerate(rows):
            # Rows of a batch and the steps after each other: (padded right, whole, padded left) in turn.
            turn = (number + self._step) % 3
            if turn == 0 and size > 1:
                row[size - max(1, size // 3) :] = 0
            elif turn == 2 and size > 1:
                row[0] = 0
        return Made(mask.to(spec.dtype), f"{words}: padding on the right, none, padding on the left, row by row")

    def _range_of_images(self) -> tuple[float, float, str]:
        factor, offset = abs(self._use.factor), self._use.offset
        if factor <= _PIXELS or offset <= -_PIXELS_OFFSET * factor:
            return 0.0, 255.0, "pixels from 0 to 255"
        if -1.0 <= offset <= -0.2 * min(factor, 1.0):
            return 0.0, 1.0, "numbers from 0 to 1"
        return -1.7, 1.7, "normalized numbers"

    def _structured(self, low: float, high: float) -> torch.Tensor:
        """Return slopes of another steepness along each axis, a bright corner, and noise, between two numbers."""
        shape = self._spec.shape
        total = torch.zeros(shape, dtype=torch.float64)
        for axis, size in enumerate(shape):
            slope = torch.linspace(0.0, 1.0, size, dtype=torch.float64) ** (1.0 + 0.5 * axis) * (0.5 + 0.25 * axis)
            total = total + slope.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        total = total + torch.rand(shape, generator=self._generator, dtype=torch.float64)
        if not total.numel():
            return total
        least, most = total.min(), total.max()
        return low + (total - least) / (most - least).clamp(min=1e-9) * (high - low)

    def _sound(self) -> torch.Tensor:
        shape = self._spec.shape
        time = torch.linspace(0.0, 1.0, shape[-1], dtype=torch.float64)
        tone = torch.sin(2 * math.pi * (8.0 + 0.1 * shape[-1] * time) * time)
        noise = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return (0.5 * tone * (0.3 + 0.7 * time) + 0.15 * noise).clamp(-1.0, 1.0)
