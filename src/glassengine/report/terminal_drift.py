"""The table of drift: where a less precise candidate loses how much of the signal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from glassengine.results import DriftRow

_LEAST_ROWS = 6


def drift_table(rows: Sequence[DriftRow], room: int) -> Table:
    """Return the rows that introduce most, in order of execution, results last.

    Args:
        rows: All of them.
        room: How many rows of a screen there are for them.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("drift, in order of execution", overflow="fold")
    for name in ("SNR dB", "cosine", "introduced dB", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    results = [row for row in rows if row.kind == "result"]
    inner = [row for row in rows if row.kind != "result"]
    room = max(room, _LEAST_ROWS) - len(results)
    shown = sorted(range(len(inner)), key=lambda at: -(inner[at].share or 0.0))[: max(room, 1)]
    for at in sorted(shown):
        _add(table, inner[at])
    if len(inner) > len(shown):
        left = sum(row.share or 0.0 for at, row in enumerate(inner) if at not in shown)
        table.add_row(f"... and {len(inner) - len(shown)} more (--json has all)", "", "", "", f"{left:.1%}")
    for row in results:
        _add(table, row)
    return table


def _add(table: Table, row: DriftRow) -> None:
    share = "" if row.share is None else f"{row.share:.1%}"
    table.add_row(row.site, _number(row.snr_db), f"{row.cosine_similarity:.6f}", _number(row.introduced_db), share)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "-inf"
