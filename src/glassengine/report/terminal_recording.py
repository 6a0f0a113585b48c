"""A recording on a terminal: its tensors under the modules they belong to, and the values of one of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from glassengine.recording.layout.layout import Entry, LeftOut
from glassengine.report.table import new_table
from glassengine.report.terminal_compare import number
from glassengine.results import Summary
from glassengine.sites import ROOT

_STATISTICS = ("min", "mean", "max", "std")


@dataclass(frozen=True)
class Row:
    """One tensor: its entry and statistics, or what is known of one whose values were left out."""

    tensor: Entry | LeftOut
    summary: Summary | None = None


def tree(rows: Iterable[Row], modules: Mapping[str, str]) -> RenderableType:
    """Return one table per step and rank, the tensors indented under their modules.

    Args:
        rows: In recorded order.
        modules: Path -> class name; may be empty.
    """
    parts: list[RenderableType] = []
    tables: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        tables.setdefault((row.tensor.step, row.tensor.rank), []).append(row)
    for (step, rank), members in tables.items():
        parts.append(Text(f"step {step}" + (f", rank {rank}" if rank else ""), style="bold"))
        table = new_table("site", "tensor", *_STATISTICS, "NaN", "Inf", "note")
        shown: set[str] = set()
        for row in sorted_by_module(members, modules):
            path, rest = split(row.tensor.site, modules)
            # A module that is shown has those around it above it.
            for module in () if path in shown else _chain(path):
                if module not in shown:
                    shown.add(module)
                    name = module.rpartition(".")[2] if module != ROOT else ROOT
                    kind = modules.get(module.partition("@")[0], "")
                    table.add_row(Text("  " * _depth(module) + f"{name} {kind}".rstrip(), style="bold"))
            table.add_row("  " * (_depth(path) + 1) + (rest or ":out"), *_cells(row))
        parts += [table, Text()]
    return Group(*parts[:-1])


def values(tensor: Tensor, title: str, *, full: bool) -> str:
    """Return the values of a tensor as text.

    Args:
        tensor: Any.
        title: Printed above.
        full: Every element; else the edges of what is large.
    """
    # torch formats by settings of the whole process only.
    before = copy.copy(torch._tensor_str.PRINT_OPTS)
    threshold = tensor.numel() + 1 if full else 1000
    torch.set_printoptions(threshold=threshold, linewidth=120, precision=6)  # type: ignore[no-untyped-call]
    try:
        text = str(tensor)
    finally:
        torch._tensor_str.PRINT_OPTS = before
    return f"{title}\n{text}"


def split(site: str, modules: Mapping[str, str]) -> tuple[str, str]:
    """Return the module path (with call) of a site, and the rest: port, op or tap.

    Args:
        site: A site name.
        modules: Path -> class name; what is not among them is a tap. Where it is empty, every path is a module.
    """
    cuts = [position for mark in (":", "/") if (position := site.find(mark)) >= 0]
    if cuts:
        return site[: min(cuts)] or ROOT, site[min(cuts) :]
    if modules and site.partition("@")[0] not in modules:
        path, _, tap = site.rpartition(".")
        return path or ROOT, f".{tap}"
    return site, ""


def sorted_by_module(rows: list[Row], modules: Mapping[str, str]) -> list[Row]:
    """Return the rows so that each module is in one place: in the model's order, or else that of the first tensors."""
    order: dict[str, int] = {path: position for position, path in enumerate(modules)}
    places: dict[str, list[int]] = {}
    keys: list[tuple[list[int], int]] = []
    for row in rows:
        path, rest = split(row.tensor.site, modules)
        place = places.get(path)
        if place is None:
            place = places[path] = [order.setdefault(module, len(order)) for module in _chain(path)]
        keys.append((place, 0 if rest.startswith(":in") else 1 if rest.startswith((".", "/")) else 2))
    return [rows[index] for index in sorted(range(len(rows)), key=keys.__getitem__)]


def _chain(path: str) -> list[str]:
    """Return the modules around `path`, outermost first, itself last."""
    if _is_root(path):
        return [path]
    return [ROOT, *itertools.accumulate(path.split("."), "{}.{}".format)]


def _is_root(path: str) -> bool:
    return path == ROOT or path.startswith(f"{ROOT}@")


def _depth(path: str) -> int:
    return 0 if _is_root(path) else path.count(".") + 1


def _cells(row: Row) -> list[str]:
    tensor = row.tensor
    if isinstance(tensor, Entry):
        found = row.summary
        if found is None:
            return [tensor.describe()]
        numbers = [getattr(found, name) for name in _STATISTICS]
        return [
            tensor.describe(),
            *("-" if value is None else number(value) for value in numbers),
            str(found.num_nan),
            str(found.num_inf),
        ]
    shape = "" if tensor.shape is None else f"[{','.join(map(str, tensor.shape))}]"
    light = tensor.statistics
    cells = ["-"] * 6
    if light is not None:
        low, high = ("-" if value is None else number(value) for value in (light.min, light.max))
        nonfinite = f"{light.num_nonfinite} not finite" if light.num_nonfinite else "0"
        cells = [low, "-", high, "-", nonfinite, "-"]
    return [f"{tensor.dtype or ''}{shape}", *cells, tensor.reason]
