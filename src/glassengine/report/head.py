"""Makes everything of a page that is plain HTML: answer, source lines, hint, both sides, ladder, tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from glassengine.reading.files import printable
from glassengine.report import words
from glassengine.results import (
    Comparison,
    Divergence,
    DriftRow,
    LevelResult,
    Pair,
    QuantizedWeight,
    Replayed,
    ResultComparison,
    sentences,
)
from glassengine.results.stored import Stored
from glassengine.results.without_tensors import PromptFinding

_LONGEST = 2000
MOST_LINES = 200
_NUMBER = re.compile(r"[-+]?([\d.,]+(e[-+]?\d+)?%?|inf)|nan")
_CODE = frozenset({"change", "output", "result", "site", "source", "tensor"})


@dataclass(frozen=True)
class PageSource:
    """A line of code of one side.

    Attributes:
        side: "baseline", "candidate" or "both sides".
        place: "file:line", or what the tensor is called there.
        code: The line; "" where it is not known.
        value: What the mistake is about, and its value on this side; "" where that is not known.
    """

    side: str
    place: str
    code: str
    value: str = ""


@dataclass(frozen=True)
class Plot:
    """One series of both runs.

    Attributes:
        name: Of the series.
        about: Steps and numbers that the picture spans.
        baseline: Corners of the pieces of its curve, as `points` of SVG; a number that is not finite is a gap.
        candidate: Likewise.
        parting: Where the runs part, from the left; None where they do not.
    """

    name: str
    about: str
    baseline: tuple[str, ...]
    candidate: tuple[str, ...]
    parting: str | None


@dataclass(frozen=True)
class Head:
    """Everything above the data.

    Attributes:
        sentence: The answer.
        ok: Whether nothing is wrong.
        is_flagged: Whether it is ok with a verdict that a reader must know.
        has_verdict: Whether it is known if something is wrong.
        sources: Of the guilty line.
        hint: Which mistake it is, as (what, text): "mistake" where proven, else "hint"; and "line" as it should be.
        lines: What else belongs to the answer: (what, text).
        baseline: What it is.
        candidate: Likewise.
        tables: What the answer rests on; those that are open stand before the tensors.
        plots: Series of runs.
        about_plots: What these are.
        notes: Sentences.
    """

    sentence: str
    ok: bool
    is_flagged: bool = False
    has_verdict: bool = True
    sources: tuple[PageSource, ...] = ()
    hint: tuple[tuple[str, str], ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    baseline: str = ""
    candidate: str = ""
    tables: tuple[PageTable, ...] = ()
    plots: tuple[Plot, ...] = ()
    about_plots: str = "The series that part first."
    notes: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """The first word."""
        return "no verdict" if not self.has_verdict else "ok" if self.ok else "NOT OK"

    @property
    def tone(self) -> str:
        """Its color: "good", "fair" or "bad"."""
        if not self.has_verdict:
            return "fair"
        return "bad" if not self.ok else "fair" if self.is_flagged else "good"


def head_of(shown: Stored, pair: Pair | None) -> Head:
    """Return the top of a page.

    Args:
        shown: What the page shows.
        pair: That of the first divergence, where there is one.
    """
    if shown.replayed is not None:
        return replay_head(shown.replayed, shown.comparison, pair)
    assert shown.comparison is not None
    return _compared(shown.comparison, pair)


def _compared(result: Comparison, pair: Pair | None) -> Head:
    top = words.headline(result)
    found = result.first_divergence
    why = words.sentence(top.why)
    lines: list[tuple[str, str]] = []
    sentence = why
    if found is not None:
        first = _sentence(result, found)
        mistake = sentences.named_mistake(result)
        sentence = first if mistake is None else words.sentence(mistake)
        lines = [] if mistake is None else [("where", first)]
        lines += [("but", why)] if result.ok else _because(result, found, first)
        lines += _about(result, found, pair)
    num = result.counts["compared"]
    calibration = "" if result.calibration is None else f"; {result.calibration}"
    lines.append(("judged", f"{num:,} tensors, coverage {result.coverage:.1%}{calibration}"))
    lines += [("not counted", text) for text in [words.exempt(result.exemptions)] if text]
    return Head(
        sentence,
        result.ok,
        top.is_flagged,
        sources=_sources(found),
        hint=tuple(words.hint_lines(found.hints[0])) if found is not None and found.hints else (),
        lines=tuple(lines),
        baseline=result.baseline,
        candidate=result.candidate,
        tables=filled(*_tables(result)),
        notes=(*result.notes, *words.side_notes(result)),
    )


def markdown(head: Head, made: str) -> str:
    """Return the head of a page as Markdown, for an issue or a message."""
    lines = [f"**{head.mark}: {head.sentence}**", ""]
    if head.baseline:
        lines += [f"Compared `{head.baseline}` (baseline) with `{head.candidate}` (candidate)", ""]
    for one in head.sources:
        lines += [f"- {one.side}: `{one.place}`" + (f": {one.value}" if one.value else "")]
        lines += [f"  `{one.code}`"] if one.code else []
    lines += [f"- {what}: {text}" for what, text in (*head.hint, *head.lines)]
    return "\n".join(map(printable, [*lines, "", *([made] if made else [])]))


def _sentence(result: Comparison, found: Divergence) -> str:
    level = f"{words.level(found.level)}, " if found.level else ""
    rank = f", rank {found.rank}" if found.rank is not None else ""
    kind = {"wrong": "wrong", "suspicious": "suspicious"}.get(found.verdict, "different")
    return f"The first {kind} {found.noun} is {found.site} ({level}{words.step_of(result, found)}{rank})."


def _because(result: Comparison, found: Divergence, first: str) -> list[tuple[str, str]]:
    """Return why it is not ok, without what `first` says."""
    reason = result.not_ok_because or ""
    for said in (f"{first[:1].lower()}{first[1:-1]}", f"the first {found.verdict} {found.noun} is {found.site}"):
        reason = reason.replace(said, "")
    return [("because", text) for text in [reason.strip(":; ")] if text]


def _about(result: Comparison, found: Divergence, pair: Pair | None) -> list[tuple[str, str]]:
    lines = [("error", words.size(pair))]
    if found.where:
        lines.append(("where", f"{found.where}: {found.name_of_all}"))
    lines += words.own_error(found)
    for hint in words.hints_worth_a_line(found.hints)[1:3]:
        lines += words.hint_lines(hint)
    if found.reproduction:
        lines.append(("test", f"python {PurePath(found.reproduction) / 'test_repro.py'}"))
    if inherited := result.counts["inherited"]:
        lines.append(("after", f"{inherited:,} later tensors differ only because of it"))
    return lines


def _sources(found: Divergence | None) -> tuple[PageSource, ...]:
    if found is None:
        return ()
    one = _source("baseline", found.source, found.site)
    values = sentences.sides(found.hints[0]) if found.hints else None
    if values is not None:
        two = _source("candidate", found.candidate_source or found.source, found.candidate_site or found.site)
        return replace(one, value=values[0]), replace(two, value=values[1])
    lines, sites = (found.source, found.candidate_source), (found.site, found.candidate_site or found.site)
    if lines[0] == lines[1] and (lines[0] is not None or sites[0] == sites[1]):
        return (_source("both sides", found.source, found.site),) if found.source else ()
    return one, _source("candidate", found.candidate_source, found.candidate_site)


def _source(side: str, source: str | None, site: str) -> PageSource:
    place, code = sentences.parts_of_source(source) if source else (site, "")
    return PageSource(side, place, code)


def _tables(result: Comparison) -> Iterator[PageTable]:
    """Yield the tables of a comparison; those of which it has nothing are empty."""
    about = (
        "What the model returns, end to end, in each comparison; of a language model also how many next tokens change."
    )
    columns: tuple[str, ...] = ("compared", "result", "verdict", "how it agrees", "tensor")
    below = tuple(text for _, text in words.severity_lines(result))
    results = [
        (words.level(one.level), one.name, _chip(one), words.result_line(one), shaped(one.dtype, one.shape))
        for one in result.results
    ]
    yield table("Results and tokens", about, columns, results, is_open=True, below=below)
    about = "From the model as it is to what is deployed; an error enters in the first row that is not ok."
    columns = ("compared", "verdict", "how", "tensors", "coverage", "first divergence", "note")
    yield table("Comparisons", about, columns, list(map(_level, result.levels)), is_open=True)
    about = "Every other op that makes an error of its own."
    columns = ("step", "compared", "site", "verdict", "where", "source", "hint")
    yield table("Other origins", about, columns, _origins(result), is_open=True)
    yield from facts_tables(result.environment)
    inputs = [
        (case.case, str(used.step), used.origin, words.input_line(used), used.recipe)
        for case in result.inputs
        for used in case.inputs
    ]
    columns = ("case", "step", "origin", "input", "how it was made")
    yield table("Inputs", "What all sides ran on, and whether it was made up.", columns, inputs)
    if result.prompt is not None:
        columns = ("part", "cause", "level", "detail", "text", "baseline", "candidate")
        causes = [_prompt(one) for one in result.prompt.findings]
        what = "Tokens, templates and settings of both sides, tried before the first operation."
        yield table("Prompt", what, columns, causes, is_open=bool(result.prompt.wrong))
    judged = [(words.level(one.level), words.judged(one)) for one in result.granularity]
    what = "Which share of the tensors was judged op by op, in regions of a few ops, or by the results."
    yield table("How closely it was judged", what, ("compared", "judged"), judged)
    if result.weights is not None and result.weights.different:
        ways = [(text,) for text in (*result.weights.how, *result.weights.different)]
        what = f"{len(result.weights.different)} of {result.weights.compared} differ by more than rounding."
        yield table("Weights", what, ("weight",), ways)
    different = [
        (words.level(o.level), o.site, o.candidate_site, o.difference, o.verdict) for o in result.written_differently
    ]
    columns = ("compared", "baseline", "candidate", "difference", "verdict")
    yield table("Written differently", "The same op with other arguments.", columns, different)
    columns = ("kind", "site", "SNR dB", "cosine", "made there dB", "share of the loss")
    yield table("Drift", "Where a less precise candidate loses its signal.", columns, list(map(_drift, result.drift)))
    if result.quantization is not None:
        weights = [_weight(one) for one in result.quantization.weights]
        columns = ("weight", "verdict", "SNR dB", "steps, rms", "hint")
        yield table("Quantization", "What quantization did to each weight, alone.", columns, weights)
    counted = Counter((item.side, item.reason) for item in result.skipped)
    reasons = [(f"{count:,}", side, reason) for (side, reason), count in counted.most_common()]
    what = "What was left out, by reason. Nothing is left out in silence."
    yield table("Not compared", what, ("tensors", "side", "reason"), reasons)


def shaped(dtype: str, shape: Sequence[int]) -> str:
    """Return "float32[3, 8]"."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _chip(judged: ResultComparison | LevelResult | Divergence) -> Chip:
    is_same = isinstance(judged, ResultComparison) and judged.is_identical
    return Chip(*["identical" if is_same else judged.verdict] * 2)


