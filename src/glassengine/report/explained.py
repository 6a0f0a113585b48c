"""Results in words: a sentence for each number that decided a verdict, and the short answer for a coding agent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from glassengine.errors import UnknownNameError
from glassengine.reading.files import printable
from glassengine.report import words
from glassengine.report.findings import RULES, ReportFinding, findings, next_step
from glassengine.report.terminal_check import answer, compared, headline
from glassengine.report.words import hint_details, of_side, pair_of, size, untried
from glassengine.results import VERDICTS, Comparison, Divergence, Hint, Pair
from glassengine.results.without_tensors import LEVEL
from glassengine.sites import matches

_MAX_SITES = 5
_MAX_PAIRS = 12
_MAX_FINDINGS = 8

_VERDICTS = {
    "identical": "all elements are the same bits, or the same values",
    "rounding": "rounding explains the difference",
    "suspicious": "large for rounding (above 4 times the noise floor), and not large enough to be sure",
    "wrong": "rounding does not explain the difference",
}


def explained(result: Comparison, site: str | None = None) -> list[str]:
    """Return the lines.

    Args:
        result: What was compared.
        site: Name or pattern of tensors, of either side; None for the whole.

    Raises:
        UnknownNameError: No tensor has that name.
    """
    return [printable(line) for line in (_whole(result) if site is None else _tensors(result, site))]


def _whole(result: Comparison) -> Iterator[str]:
    yield from _answer(result)
    yield f"standing: {result.standing}"
    told = findings(result)
    for finding in told[:_MAX_FINDINGS]:
        yield f"{finding.level}: {RULES[finding.rule]}"
        yield f"  {finding.text}"
        for name, line in (("candidate", finding.candidate), ("baseline", finding.baseline)):
            if line is not None:
                yield f"  {name}: {line.place}: {line.code}"
    if len(told) > _MAX_FINDINGS:
        yield f"and {len(told) - _MAX_FINDINGS} more"
    for level in result.levels:
        what = "texts or files" if level.name == LEVEL else "tensors"
        how = f"{what} judged {words.guarantee(level.guarantee)}"
        yield f"{words.level(level.name)}: {level.num_judged} {how}, verdict {level.verdict}"


def _tensors(result: Comparison, pattern: str) -> Iterator[str]:
    pairs = [pair for pair in result.pairs if matches(pattern, pair.site) or matches(pattern, pair.candidate_site)]
    skipped = [item for item in result.skipped if matches(pattern, item.site)]
    if not pairs and not skipped:
        names = [pair.site for pair in result.pairs] + [item.site for item in result.skipped]
        raise UnknownNameError("site", pattern, names)
    sites = list(dict.fromkeys(pair.site for pair in pairs))
    for site in sites[:_MAX_SITES]:
        yield from _tensor(result, site, [pair for pair in pairs if pair.site == site])
    if len(sites) > _MAX_SITES:
        yield f"and {len(sites) - _MAX_SITES} more tensors"
    for item in skipped[:_MAX_SITES]:
        yield f"{item.site} of {of_side(item.side)} was not judged: {item.reason}"


def _tensor(result: Comparison, site: str, pairs: Sequence[Pair]) -> Iterator[str]:
    worst = sorted(pairs, key=lambda pair: -VERDICTS.index(pair.verdict))
    yield f"{site}: {worst[0].verdict}: {_VERDICTS[worst[0].verdict]}"
    origins = [origin for origin in result.origins if origin.site == site or site in origin.also_at]
    for pair in worst[:_MAX_PAIRS]:
        yield f"  {_place(pair)}: {pair.verdict}, judged by {words.judged_by(pair.judged_by)}, paired by {pair.method}"
        yield from (f"    {line}" for line in _numbers(pair))
        if pair.inherited:
            # Of the same level and step, it may have its error of these.
            near = [one.site for one in result.origins if one.level == pair.level and one.step <= pair.step]
            names = ", ".join(dict.fromkeys(near[:3]))
            yield f"    passed on: its inputs carried the error in{f', made by {names}' if names else ''}"
    if len(worst) > _MAX_PAIRS:
        yield f"  and {len(worst) - _MAX_PAIRS} more cases and steps, none worse"
    for origin in origins:
        yield from (f"  {line}" for line in _origin(origin))


def _place(pair: Pair) -> str:
    level = words.level(pair.level or "")
    parts = [level, pair.case, f"step {pair.step}", f"rank {pair.rank}" if pair.rank else None]
    return ", ".join(part for part in parts if part)


def _numbers(pair: Pair) -> Iterator[str]:
    if pair.candidate_site != pair.site:
        yield f"in the candidate: {pair.candidate_site}"
    found = pair.figures
    if pair.noise_ratio is not None or found is not None:
        yield f"error: {size(pair)}"
    if found is not None and math.isfinite(found.snr_db):
        yield f"signal-to-noise ratio {found.snr_db:.1f} dB"
    if found is not None and found.num_nonfinite_mismatch:
        yield f"{found.num_nonfinite_mismatch} elements are finite on one side only"
    if pair.reason:
        yield f"decided by: {pair.reason}"


def _origin(origin: Divergence) -> Iterator[str]:
    yield f"this op makes an error in step {origin.step}" + (f", {origin.where}" if origin.where else "")
    for name, source in (("baseline", origin.source), ("candidate", origin.candidate_source)):
        if source:
            yield f"{name}: {source}"
    yield from _mistakes(origin, origin.hints)
    if origin.reproduction:
        yield f"test: python {origin.reproduction}/test_repro.py"


def _mistakes(origin: Divergence, hints: Sequence[Hint]) -> Iterator[str]:
    for hint in hints:
        yield from (f"{_NAMES.get(what, what)}: {text}" for what, text in hint_details(hint))
    if (text := untried(origin)) is not None:
        yield f"not tried: {text}"


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
    yield from _mistakes(origin, found.hints[:_MAX_HINTS])
    for name, line in (("candidate", found.candidate), ("baseline", found.baseline)):
        if line is not None and not (name == "baseline" and line == found.candidate):
            yield f"{name} source: {line.place}"
            for number, text in line.around(_CONTEXT):
                yield f"{'>' if number == line.line else ' '} {number:5} | {text.rstrip()}"


def _not_judged(result: Comparison) -> Iterator[str]:
    reasons = Counter((item.side, item.reason) for item in result.skipped)
    for (side, reason), count in reasons.most_common(_MAX_REASONS):
        yield f"not judged: {count} of {of_side(side)}: {reason}"


def _short(line: str) -> str:
    text = printable(line.replace("\t", "    ").replace("\n", " "))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
