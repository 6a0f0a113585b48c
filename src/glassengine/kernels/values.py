"""Inputs that show what ordinary ones hide: sizes off the tile, values, and layouts in memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import UsageError

Make = Callable[[Mapping[str, int], torch.dtype, torch.Generator], Sequence[Any]]
"""Sizes, dtype of floating inputs, source of numbers -> arguments."""

EDGES = (1, 2, 7, 16, 24, 31, 32, 33, 64, 65, 96, 100, 128, 129, 257)
BASE = {"B": 3, "H": 2, "N": 5}
_BASE_SIZE = 33
_GUARD = 64

VALUES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "ordinary": lambda x, g: x,
    "values of 100": lambda x, g: x * 100,
    "values of 1e-4": lambda x, g: x * 1e-4,
    "a mean of 100": lambda x, g: x + 100,
    "cancellation": lambda x, g: x.abs() * torch.where(_every(x, 2), 1000.0, -1000.0).to(x.dtype),
    "zeros": lambda x, g: x * 0,
    "negative zeros": lambda x, g: x.abs() * -0.0,
    "ones": lambda x, g: torch.ones_like(x),
    "ties": lambda x, g: x.round(),
    "equal rows": lambda x, g: x[..., :1].expand(x.shape).clone() if x.dim() else x,
    "ramp": lambda x, g: (torch.arange(x.numel()).reshape(x.shape) % 97 / 16 - 3).to(x.dtype),
    "one large element": lambda x, g: _with(x, 300.0),
    "subnormal numbers": lambda x, g: x * torch.finfo(x.dtype).tiny * 0.25,
    "NaN": lambda x, g: _with(x, math.nan),
    "infinity": lambda x, g: _with(x, math.inf),
    "masked by -inf": lambda x, g: x.masked_fill(_every(x, 3), -math.inf),
    "all masked": lambda x, g: _row(x, -math.inf)
}  # fmt: skip
"""Name -> what becomes of normal numbers."""


def _every(x: Tensor, number: int) -> Tensor:
    return (torch.arange(x.numel()).reshape(x.shape) % number == number - 1) if x.numel() else x.bool()


def _with(x: Tensor, value: float) -> Tensor:
    found = x.clone()
    if x.numel():
        found.view(-1)[x.numel() // 2] = value
    return found


def _row(x: Tensor, value: float) -> Tensor:
    found = x.clone()
    if x.numel() and x.dim() > 1:
        found[(0,) * (x.dim() - 1)] = value
    return found


def _strided(x: Tensor) -> Tensor:
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    wide[..., 1::2] = 7
    return wide[..., ::2]


def guarded(x: Tensor) -> Tensor:
    """Return the same numbers with NaN before and after them in memory."""
    around = torch.full((x.numel() + 2 * _GUARD,), math.nan, dtype=x.dtype)
    inside = around[_GUARD : _GUARD + x.numel()].view(x.shape)
    return inside.copy_(x)


GUARDED = "NaN around the inputs"
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    GUARDED: guarded,
    "transposed in memory": lambda x: x.mT.contiguous().mT if x.dim() > 1 else _strided(x),
    "every second column of a wider tensor": lambda x: _strided(x) if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() > 1 and len(x) else x,
    "not aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}
"""Name -> the same numbers (but for what is expanded) in another place of memory."""
ALIASED = "one tensor as two arguments"


@dataclass(frozen=True)
class KernelCase:
    """One call."""

    sizes: Mapping[str, int]
    dtype: torch.dtype
    values: str = "ordinary"
    layout: str = "contiguous"

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        odd = [part for part in (self.values, self.layout) if part not in ("ordinary", "contiguous")]
        return ", ".join([str(self.dtype).removeprefix("torch."), *([sizes] if sizes else []), *odd])

    def inputs(self, make: Make, values: Mapping[str, Callable[..., Tensor]], seed: int) -> list[Any]:
        """Return the arguments."""
        generator = torch.Generator().manual_seed(seed)
        change = values[self.values]
        lay = LAYOUTS[self.layout if self.layout in LAYOUTS else "contiguous"]

        def changed(leaf: Any) -> Any:
            is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return lay(change(leaf, generator)) if is_float else leaf

        found = [changed(leaf) for leaf in make(self.sizes, self.dtype, generator)]
        if self.layout == ALIASED:
            for one, other in pairwise(range(len(found))):
                a, b = found[one], found[other]
                if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
                    found[other] = a
        return found


def maker(shapes: str | Sequence[Any] | Make) -> tuple[Make, list[str]]:
    """Return (what makes arguments, the symbols of sizes) of "B S, S", of shapes, or of a function.

    Raises:
        UsageError: It is none of these.
    """
    if callable(shapes):
        return shapes, []
    if isinstance(shapes, str):
        parts = [part.split() for part in shapes.split(",")]
    else:
        parts = [[str(size) for size in shape] for shape in shapes]
    wrong = [size for part in parts for size in part if not re.fullmatch(r"[A-Za-z_]\w*|\d+", size)]
    if wrong:
        raise UsageError("no size", got=wrong[0], expected='shapes="B S, S", or shapes=[(3, 64), (64,)]')

    def make(sizes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        known = [[int(size) if size.isdigit() else sizes[size] for size in part] for part in parts]
        return [torch.randn(shape, generator=generator).to(dtype) for shape in known]

    names = dict.fromkeys(size for part in parts for size in part if not size.isdigit())
    return make, list(names)


def cases(
    names: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    dtypes: Sequence[torch.dtype],
    values: Sequence[str],
    layouts: Sequence[str],
) -> Iterator[KernelCase]:
    """Yield cases: each size by itself, then all values and layouts of one size, in each dtype."""
    base = {name: BASE.get(name, _BASE_SIZE) for name in names}
    base |= {name: next(iter(given)) for name, given in sizes.items() if base.get(name) not in given}
    for dtype in dtypes:
        yield KernelCase(base, dtype)
        for name in base:
            for size in sizes.get(name, EDGES[:4] if name in BASE else EDGES):
                if size != base[name]:
                    yield KernelCase({**base, name: size}, dtype)
        for value in values:
            if value != "ordinary":
                yield KernelCase(base, dtype, value)
        for layout in layouts:
            if layout != "contiguous":
                yield KernelCase(base, dtype, layout=layout)
        for name in base if not sizes else ():
            yield KernelCase({**base, name: 0}, dtype)
