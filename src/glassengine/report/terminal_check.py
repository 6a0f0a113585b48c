"""The answer of `glass check` on one screen: verdict, ladder, first divergence, what it is not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.report import words
from glassengine.report.terminal_answer import answer
from glassengine.report.terminal_drift import drift_table
from glassengine.report.terminal_quantization import quantization, weights_table
from glassengine.report.words import parts_of_source, short, step_of
from glassengine.results import Comparison, Divergence, Hint, Pair

_STYLES = {"identical": "green", "rounding": "green", "suspicious": "yellow", "wrong": "bold red"}
_ROWS, _COLUMNS = 24, 100
_HEAD, _LEAST_ROWS = 5, 3
"""Lines of the head of a table, and the fewest rows of one."""
_MAX_HINTS = 2
_MAX_ORIGINS = 2
_MAX_REASONS = 4


def check(result: Comparison) -> RenderableType:
    """Return the one screen."""
    if result.quantization is not None and not result.fineness:
        return quantization(result, result.quantization)
    head = [headline(result), *answer(result)]
    weights = list(_weights(result))
    divergence: list[Text] = []
    rest: list[Text] = []
    if result.first_divergence is not None:
        divergence += _divergence(result, result.first_divergence)
        rest += _about(result, result.first_divergence)
    rest += [*_severity(result), *_written_differently(result), *_skipped(result)]
    # The table has its head and a rule.
    left = _ROWS - _rows(head) - (len(result.rungs) + 2) - _rows(weights) - _rows(divergence) - 1
    drift = []
    if result.drift:
        # A comparison of two precisions asks where the signal is lost.
        drift.append(drift_table(result.drift, left - 4))
        left -= drift[0].row_count + 4
    costs = []
    if result.quantization is not None and result.quantization.weights:
        costs.append(weights_table(result.quantization, max(left - _HEAD, _LEAST_ROWS)))
        left -= costs[0].row_count + _HEAD
    tables: list[RenderableType] = [_ladder(result), *drift, *costs]
    return Group(*head, *tables, *weights, *divergence, *_cut(rest, max(left, 1)))


def _rows(lines: Sequence[Text]) -> int:
    """Return how many rows of a screen `lines` take."""
    plain = (part for line in lines for part in line.plain.split("\n"))
    return sum(max(1, math.ceil(len(part) / _COLUMNS)) for part in plain)


def _cut(lines: Sequence[Text], rows: int) -> list[Text]:
    """Return as many of `lines` as fit, and how many there are beside them."""
    if _rows(lines) <= rows:
        return list(lines)
    kept: list[Text] = []
    while _rows([*kept, lines[len(kept)]]) < rows:
        kept.append(lines[len(kept)])
    return [*kept, Text(f"... and {len(lines) - len(kept)} more lines (--json has all)")]


def headline(result: Comparison) -> Text:
    """Return whether it is ok and why, and what was compared."""
    found = words.headline(result)
    text = Text()
    text.append(found.mark, style="bold green" if result.ok else "bold red")
    text.append(": ")
    text.append(found.why, style=_STYLES[result.verdict] if found.is_flagged else "")
    text.append(f"\nbaseline {short(result.baseline)}, candidate {short(result.candidate)}")
    return text


def _short_source(source: str) -> str:
    """Return "file:line: code" with the end of a long path."""
    place, code = parts_of_source(source)
    return f"{short(place)}: {code}" if code else short(place)


def _ladder(result: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rung", overflow="fold")
    table.add_column("judged", no_wrap=True)
    for name in ("tensors", "coverage", "error/floor"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for rung in result.rungs:
        pairs = [pair for pair in result.pairs if pair.rung == rung.name]
        table.add_row(
            rung.name,
            rung.guarantee.removeprefix("judged "),
            str(rung.num_judged),
            "" if rung.coverage is None or not rung.num_judged else f"{rung.coverage:.0%}",
            _worst(pairs),
            Text(rung.verdict, style=_STYLES[rung.verdict]) if rung.num_judged else Text("nothing judged", style="dim"),
        )
    return table


def _worst(pairs: list[Pair]) -> str:
    if any(pair.verdict == "wrong" and pair.noise_ratio is None for pair in pairs):
        return "not a number"
    values = [pair.noise_ratio for pair in pairs if pair.noise_ratio is not None]
    return f"{max(values):.3g}" if values else ""


def _weights(result: Comparison) -> Iterator[Text]:
    found = result.weights
    if found is None or not found.different:
        return
    names = ", ".join((found.how or found.different)[:_MAX_REASONS])
    more = len(found.different) - _MAX_REASONS
    rest = f" and {more} more" if more > 0 else ""
    yield Text(f"weights: {len(found.different)} of {found.compared} differ: {names}{rest}", style="yellow")


def _written_differently(result: Comparison) -> Iterator[Text]:
    """What the graphs say and the values do not: gelu by tanh in bfloat16, say."""
    found = [item for item in result.written_differently if item.verdict in ("identical", "rounding")]
    if found:
        yield Text(f"written differently, the same up to rounding: {len(found)} ops")
    for item in found[:_MAX_REASONS]:
        yield Text(f"  {item.site}: {item.difference}")


def _divergence(result: Comparison, found: Divergence) -> Iterator[Text]:
    yield Text(f"first divergence: {found.site}", style="bold")
    yield Text(f"  rung     {found.rung}, {step_of(result, found)}, verdict {found.verdict}")
    if found.where:
        yield Text(f"  where    {found.where}: {found.group}")
    if found.source:
        yield Text(f"  source   {_short_source(found.source)}")
    if found.candidate_site != found.site:
        yield Text(f"  there    {found.candidate_site}")
    if found.candidate_source and found.candidate_source != found.source:
        yield Text(f"  there    {_short_source(found.candidate_source)}")
    yield Text(f"  error    {size(result, found)}")
    # What kind of mistake it is, and where its test is, is never cut off, however long the names of files are.
    for hint in found.hints[:1]:
        yield from _hint(hint)
    if found.reproduction:
        yield Text(f"  test     python {Path(found.reproduction) / 'test_repro.py'}")


def _hint(hint: Hint) -> Iterator[Text]:
    yield from (Text(f"  {what:8} {text}") for what, text in words.hint_lines(hint))


def _about(result: Comparison, found: Divergence) -> Iterator[Text]:
    """What it looks like, what shows it, what came of it, and what else went wrong."""
    for hint in words.hints_worth_a_line(found.hints)[1:_MAX_HINTS]:
        yield from _hint(hint)
    if not found.reproduction:
        yield Text("  test     --reproduction DIR writes one that shows this without the models")
    if found.introduced is not None and found.inherited is not None:
        yield Text(f"  rms      introduced {found.introduced:.3g}, inherited {found.inherited:.3g}")
    inherited = sum(pair.inherited for pair in result.pairs if pair.rung == found.rung)
    others = [d for d in result.origins if d.rung == found.rung and d.leads and d.site != found.site]
    if found.group is not None:
        others = [d for d in others if d.group != found.group]
    yield Text(f"  after    {inherited} later tensors merely inherited an error")
    said = found.hints[0].text if found.hints and found.hints[0].proven else None
    same = [d for d in others if said is not None and d.hints and d.hints[0].text == said]
    others = [d for d in others if d not in same]
    if same:
        where = f"{len(same)} other places" if len(same) > 1 else same[0].site
        yield Text(f"  also     the same mistake in {where}")
    for other in others[:_MAX_ORIGINS]:
        many = f", {other.where}" if other.where else ""
        kind = f": {other.hints[0].text}" if other.hints else ""
        text = f"{other.site} (step {other.step}, {other.verdict}{many}) introduced an error of its own{kind}"
        yield Text(f"  also     {text}")
    if len(others) > _MAX_ORIGINS:
        yield Text(f"  also     {len(others) - _MAX_ORIGINS} more origins (--json has all)")


def size(result: Comparison, found: Divergence) -> str:
    """Say how large the error of an op is, against what rounding explains, and where."""
    return words.size(words.pair_of(found, result.pairs))


def _severity(result: Comparison) -> Iterator[Text]:
    # The last rung's tokens stand beside its results.
    last = result.results[-1].rung if result.results else None
    for rung, found in result.severity.items():
        if found["num_tokens"] and rung != last:
            text = f"{rung}: same next token in {found['token_agreement']:.1%} of {found['num_tokens']}"
            text += f", mean KL {found['mean_kl']:.2g} nats"
            yield Text(text)
    for climbed in result.rungs:
        if climbed.note:
            yield Text(f"{climbed.name}: {climbed.note}")


def _skipped(result: Comparison) -> Iterator[Text]:
    reasons = Counter((item.side, item.reason) for item in result.skipped)
    if reasons:
        yield Text(f"not judged: {len(result.skipped)} sites")
    for (side, reason), count in reasons.most_common(_MAX_REASONS):
        yield Text(f"  {count} ({side}): {reason}")
