"""Adds the causes of a gap, its worst tokens and its curve to the page of a rollout."""

from __future__ import annotations

from dataclasses import replace

from glassengine.report.page.head import Chip, Head, Plot, table
from glassengine.report.terminal_rollout import numbers
from glassengine.results.rollout import RolloutComparison

_WIDTH, _HEIGHT = 600, 120


def with_rollout(head: Head, found: RolloutComparison) -> Head:
    """Return the head of a page with what is known of a rollout."""
    causes = [
        (f"{one.share:.0%}", Chip("rounding" if one.is_rounding else "wrong", one.kind), one.text, "; ".join(one.alike))
        for one in found.causes
    ]
    causes.append((f"{found.rest:.0%}", Chip("none", "rest"), found.rest_is, ""))
    tokens = [
        (str(one.sample), str(one.place), str(one.token), one.text or "", f"{one.engine:.5f}", f"{one.trainer:.5f}")
        for one in found.worst
    ]
    tables = (
        table("Causes", "Shares of the mean gap.", ("share", "kind", "cause", "so would"), causes, is_open=True),
        table(
            "Worst tokens",
            "Their log-probabilities on both sides.",
            ("sample", "place", "token", "text", "engine", "trainer"),
            tokens,
            is_open=True,
        ),
    )
    lines = [("gap", numbers(found)), *(one for one in head.lines if one[0] != "judged")]
    sides = {"plots": (_curve(found),), "about_plots": "Tokens in the order of the trainer's log-probabilities."}
    return replace(head, tables=(*tables, *head.tables), lines=tuple(lines), **sides)  # type: ignore[arg-type]


def _curve(found: RolloutComparison) -> Plot:
    values = [value for pair in found.curve for value in pair]
    low, high = min(values, default=0.0), max(values, default=1.0)

    def drawn(side: int) -> str:
        return " ".join(
            f"{_WIDTH * at / max(len(found.curve) - 1, 1):.1f},{_HEIGHT * (high - pair[side]) / (high - low or 1):.1f}"
            for at, pair in enumerate(found.curve)
        )

    about = f"from {low:.3g} to {high:.3g}; baseline: trainer, candidate: engine"
    return Plot("log-probabilities", about, (drawn(0),), (drawn(1),), None)
