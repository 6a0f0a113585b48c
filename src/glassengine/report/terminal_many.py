"""Draws the comparisons of several candidates with one baseline: a column each, the worst tensors first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from glassengine.compare.judge import severity
from glassengine.report.table import new_table
from glassengine.report.terminal_compare import MAX_PAIRS, STYLES, notes, number
from glassengine.results import VERDICTS, Comparison, Pair

if TYPE_CHECKING:
    from glassengine.results.comparison import Comparisons

_Place = tuple[int, int, str]


def comparisons(result: Comparisons) -> RenderableType:
    """Return the answer: one line per candidate, then a row per tensor with a column per candidate."""
    columns = short_names([one.candidate for one in result.comparisons])
    answer = Text().append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    answer.append(f"  verdict {result.verdict}", style=STYLES[result.verdict])
    answer.append(f"  {len(columns)} candidates, baseline {result.baseline}")
    parts: list[RenderableType] = [answer, Text(), _candidates(result, columns), Text()]
    parts += _tensors(result, columns)
    for name, one in zip(columns, result.comparisons, strict=True):
        said = list(notes(one))
        if said:
            parts += [Text(f"\n{name}:", style="bold"), *said]
    return Group(*parts)


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of `paths` that tell them apart."""
    parts = [PurePath(path).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = [str(PurePath(*part[-length:])) for part in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return list(paths)


def _candidates(result: Comparisons, columns: Sequence[str]) -> RenderableType:
    found = new_table(
        "", "candidate", "verdict", "compared", *VERDICTS[::-1], "unmatched", "coverage", "first divergence"
    )
    for name, one in zip(columns, result.comparisons, strict=True):
        first = one.first_divergence
        found.add_row(
            Text("ok" if one.ok else "NOT OK", style="green" if one.ok else "bold red"),
            Text(name),
            Text(one.verdict, style=STYLES[one.verdict]),
            str(one.counts["compared"]),
            *(str(one.counts[verdict]) for verdict in VERDICTS[::-1]),
            str(one.counts["unmatched_baseline"]),
            f"{one.coverage:.1%}",
            Text("-" if first is None else f"step {first.step}, {first.site}"),
        )
    return found


def _tensors(result: Comparisons, columns: Sequence[str]) -> Iterator[RenderableType]:
    cells = [_by_place(one) for one in result.comparisons]
    places = dict.fromkeys(place for one in cells for place in one)

    def badness(place: _Place) -> tuple[float, ...]:
        return max(severity(pair) for one in cells for pair in one.get(place, ()))

    ranked = sorted(places, key=badness, reverse=True)
    found = new_table("step", "site", *columns)
    for step, rank, site in ranked[:MAX_PAIRS]:
        name = f"{site} (rank {rank})" if rank else site
        found.add_row(str(step), Text(name), *(_cell(one.get((step, rank, site), [])) for one in cells))
    yield Text("verdict and largest absolute difference:")
    yield found
    if len(ranked) > MAX_PAIRS:
        yield Text(f"... and {len(ranked) - MAX_PAIRS} more tensors, none worse (--json has all)")


def _by_place(one: Comparison) -> dict[_Place, list[Pair]]:
    found: dict[_Place, list[Pair]] = {}
    for pair in one.pairs:
        found.setdefault((pair.step, pair.rank, pair.site), []).append(pair)
    return found


def _cell(pairs: Sequence[Pair]) -> Text:
    if not pairs:
        return Text("not judged", style="dim")
    pair = max(pairs, key=severity)
    size = "shape" if pair.figures is None else number(pair.figures.max_abs_diff)
    return Text(pair.verdict if pair.verdict == "identical" else f"{pair.verdict} {size}", style=STYLES[pair.verdict])
