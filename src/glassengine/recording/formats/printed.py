"""The text that `print(tensor)` writes, read back."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# torch prints in scientific notation, with a dot behind whole numbers, or as True and False.
_NUMBER = r"[+-]?(?:inf|nan|\d+\.?\d*(?:e[+-]?\d+)?)"
_TOKEN = re.compile(rf"[\[\]]|True|False|(?P<re>{_NUMBER})(?P<im>[+-](?:inf|nan|\d+\.?\d*(?:e[+-]?\d+)?)j)?")
_SEPARATORS = re.compile(r"[\s,]*")
_TAIL = re.compile(
    r"\s*(?:,\s*(?:size=\([\d, ]*\)|dtype=torch\.\w+|device='[\w:]+'|requires_grad=\w+|grad_fn=<[^<>\n]{0,100}>)\s*)*"
    r"\)\s*"
)
_MAX_ELEMENTS = 1 << 24


def parse_tensor(lines: Sequence[str], shape: tuple[int, ...], dtype: str) -> Tensor | str:
    """Return the tensor that was printed, or why the text is not that of a whole tensor.

    Args:
        lines: The text.
        shape: Its sizes, which the print need not show.
        dtype: torch dtype name.
    """
    text = "\n".join(lines)
    start = text.find("tensor(")
    if start < 0:
        return "it does not begin with tensor("
    if math.prod(shape) > _MAX_ELEMENTS:
        return f"it claims {math.prod(shape)} elements"
    values: list[Any] = []
    position, depth = start + len("tensor("), 0
    while True:
        found = _TOKEN.match(text, _SEPARATORS.match(text, position).end())  # type: ignore[union-attr]
        if found is None:
            break
        position = found.end()
        if found[0] in "[]":
            depth += 1 if found[0] == "[" else -1
        else:
            values.append(_value(found))
        if depth <= 0:
            break
    if depth or _TAIL.fullmatch(text, position) is None:
        return f"it cannot be read at {text[position : position + 20]!r}"
    if len(values) != math.prod(shape):
        return f"{len(values)} values for the shape {list(shape)}"
    import torch

    try:
        return torch.tensor(values, dtype=_widest(values)).reshape(shape).to(getattr(torch, dtype))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        return str(error)


def _value(found: re.Match[str]) -> Any:
    if found[0] in ("True", "False"):
        return found[0] == "True"
    if found["im"] is not None:
        return complex(float(found["re"]), float(found["im"][:-1]))
    number = found["re"]
    return int(number) if re.fullmatch(r"[+-]?\d+", number) else float(number)


def _widest(values: list[Any]) -> torch.dtype | None:
    """Return a dtype that holds every digit; torch's own choice for integers and bools."""
    import torch

    if any(isinstance(value, complex) for value in values):
        return torch.complex128
    return torch.float64 if any(isinstance(value, float) for value in values) else None
