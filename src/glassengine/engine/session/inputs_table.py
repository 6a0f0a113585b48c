"""The one table about inputs: what was given, what the engine was built for, what is wrong with it, what helps.

It is the message of every refusal, and what is logged of each step at level DEBUG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from glassengine.errors import UsageError

_HEADER = ("input", "dtype", "device", "shape", "built for", "problem", "to do")


@dataclass(frozen=True)
class Row:
    """One input.

    Attributes:
        name: As the engine calls it.
        dtype: torch dtype name, or the type of a plain value; "-" where nothing was given.
        device: Where it is.
        shape: Its sizes, or the plain value itself.
        built: What the engine was built for.
        problem: What is wrong; empty when nothing is.
        fix: The exact call or flag that helps.
    """

    name: str
    dtype: str
    device: str
    shape: str
    built: str
    problem: str = ""
    fix: str = ""


def row_of(name: str, tensor: torch.Tensor, built: str, problem: str = "", fix: str = "") -> Row:
    """Return the row of a tensor; its values are not looked at."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Row(name, dtype, str(tensor.device), str(list(tensor.shape)), built, problem, fix)


def render(rows: Sequence[Row]) -> str:
    """Return the table as text, a line per row; columns that are empty throughout are left out."""
    cells = [[r.name, r.dtype, r.device, r.shape, r.built, r.problem or "ok", r.fix] for r in rows]
    if not any(row.problem for row in rows):
        cells = [cell[: 5 if any(row.built for row in rows) else 4] for cell in cells]
    table = [list(_HEADER[: len(cells[0])]), *cells]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def render_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the table of what a step is about to be given."""
    return render([row_of(name, tensor, "") for name, tensor in tensors.items()])


def refuse(engine: str, rows: Sequence[Row]) -> None:
    """Raise if any row has a problem; the hint repeats what helps.

    Raises:
        UsageError: With the table of all rows.
    """
    fixes = dict.fromkeys(row.fix for row in rows if row.problem and row.fix)
    if any(row.problem for row in rows):
        raise UsageError(
            f"the inputs do not fit the engine {engine!r}", got="\n" + render(rows), hint="; ".join(fixes) or None
        )
