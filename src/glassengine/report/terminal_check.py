"""Draws the answers of `glass check` and `glass replay`, each on one screen: verdict, ladder, first divergence."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from glassengine.report import words
from glassengine.report.findings import next_step
from glassengine.report.head import replay_head
from glassengine.report.table import MOST_ROWS, VERDICT_STYLES, Screen, height, mark, new_table
from glassengine.report.terminal_without_tensors import document, prompt, terminal_table
from glassengine.report.without_tensors import rollout_tables
from glassengine.results import Comparison, Divergence, DriftRow, Hint, Pair, Quantization
from glassengine.results.sentences import named_mistake, parts_of_source, place_of, short

if TYPE_CHECKING:
    from glassengine.results.recorded import Replayed

_HEAD, _LEAST_ROWS = 5, 3
"""Lines of the head of a table, and the fewest rows of one."""
_MAX_RESULTS, _MAX_INPUTS, _MAX_NOTES = 3, 3, 3
_MAX_HINTS, _MAX_ORIGINS, _MAX_REASONS, _MAX_MISTAKES = 2, 2, 4, 4
_MAX_TOKENS = 5
_MAX_PROMPT, _LONGEST_SHOWN = 2, 40
_LEAST_DRIFT_ROWS, _DRIFT_ROWS, _DRIFT_HEAD = 6, 6, 4
_NAME = 21
"""Characters of the name of a weight that fit into one row of 80 columns."""
_WORDS = {"identical": "identical", "rounding": "quantization", "suspicious": "suspicious", "wrong": "MISTAKE"}


def check(result: Comparison, command: Sequence[str] = ()) -> RenderableType:
    """Return the one screen.

    Args:
        result: Of a check.
        command: The command line that gave it, after `glass`; the next command is made from it.
    """
    if result.prompt is not None and not result.counts["compared"]:
        return prompt(result.prompt)
    return _Screen(result, command)


@dataclass(frozen=True)
class _Screen:
    """The answer of a check: the mistake, the results and the next command first, at most 25 lines in all."""

    result: Comparison
    command: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it in the width that there is; what is printed with soft wrapping is not wrapped."""
        result, first = self.result, self.result.first_divergence
        if result.quantization is not None and not result.granularity:
            yield _quantization(result, result.quantization, console, options)
            return
        divergence = [] if first is None else list(_divergence(result, first))
        given = list(_given(result))
        shown = [headline(result), *_results(result), *because(result), *following(result, self.command)]
        shown += [compared(result), *divergence, *_prompt(result), *given, *_weights(result)]
        reasons, written, severity = map(list, (_skipped(result), _written_differently(result), _severity(result)))
        beside = [] if first is None else list(_beside(first))
        rest = [*beside, *([] if first is None else _about(result, first)), *severity]
        rest += [Text(f"{words.level(level.name)}: {level.note}") for level in result.levels if level.note]
        rest += [*written, *reasons]
        # What the first line says, and what one may do without, which goes first.
        is_named = first is not None and named_mistake(result) is not None
        repeated = list(_hint(first.hints[0]))[:1] if is_named and first is not None else []
        spare: list[RenderableType] = [
            *severity,
            *reversed(beside),
            *written[1:],
            *(given[-1:] if result.granularity else ()),
            *repeated,
        ]
        spare += [*_inputs(result), *reversed(reasons[2:])]
        tables: list[RenderableType] = [_ladder(result)] if result.levels else []
        kept = [*shown, *tables, *(line for line in rest if line not in spare)]
        room = MOST_ROWS - height(kept, console, options)
        if result.rollout is not None:
            causes, *tokens = rollout_tables(result.rollout)
            tables += [terminal_table(causes), *(terminal_table(one, _MAX_TOKENS) for one in tokens)]
            spare += tables[1:]
        if result.drift:
            # A comparison of two precisions asks where the signal is lost.
            tables.append(drift_table(result.drift, room - 4))
        if result.quantization is not None and result.quantization.weights:
            tables.append(weights_table(result.quantization, max(room - _HEAD, _LEAST_ROWS)))
        yield Screen(*shown, *tables, *rest, spare=spare)


def headline(result: Comparison) -> Text:
    """Return whether it is ok and why: the mistake in words where one is proven."""
    found = words.headline(result)
    text = mark(result.ok).append(": ")
    return text.append(found.why, style=VERDICT_STYLES[result.verdict] if found.is_flagged else "")


def compared(result: Comparison) -> Text:
    """Return what was compared."""
    return Text(f"compared {short(result.baseline)} (baseline) with {short(result.candidate)} (candidate)")


def because(result: Comparison) -> Iterator[Text]:
    """Yield the reasons beside the mistake that the first line names."""
    if named_mistake(result) is not None and result.other_reasons:
        yield Text(f"because  {'; '.join(result.other_reasons)}")


