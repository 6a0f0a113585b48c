"""A quantized candidate on one screen: what is a mistake, what quantization costs, and which layers cost most."""

from __future__ import annotations

import itertools
import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.report.terminal_drift import drift_table
from glassengine.results import Comparison, Quantization, QuantizedWeight

_ROWS, _COLUMNS, _NAME = 24, 100, 21
_MAX_HINTS = 4
_DRIFT_ROWS, _DRIFT_HEAD = 6, 4
_STYLES = {"identical": "green", "rounding": "green", "suspicious": "yellow", "wrong": "bold red"}
_WORDS = {"identical": "identical", "rounding": "quantization", "suspicious": "suspicious", "wrong": "MISTAKE"}


def quantization(result: Comparison, found: Quantization) -> RenderableType:
    """Return the one screen."""
    head = Text()
    head.append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    head.append(f": {result.not_ok_because or 'every difference is explained by the quantization'}")
    head.append(f"\nbaseline {result.baseline}, candidate {result.candidate} ({found.method})")
    total = _total(found)
    tail = _mistakes(result)
    if result.skipped:
        tail.append(Text(f"not judged: {len(result.skipped)} weights that only one side has (--json has all)"))
    # The table has its head of two lines, a rule, an empty line at both ends, and a line for what is not shown.
    left = _ROWS - 6 - sum(_num_rows(text) for text in (head, *total, *tail))
    # Where nothing is a mistake, the question is where the signal goes.
    drift = [drift_table(result.drift, _DRIFT_ROWS)] if result.drift and not result.origins else []
    left -= sum(table.row_count + _DRIFT_HEAD for table in drift)
    return Group(head, *total, weights_table(found, max(left, 1)), *drift, *tail)


def _num_rows(text: Text) -> int:
    return sum(max(1, math.ceil(len(line) / _COLUMNS)) for line in text.plain.splitlines())


def weights_table(found: Quantization, rows: int) -> Table:
    """Return what each weight costs alone, mistakes first and then what costs most, in so many rows."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # Mistakes first, then what costs most.
    order = sorted(found.weights, key=lambda weight: weight.verdict in ("identical", "rounding"))
    prefix = _prefix([weight.name for weight in order[:rows]])
    # A long name takes several rows of a terminal of 80 columns.
    needed = itertools.accumulate(math.ceil(len(_short(weight, prefix)) / _NAME) for weight in order)
    shown = order[: max(1, sum(total <= rows for total in needed))]
    table.add_column(f"weight, of\n{prefix}" if prefix else "weight", overflow="fold")
    for name in ("\nshare", "KL\nalone", "weight\ndB", "output\ndB", "times\nrounding"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\ndifference", no_wrap=True)
    for weight in shown:
        table.add_row(
            _short(weight, prefix),
            f"{weight.share:.1%}",
            _number(weight.kl, ".2g"),
            _number(weight.snr_db, ".1f"),
            _number(weight.output_snr_db, ".1f"),
            _number(weight.output_over_rounding, ".2f"),
            Text(_WORDS[weight.verdict] + (", rescaled" if weight.is_rescaled else ""), style=_STYLES[weight.verdict]),
        )
    left = len(found.weights) - len(shown)
    if left > 0:
        share = sum(weight.share for weight in found.weights) - sum(weight.share for weight in shown)
        table.add_row(f"... and {left} more", f"{share:.1%}", *[""] * 5)
    return table


def _prefix(names: list[str]) -> str:
    """Return the path that all names begin with, dot included."""
    paths = [name.split(".")[:-1] for name in names]
    shared = list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    return "".join(f"{parts[0]}." for parts in shared) if len(names) > 1 else ""


def _short(weight: QuantizedWeight, prefix: str) -> str:
    return weight.name.removeprefix(prefix).removesuffix(".weight")


def _mistakes(result: Comparison) -> list[Text]:
    lines = []
    for origin in result.origins[:_MAX_HINTS]:
        text = "; ".join(hint.text for hint in origin.hints)
        lines.append(Text(f"{origin.site.removesuffix(':param')}: {text}", style=_STYLES[origin.verdict]))
    if len(result.origins) > _MAX_HINTS:
        lines.append(Text(f"... and {len(result.origins) - _MAX_HINTS} more (--json has all)"))
    return lines


def _total(found: Quantization) -> list[Text]:
    text = f"results  {_number(found.logits_snr_db, '.1f')} dB at {found.num_tokens} positions"
    if found.kl is None or found.token_agreement is None:
        return [Text(text)]
    alone = sum(weight.kl or 0.0 for weight in found.weights)
    return [
        Text(f"{text}; same next token in {found.token_agreement:.1%}"),
        Text(f"KL {found.kl:.2g} nats; that of each weight alone adds up to {alone:.2g}"),
    ]


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form) if math.isfinite(value) else "inf" if value > 0 else "-inf"