def _level(level: LevelResult) -> tuple[Cell, ...]:
    first = level.first_divergence
    return (
        words.level(level.name),
        _chip(level) if level.num_judged else Chip("none", "nothing judged"),
        words.guarantee(level.guarantee),
        f"{level.num_judged:,}",
        "" if level.coverage is None or not level.num_judged else f"{level.coverage:.0%}",
        "" if first is None else f"step {first.step}, {first.site}",
        level.note or "",
    )


def _origins(result: Comparison) -> list[tuple[Cell, ...]]:
    first = result.first_divergence
    # What a coarser comparison finds again at the same op is no other origin.
    by_place = {_place(one): one for one in reversed(result.origins) if one.leads}
    known = None if first is None else _place(first)
    others = [one for one in result.origins if by_place.get(_place(one)) is one and _place(one) != known]
    found: list[tuple[Cell, ...]] = []
    for one in others:
        hint = one.hints[0].in_words() if one.hints else ""
        place = str(one.step), words.level(one.level or ""), one.site
        found.append((*place, _chip(one), one.where or "", one.source or "", hint))
    return found


def _place(one: Divergence) -> tuple[object, ...]:
    return one.site, one.rank


def replay_head(result: Replayed, comparison: Comparison | None = None, pair: Pair | None = None) -> Head:
    """Return the top of the page of a replay, with that of its comparison."""
    inner = Head("", result.ok) if comparison is None else _compared(comparison, pair)
    lines: list[tuple[str, str]] = [("error", result.error.strip().splitlines()[0])] if result.error else []
    sources: tuple[PageSource, ...] = inner.sources
    sentence = f"Replay: {words.replay_sentence(result)}."
    if comparison is not None and comparison.first_divergence is not None:
        sentence = inner.sentence
    if (first := result.first_nonfinite) is not None:
        where = f" in {first['module']}" if first.get("module") else ""
        number = f"{first.get('num_elements')} of {first.get('total_elements')} elements"
        lines.append(("where", f"{first.get('node')}{where}: {number}"))
        sources = (_source("snapshot", first.get("source"), str(first.get("node"))),)
    if (cut := result.bisection) is not None and cut.failure is not None:
        lines.append(("tried", f"{cut.num_trials} pieces of the graph were compiled"))
        lines += [("part", cut.part)] if cut.part else []
        test = "--reproduction DIR writes a test of this piece alone"
        lines.append(("test", f"python {PurePath(cut.reproduction) / 'test_repro.py'}" if cut.reproduction else test))
    lines.append(("snapshot", result.snapshot))
    recorded_with = f" with {result.recorded_backend}" if result.recorded_backend else ""
    about = "The smallest piece of the graph that fails alone."
    ops = [(op.op, op.node, op.module.removesuffix(".") or "(root)", op.source or "") for op in cut.ops] if cut else []
    broken = table("Ops that break", about, ("op", "node", "module", "source"), ops, is_open=True)
    what = "What the snapshot gave when it was run again, against what was recorded."
    columns = ("output", "tensor", "as recorded", "largest difference", "not finite")
    bits = {None: Chip("none", "not recorded"), True: Chip("identical", "same bits")}
    rows: list[tuple[Cell, ...]] = [
        (
            one.name,
            shaped(one.dtype, one.shape),
            bits.get(one.same_bits) or Chip("wrong", f"{one.num_different} differ"),
            f"{one.max_abs_diff:.3g}" if one.max_abs_diff else "",
            one.nonfinite,
        )
        for one in sorted(result.outputs, key=lambda one: one.same_bits is not False)
    ]
    outputs = table("Outputs", what, columns, rows, is_open=True)
    return Head(
        sentence,
        result.ok,
        sources=sources,
        hint=inner.hint,
        lines=(*lines, *inner.lines),
        baseline=f"{result.executable}, execution {result.execution}, as recorded{recorded_with}",
        candidate=f"the same execution, run again on {result.backend}",
        tables=(*filled(broken, outputs), *inner.tables),
        notes=(*result.notes, *inner.notes),
    )