def following(result: Comparison, command: Sequence[str]) -> Iterator[Text]:
    """Yield what to do next."""
    if command and not result.ok:
        yield Text(f"next     {next_step(result, command)}")


def short_source(source: str) -> str:
    """Return "file:line: code" with the end of a long path."""
    code = parts_of_source(source)[1]
    return f"{place_of(source)}: {code}" if code else place_of(source)


def _ladder(result: Comparison) -> RenderableType:
    columns = ("compared", "how", "tensors", "coverage", "error/rounding", "verdict")
    table = new_table(*columns, first=("coverage", "tensors"))
    for column in table.columns[:2]:
        column.justify = "left"
    for level in result.levels:
        pairs = [pair for pair in result.pairs if pair.level == level.name]
        table.add_row(
            words.level(level.name),
            words.guarantee(level.guarantee),
            str(level.num_judged),
            "" if level.coverage is None or not level.num_judged else f"{level.coverage:.0%}",
            _worst(pairs),
            Text(level.verdict, style=VERDICT_STYLES[level.verdict])
            if level.num_judged
            else Text("nothing judged", style="dim"),
        )
    return table


def _worst(pairs: list[Pair]) -> str:
    if any(pair.verdict == "wrong" and pair.noise_ratio is None for pair in pairs):
        return "not a number"
    values = [pair.noise_ratio for pair in pairs if pair.noise_ratio is not None]
    return words.ratio(max(values)) if values else ""


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
    if found.level is not None:
        yield Text(f"  in       {words.level(found.level)}, {words.step_of(result, found)}: {found.verdict}")
    if found.where:
        yield Text(f"  where    {found.where}: {found.name_of_all}")
    yield from lines_of(found)
    yield Text(f"  error    {words.size(words.pair_of(found, result.pairs))}")
    # What kind of mistake it is, and where its test is, is never cut off, however long the names of files are.
    for hint in found.hints[:1]:
        yield from _hint(hint)
    if found.reproduction:
        yield Text(f"  test     python {Path(found.reproduction) / 'test_repro.py'}")


def lines_of(found: Divergence) -> Iterator[Text]:
    """Yield where a divergence is in the code of both sides."""
    if found.source:
        yield Text(f"  baseline {short_source(found.source)}")
    there = "" if found.candidate_site == found.site else found.candidate_site
    if found.candidate_source and found.candidate_source != found.source:
        there += f"{', ' if there else ''}{short_source(found.candidate_source)}"
    if there:
        yield Text(f"  candidate {there}")


def _hint(hint: Hint) -> Iterator[Text]:
    yield from (Text(f"  {what:8} {text}") for what, text in words.hint_lines(hint))


def _beside(found: Divergence) -> Iterator[Text]:
    """Yield what else it looks like, what shows it, and how large it is."""
    for hint in words.hints_worth_a_line(found.hints)[1:_MAX_HINTS]:
        yield from _hint(hint)
    yield from (Text(f"  {what:8} {text}") for what, text in words.own_error(found))
    if not found.reproduction:
        yield Text("  test     --reproduction DIR writes a test of this op that needs neither model")


def _about(result: Comparison, found: Divergence) -> Iterator[Text]:
    """Yield what came of it, and what else went wrong."""
    inherited = sum(pair.inherited for pair in result.pairs if pair.level == found.level)
    others = [d for d in result.origins if d.level == found.level and d.leads and d.site != found.site]
    if found.group is not None:
        others = [d for d in others if d.group != found.group]
    if inherited:
        yield Text(f"  after    {inherited} later tensors differ only because of it")
    said = found.hints[0].text if found.hints and found.hints[0].proven else None
    same = [d for d in others if said is not None and d.hints and d.hints[0].text == said]
    others = [d for d in others if d not in same]
    if same:
        where = f"{len(same)} other places" if len(same) > 1 else same[0].site
        yield Text(f"  also     the same mistake in {where}")
    for other in others[:_MAX_ORIGINS]:
        many = f", {other.where}" if other.where else ""
        kind = f": {other.hints[0].in_words()}" if other.hints else ""
        text = f"{other.site} (step {other.step}, {other.verdict}{many}) makes an error of its own{kind}"
        yield Text(f"  also     {text}")
    if len(others) > _MAX_ORIGINS:
        yield Text(f"  also     {len(others) - _MAX_ORIGINS} more origins (--json has all)")


def _severity(result: Comparison) -> Iterator[Text]:
    shown = {found.level for found in words.results_shown(result)}  # its tokens stand beside its results
    yield from (Text(text) for level, text in words.severity_lines(result) if level not in shown)


