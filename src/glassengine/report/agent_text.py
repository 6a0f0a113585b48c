"""The answer for a coding agent: at most 40 short lines, without tables and colors, with what to do next."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from glassengine.reading.files import printable
from glassengine.report.findings import Finding, SourceLine, findings
from glassengine.report.terminal_check import answer, headline
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
    following = _next(found, told[0] if told else None, command)
    # What to do next is never cut off.
    kept = [*lines, *more][: MOST_LINES - 1]
    return "\n".join(_short(line) for line in [*kept, f"next: {following}"]) + "\n"


def _candidates(results: Sequence[Comparison]) -> Iterator[str]:
    wrong = sum(not result.ok for result in results)
    yield f"{wrong} of {len(results)} candidates are NOT OK"
    for result in results[:8]:
        yield f"  {'ok' if result.ok else 'NOT OK'}: {result.candidate}"


def _answer(result: Comparison) -> Iterator[str]:
    yield from headline(result).plain.split("\n")
    yield f"verdict: {result.verdict}, {result.counts['compared']} tensors compared, coverage {result.coverage:.0%}"
    for line in answer(result):
        name, _, text = line.plain.partition(" ")
        yield f"{name or 'results'}: {text.strip()}"


def _finding(result: Comparison, found: Finding) -> Iterator[str]:
    origin = found.divergence
    if origin is None:
        yield f"{found.rule}: {found.text}"
        return
    steps = f"step {origin.step}" + (", prefill" if result.generates and origin.step == 0 else "")
    there = f" (candidate: {origin.candidate_site})" if origin.candidate_site != origin.site else ""
    yield f"op: {origin.site}{there}; {origin.rung or 'record'}, {steps}, verdict {origin.verdict}"
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


def _next(result: Comparison, found: Finding | None, command: Sequence[str]) -> str:
    """Return one thing to do: a command, or the line to change and the command that checks it."""
    again = f"glass {shlex.join(command)}"
    if result.ok:
        return "nothing; both sides agree" if found is None else f"nothing has to be done; watch {found.site}"
    if result.too_little:
        return f"{_with_document(command)}, and read .skipped for what was not judged and why"
    if found is not None and found.rule == "prompt-differs" and result.prompt is not None:
        sides = shlex.join([result.prompt.baseline, result.prompt.candidate])
        return f"make the prompts the same (glass check-prompt {sides} shows all), then {again}"
    origin = None if found is None else found.divergence
    if origin is not None and origin.reproduction:
        test = shlex.quote(str(Path(origin.reproduction) / "test_repro.py"))
        return f"python {test}  # fails until the op is right; then {again}"
    if found is not None and found.is_shared:
        return f"both sides run this line: change what the candidate gives to it (weights, configuration), then {again}"
    if found is not None and found.candidate is not None:
        return f"change {found.candidate.place}, then {again}"
    if command[:1] == ["check"]:
        return f"{again} --reproduction reproduction"
    site = "" if found is None or found.site is None else f" {shlex.quote(found.site)}"
    document = _document(command)
    if document is not None:
        return f"glass explain {shlex.quote(document)}{site}"
    return f"{_with_document(command)}, then glass explain result.json{site}"


def _document(command: Sequence[str]) -> str | None:
    """Return the file that the command wrote its document to."""
    words = [word.partition("=")[2] for word in command if word.startswith("--json=")]
    words += [after for word, after in itertools.pairwise(command) if word == "--json" and after.endswith(".json")]
    return next(iter(words), None)


def _with_document(command: Sequence[str]) -> str:
    again = f"glass {shlex.join(command)}"
    return again if _document(command) is not None else f"{again} --json result.json"


def _short(line: str) -> str:
    text = printable(line.replace("\t", "    ").replace("\n", " "))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