def facts_tables(environment: Mapping[str, Any]) -> tuple[PageTable, PageTable]:
    """Return what is known of both sides and differs, and what is the same.

    Args:
        environment: Of a comparison: "baseline" and "candidate", each with facts in any depth.
    """
    sides = [
        {name: fact for name, fact in _flat(environment.get(side)) if name.partition(".")[0] not in words.TOLD}
        for side in ("baseline", "candidate")
    ]
    apart: list[tuple[Cell, ...]] = []
    same: list[tuple[Cell, ...]] = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        left, right = (side.get(name) for side in sides)
        if left == right:
            same.append((_text(name), _text(left)))
            continue
        if isinstance(left, frozenset) and isinstance(right, frozenset):
            # Of a long list of flags only what one side has and the other has not.
            left, right = left - right, right - left
        apart.append((_text(name), _text(left) or "not known", _text(right) or "not known"))
    about = "Where baseline and candidate came from, as far as that differs."
    is_one = environment.get("baseline") == environment.get("candidate")
    why = "Both sides ran in one process." if is_one else "Of both sides."
    return (
        table("Both sides", about, ("fact", "baseline", "candidate"), apart, is_open=True),
        table("Facts that are the same", why, ("fact", "both"), same),
    )


def _flat(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and depth < 8:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, (list, tuple)) and len(value) > 8 and all(isinstance(one, str) for one in value):
        yield name, frozenset(value)
    elif value is not None and name:
        yield name, value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (frozenset, list, tuple)):
        value = " ".join(sorted(map(str, value)) if isinstance(value, frozenset) else map(str, value))
    text = printable(str(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class Chip(NamedTuple):
    """A word in the color of a verdict, or one that leads to a file.

    Attributes:
        kind: The verdict.
        text: The word.
        href: The address of the file, beside the page.
    """

    kind: str
    text: str
    href: str = ""


Cell = str | Chip


class PageTable(NamedTuple):
    """A table of a page.

    Attributes:
        title: Its heading.
        sentence: What it shows.
        columns: Their names.
        rows: One cell a column.
        kinds: Of the columns: "number", "code" or "".
        is_open: Whether it is seen at once.
        below: Lines below it.
    """

    title: str
    sentence: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kinds: tuple[str, ...]
    is_open: bool = False
    below: tuple[str, ...] = ()


def filled(*tables: PageTable) -> tuple[PageTable, ...]:
    """Return the tables that have rows."""
    return tuple(one for one in tables if one.rows)


_OF_LEVEL = {"wrong": "wrong", "limit": "suspicious", "note": "none"}


def table(
    title: str,
    sentence: str,
    columns: tuple[str, ...],
    rows: Sequence[Sequence[Cell]],
    *,
    is_open: bool = False,
    below: tuple[str, ...] = (),
) -> PageTable:
    """Return a table of the first rows, without columns that are empty; it says how many rows there are in all."""
    if len(rows) > MOST_LINES:
        sentence += f" The first {MOST_LINES} of {len(rows):,}; the JSON document has all."
    shown = rows[:MOST_LINES]
    full = [(name, cells) for name, *cells in zip(columns, *shown, strict=True) if not shown or any(cells)]
    kinds = tuple(_kind(name, cells) for name, cells in full)
    return PageTable(
        title,
        sentence,
        tuple(name for name, _ in full),
        tuple(zip(*(cells for _, cells in full), strict=True)),
        kinds,
        is_open,
        below,
    )


def _kind(column: str, cells: Iterable[Cell]) -> str:
    is_number = all(isinstance(cell, str) and (not cell or _NUMBER.fullmatch(cell)) for cell in cells)
    return "number" if is_number else "code" if column in _CODE else ""


def _prompt(one: PromptFinding) -> tuple[Cell, ...]:
    tried = one.example
    shown = (
        ("", "", "") if tried is None else (tried.text, *map(" | ".join, (tried.baseline_shown, tried.candidate_shown)))
    )
    return one.part, one.cause, Chip(_OF_LEVEL[one.level], one.level), one.detail, *shown


def _drift(row: DriftRow) -> tuple[str, ...]:
    made = "" if row.introduced_db is None else f"{row.introduced_db:.1f}"
    share = "" if row.share is None else f"{row.share:.1%}"
    return row.kind, row.site, f"{row.snr_db:.1f}", f"{row.cosine_similarity:.6f}", made, share


def _weight(one: QuantizedWeight) -> tuple[str, ...]:
    hints = "; ".join(hint.text for hint in one.hints)
    return one.name, one.verdict, f"{one.snr_db:.1f}", f"{one.rms_steps:.3g}", hints
