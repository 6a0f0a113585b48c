"""Draws a rollout beside its checkpoint on a terminal: the answer, causes with their shares, the worst tokens."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from glassengine.report.table import Screen, mark, new_table
from glassengine.results import Comparison
from glassengine.results.rollout import RolloutComparison, RolloutToken

_MOST_TOKENS, _MOST_ALIKE = 5, 2


def rollout(result: Comparison, found: RolloutComparison) -> RenderableType:
    """Return the one screen."""
    return Screen(*_lines(result, found), *_causes(found), *_tokens(found.worst[:_MOST_TOKENS]))


def _lines(result: Comparison, found: RolloutComparison) -> Iterator[Text]:
    head = mark(result.ok)
    head.append(f": {found.in_words()}")
    yield head
    yield Text(f"compared {result.baseline} in {found.dtype} with {result.candidate} ({found.format})")
    version = f", weights of {', '.join(found.versions[:3])}" if found.versions else ""
    yield Text(f"tokens   {found.num_tokens} of {found.num_samples} responses{version}")
    yield Text(f"gap      {numbers(found)}")
    yield from (Text(f"note     {note}", style="yellow") for note in result.notes[:3])


def numbers(found: RolloutComparison) -> str:
    """Return the figures of the gap in a line."""
    return (
        f"k3 KL {found.k3:.2g} nats, {found.outside:.1%} of the tokens outside of [0.9, 1.1], "
        f"root mean square {found.rms:.2g}, largest {found.largest:.2g}"
    )


def _causes(found: RolloutComparison) -> Iterator[RenderableType]:
    if not found.causes:
        return
    table = new_table("share", "kind", "cause", first=("share",))
    for one in found.causes:
        alike = f" (so would: {'; '.join(one.alike[:_MOST_ALIKE])})" if one.alike else ""
        table.add_row(f"{one.share:.0%}", one.kind, one.text + alike)
    table.add_row(f"{found.rest:.0%}", "rest", found.rest_is)
    for column in table.columns[1:]:
        column.justify, column.overflow = "left", "fold"
    yield table


def _tokens(worst: tuple[RolloutToken, ...]) -> Iterator[RenderableType]:
    if not any(one.engine != one.trainer for one in worst):
        return
    table = new_table("sample", "place", "token", "text", "engine", "trainer", first=("sample", "place", "token"))
    for one in worst:
        text = "" if one.text is None else repr(one.text)[1:-1][:24]
        table.add_row(str(one.sample), str(one.place), str(one.token), text, f"{one.engine:.4f}", f"{one.trainer:.4f}")
    yield table
