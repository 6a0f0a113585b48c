"""What a check ran on, input by input: made up or given, and what its numbers are like."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Origin = Literal["given", "made up", "in the file", "built-in prompts", "recorded"]

MOST_COUNTED = 1 << 20
"""Elements of a tensor that distinct values are counted in; of a longer one only the first of them."""


@dataclass(frozen=True)
class InputUsed:
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

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        data = dataclasses.asdict(self)
        data["shape"] = None if self.shape is None else list(self.shape)
        return data

    @property
    def is_made_up(self) -> bool:
        """Whether its values were made for the check."""
        return self.origin == "made up"

    @property
    def is_constant(self) -> bool:
        """Whether all of several elements are the same number: such an input shows no exchange of its elements."""
        return self.num_distinct == 1 and math.prod(self.shape or ()) > 1


def input_used(name: str, value: Any, *, step: int, origin: Origin, recipe: str = "") -> InputUsed:
    """Return the record of an input.

    Args:
        name: As the program calls it.
        value: A tensor, or a plain value.
        step: Of the case.
        origin: Where it comes from.
        recipe: How it was made.
    """
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
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    # Narrow kinds of numbers have few kernels; float64 holds every value of the others, and int64 itself is kept.
    wide = flat.double() if flat.is_floating_point() else flat.long()
    finite = wide[wide.isfinite()]
    num_nan = int(wide.isnan().any())
    head = wide[:MOST_COUNTED]
    distinct = int(torch.unique(head[~head.isnan()]).numel()) + num_nan
    if not finite.numel():
        return None, None, distinct
    return float(finite.min()), float(finite.max()), distinct