def _skipped(result: Comparison) -> Iterator[Text]:
    reasons = Counter((item.side, item.reason) for item in result.skipped)
    whole = {item.reason for item in result.skipped if item.site == "*"}
    if reasons:
        yield Text(f"not judged: {len(result.skipped)} {'sites' if len(result.skipped) > 1 else 'site'}")
    # Why a whole comparison is missing is never cut off.
    ranked = sorted(reasons.items(), key=lambda one: (one[0][1] not in whole, -one[1]))
    for (side, reason), count in ranked[:_MAX_REASONS]:
        yield Text(f"  {count} of {words.of_side(side)}: {reason}")


def answer(result: Comparison) -> Iterator[Text]:
    """Yield the lines."""
    yield from _prompt(result)
    yield from _results(result)
    yield from _given(result)


def _given(result: Comparison) -> Iterator[Text]:
    """Yield what was given to both sides, notes, and how finely the inside was judged."""
    yield from _inputs(result)
    if result.rollout is not None:
        yield Text(f"tokens   {words.rollout_tokens(result.rollout)}")
    yield from (Text(f"note     {note}", style="yellow") for note in result.notes[:_MAX_NOTES])
    if result.granularity:
        left_out = words.exempt(result.exemptions)
        yield Text(f"judged   {words.judged(result.granularity[0])}{f'; not counted: {left_out}' if left_out else ''}")


def _prompt(result: Comparison) -> Iterator[Text]:
    """What is beside the first line: an example of the first cause, and the next cause."""
    for number, one in enumerate(() if result.prompt is None else result.prompt.wrong[:_MAX_PROMPT]):
        if number:
            yield Text(f"prompt   {one.part}: {one.cause}: {one.detail}")
        if one.example is not None:
            ours, theirs = (
                " | ".join(shown)[:_LONGEST_SHOWN] or "nothing"
                for shown in (one.example.baseline_shown, one.example.candidate_shown)
            )
            yield Text(f"example  {one.example.text[:_LONGEST_SHOWN]!r}: {ours!r}, in the candidate {theirs!r}")


def _results(result: Comparison) -> Iterator[Text]:
    order = words.results_shown(result)
    told = []
    if result.quantization is not None:  # of a file whose engine is judged on the weights that it has
        told.append(words.cost_line(result.quantization, result.results))
        order = [found for found in order if found.judged_by != "signal"]
    own = "the engine on the file's weights: " if told else ""
    gap = f"; {words.gap(result.rollout)}" if result.rollout is not None else ""
    told += [own + words.result_line(found) + gap for found in order[:_MAX_RESULTS]]
    yield from (Text(f"{'results' if number == 0 else '':8} {line}") for number, line in enumerate(told))
    if len(order) > _MAX_RESULTS:
        rest = order[_MAX_RESULTS:]
        yield Text(f"         and {len(rest)} more: {sum(found.agrees for found in rest)} agree")
    if not result.results and result.granularity:
        reasons = (item.reason for item in result.skipped if item.side == "both" and "/" not in item.site)
        yield Text(f"results  {next(reasons, 'not compared: the candidate has none of the baseline')}")


def _inputs(result: Comparison) -> Iterator[Text]:
    cases = result.inputs
    if not cases or not cases[0].inputs:
        return
    first = [used for used in cases[0].inputs if used.step == 0]
    origins = Counter(used.origin for case in cases for used in case.inputs)
    parts = [words.input_line(used) for used in first[:_MAX_INPUTS]]
    if len(first) > _MAX_INPUTS:
        parts.append(f"and {len(first) - _MAX_INPUTS} more")
    steps = sum(case.num_steps for case in cases)
    more = f"; {len(cases)} case{'s' if len(cases) > 1 else ''}, {steps} steps" if steps > 1 else ""
    yield Text(f"inputs   {' and '.join(origins)}: {', '.join(parts)}{more}")


