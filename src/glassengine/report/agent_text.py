"""The answer for a coding agent: at most 40 short lines, without tables and colors, with what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from glassengine.reading.files import printable
from glassengine.report import words
from glassengine.report.findings import ReportFinding, SourceLine, findings, next_step
from glassengine.report.terminal_check import answer, compared, headline
from glassengine.report.words import hint_details, of_side, pair_of, size, untried
from glassengine.results import Comparison

MOST_LINES = 40
_LONGEST = 300
_CONTEXT = 2
_MAX_HINTS = 3
_MAX_OTHERS = 4
_MAX_REASONS = 3
_NAMES = {"line": "should read"}


def agent_text(results: Sequence[Comparison], command: Sequence[str]) -> str:
    """Return the text.

    Args:
        results: One, or those of several candidates; the first that is not ok is shown in full.
        command: The command line that gave it, after `glass`; the next command is made from it.
    """
    found = next((result for result in results if not result.ok), results[0])
    lines = [] if len(results) == 1 else list(_candidates(results))
    lines += _answer(found)
    told = findings(found)
    if told:
        lines += _finding(found, told[0])
    more = [f"also: {other.level}: {other.text}" for other in told[1 : _MAX_OTHERS + 1]]
    if len(told) > _MAX_OTHERS + 1:
        more.append(f"also: {len(told) - _MAX_OTHERS - 1} more, in the JSON document (--json FILE.json)")
    more += _not_judged(found)
    following = next_step(found, command)
    # What to do next is never cut off.
    kept = [*lines, *more][: MOST_LINES - 1]
    return "\n".join(_short(line) for line in [*kept, f"next: {following}"]) + "\n"


def _candidates(results: Sequence[Comparison]) -> Iterator[str]:
    wrong = sum(not result.ok for result in results)
    yield f"{wrong} of {len(results)} candidates are NOT OK"
    for result in results[:8]:
        yield f"  {'ok' if result.ok else 'NOT OK'}: {result.candidate}"


def _answer(result: Comparison) -> Iterator[str]:
    yield headline(result).plain
    yield compared(result).plain
    yield f"verdict: {result.verdict}, {result.counts['compared']} tensors compared, coverage {result.coverage:.0%}"
    for line in answer(result):
        name, _, text = line.plain.partition(" ")
        yield f"{name or 'results'}: {text.strip()}"


def _finding(result: Comparison, found: ReportFinding) -> Iterator[str]:
    origin = found.divergence
    if origin is None:
        yield f"{found.rule}: {found.text}"
        return
    steps = f"step {origin.step}" + (", prefill" if result.generates and origin.step == 0 else "")
    there = f" (candidate: {origin.candidate_site})" if origin.candidate_site != origin.site else ""
    yield f"op: {origin.site}{there}; {words.level(origin.level or 'record')}, {steps}, verdict {origin.verdict}"
    if origin.where:
        yield f"where: {origin.where}: {origin.group}"
    yield f"error: {size(pair_of(origin, result.pairs))}"
    for hint in found.hints[:_MAX_HINTS]:
        yield from (f"{_NAMES.get(what, what)}: {text}" for what, text in hint_details(hint))
    if (text := untried(origin)) is not None:
        yield f"not tried: {text}"
    for name, line in (("candidate", found.candidate), ("baseline", found.baseline)):
        if line is not None and not (name == "baseline" and line == found.candidate):
            yield f"{name} source: {line.place}"
            yield from _excerpt(line)


def _excerpt(line: SourceLine) -> Iterator[str]:
    for number, text in line.around(_CONTEXT):
        yield f"{'>' if number == line.line else ' '} {number:5} | {text.rstrip()}"


def _not_judged(result: Comparison) -> Iterator[str]:
    reasons = Counter((item.side, item.reason) for item in result.skipped)
    for (side, reason), count in reasons.most_common(_MAX_REASONS):
        yield f"not judged: {count} of {of_side(side)}: {reason}"


def _short(line: str) -> str:
    text = printable(line.replace("\t", "    ").replace("\n", " "))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