def drift_table(rows: Sequence[DriftRow], room: int) -> Table:
    """Return the rows that introduce most, in order of execution, results last.

    Args:
        rows: All of them.
        room: How many rows of a screen there are for them.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("drift, in order of execution", overflow="fold")
    for name in ("SNR dB", "cosine", "made there dB", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    results = [row for row in rows if row.kind == "result"]
    inner = [row for row in rows if row.kind != "result"]
    most = max(max(room, _LEAST_DRIFT_ROWS) - len(results), 1)
    shown = sorted(range(len(inner)), key=lambda at: -(inner[at].share or 0.0))[:most]
    cells = [_drift(inner[at]) for at in sorted(shown)]
    if len(inner) > most:
        rest = sum(row.share or 0.0 for at, row in enumerate(inner) if at not in shown)
        cells.append((f"... and {len(inner) - most} more (--json has all)", "", "", "", f"{rest:.1%}"))
    for texts in (*cells, *map(_drift, results)):
        table.add_row(*texts)
    return table


def _drift(row: DriftRow) -> tuple[str, ...]:
    share = "" if row.share is None else f"{row.share:.1%}"
    return row.site, _decibels(row.snr_db), f"{row.cosine_similarity:.6f}", _decibels(row.introduced_db), share


def _decibels(value: float | None) -> str:
    return "" if value is None else "exact" if value == math.inf else f"{value:.1f}"


def replayed(result: Replayed) -> RenderableType:
    """Return the one screen."""
    parts = list(document(replay_head(result)))
    if result.comparison is not None:
        parts += [Text(), check(result.comparison)]
    elif not result.ok and not (result.error or result.first_nonfinite or result.bisection):
        snapshot = shlex.quote(result.snapshot)
        parts.append(Text(f"next     glass replay {snapshot} --compare judges every op, --bisect finds what breaks"))
    return Screen(*parts)


def _quantization(result: Comparison, found: Quantization, console: Console, options: ConsoleOptions) -> RenderableType:
    head = mark(result.ok)
    head.append(f": {result.not_ok_because or 'every difference is explained by the quantization'}")
    head.append(f"\nbaseline {result.baseline}, candidate {result.candidate} ({found.method})")
    total = [Text(f"results  {found.logits_snr_db:.1f} dB at {found.num_tokens} positions")]
    if found.kl is not None and found.token_agreement is not None:
        total[0].append(f"; same next token in {found.token_agreement:.1%}")
        alone = sum(weight.kl or 0.0 for weight in found.weights)
        total.append(Text(f"KL {found.kl:.2g} nats; that of each weight alone adds up to {alone:.2g}"))
    total += [Text(f"note     {note}", style="yellow") for note in result.notes]
    tail = []
    for origin in result.origins[:_MAX_MISTAKES]:
        text = "; ".join(hint.text for hint in origin.hints)
        tail.append(Text(f"{origin.site.removesuffix(':param')}: {text}", style=VERDICT_STYLES[origin.verdict]))
    if len(result.origins) > _MAX_MISTAKES:
        tail.append(Text(f"... and {len(result.origins) - _MAX_MISTAKES} more (--json has all)"))
    if result.skipped:
        tail.append(Text(f"not judged: {len(result.skipped)} weights that only one side has (--json has all)"))
    # The table has its head of two lines, a rule, an empty line at both ends, and a line for what is not shown.
    left = MOST_ROWS - 7 - height([head, *total, *tail], console, options)
    # Where nothing is a mistake, the question is where the signal goes.
    drift = [drift_table(result.drift, _DRIFT_ROWS)] if result.drift and not result.origins else []
    left -= sum(table.row_count + _DRIFT_HEAD for table in drift)
    return Screen(head, *total, weights_table(found, max(left, 1)), *drift, *tail)


def weights_table(found: Quantization, rows: int) -> Table:
    """Return what each weight costs alone, mistakes first and then what costs most, in so many rows."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    # Mistakes first, then what costs most.
    order = sorted(found.weights, key=lambda weight: weight.verdict in ("identical", "rounding"))
    paths = [weight.name.split(".")[:-1] for weight in order[:rows]]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    prefix = "".join(f"{parts[0]}." for parts in shared) if len(paths) > 1 else ""
    names = [weight.name.removeprefix(prefix).removesuffix(".weight") for weight in order]
    # A long name takes several rows of a terminal of 80 columns.
    needed = itertools.accumulate(math.ceil(len(name) / _NAME) for name in names)
    shown = order[: max(1, sum(total <= rows for total in needed))]
    table.add_column(f"weight, of\n{prefix}" if prefix else "weight", overflow="fold")
    for title in ("\nshare", "KL\nalone", "weight\ndB", "output\ndB", "times\nrounding"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("\ndifference", no_wrap=True)
    for name, weight in zip(names, shown, strict=False):
        table.add_row(
            name,
            f"{weight.share:.1%}",
            _decimal(weight.kl, ".2g"),
            _decimal(weight.snr_db, ".1f"),
            _decimal(weight.output_snr_db, ".1f"),
            _decimal(weight.output_over_rounding, ".2f"),
            Text(
                _WORDS[weight.verdict] + (", rescaled" if weight.is_rescaled else ""),
                style=VERDICT_STYLES[weight.verdict],
            ),
        )
    left = len(found.weights) - len(shown)
    if left > 0:
        share = sum(weight.share for weight in found.weights) - sum(weight.share for weight in shown)
        table.add_row(f"... and {left} more", f"{share:.1%}", *[""] * 5)
    return table


def _decimal(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
