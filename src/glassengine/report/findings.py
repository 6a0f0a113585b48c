"""Findings about places in code: one per mistake, with a rule, both source lines, a sentence.

SARIF, the text for coding agents, properties of tests and marks of other viewers are made from these.
"""

from __future__ import annotations

import ast
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

from glassengine.errors import GlassError
from glassengine.reading.files import is_regular, read_text
from glassengine.report.words import pair_of, size
from glassengine.results import FLAGGED, VERDICTS, Comparison, Divergence, Hint, Pair, worst
from glassengine.results.sentences import codes_apart
from glassengine.results.without_tensors import Invariance, RolloutComparison
from glassengine.sites import parts_of_line

Level = Literal["error", "warning"]

_MOST_SOURCE_BYTES = 4 << 20
_ALIKE = 0.25
"""Share of the characters that two lines have in common at least, of which one is what the other should be."""

RULES: dict[str, str] = {
    "prompt-differs": "Both sides make other tokens or texts of the same prompt.",
    "wrong": "An operation makes an error that rounding does not explain.",
    "suspicious": "An operation makes an error that is large for rounding.",
    "results-differ": "The results of both sides differ, and no single operation is named.",
    "token-changes": "A generated token is another one.",
    "weights-differ": "Weights of both sides differ.",
    "over-budget": "The signal-to-noise ratio is below what was asked for.",
    "too-little-judged": "Too few tensors could be judged to say that both sides agree.",
}
"""Rule -> what it says; a standing is its own rule, but for `differs inside`."""

_BESIDE_OPS = ("over budget", "too little judged")
"""Standings of which a wrong op is neither the reason nor a sign."""


@dataclass(frozen=True)
class SourceLine:
    """A line of source as a result has it.

    Attributes:
        file: As Python named it, or below its package.
        line: Number, from 1.
        code: The line, without the space around it.
    """

    file: str
    line: int
    code: str

    @classmethod
    def of(cls, text: str | None) -> SourceLine | None:
        """Return what "file:line: code" names; None where it names no line."""
        found = parts_of_line(text)
        return None if found is None else cls(found[0], found[1], found[2].strip())

    @property
    def is_statement(self) -> bool:
        """Whether the code is a whole statement, and not the first line of one."""
        try:
            return bool(ast.parse(self.code).body)
        except (SyntaxError, ValueError):
            return False

    @property
    def place(self) -> str:
        """File and line, as editors take them: relative to the working directory, where it is below that."""
        path, here = Path(self.file), Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{self.line}"

    def around(self, context: int) -> list[tuple[int, str]]:
        """Return the line with `context` lines above and below it, with their numbers.

        Only a Python file that still has this very line is read: the name comes from a result that others may have
        written. Otherwise the line stands alone.
        """
        alone = [(self.line, self.code)]
        path = Path(self.file)
        if path.suffix != ".py" or not self.code or not is_regular(path):
            return alone
        try:
            lines = read_text(path, most=_MOST_SOURCE_BYTES).split("\n")
        except GlassError:
            return alone
        here = self.line - 1
        if not (here < len(lines) and lines[here].strip() == self.code):
            return alone
        first = max(0, here - context)
        return [(first + number + 1, text) for number, text in enumerate(lines[first : here + context + 1])]


@dataclass(frozen=True)
class ReportFinding:
    """One mistake, or one reason why a comparison is not ok.

    Attributes:
        rule: A key of `RULES`.
        level: "error" where it makes the comparison fail.
        site: Of the baseline; None where no tensor is named.
        text: What is wrong, in one sentence.
        divergence: The op that made it, where one is known.
        candidate: The candidate's line.
        baseline: The baseline's line.
        hints: What kind of mistake it is, tried.
    """

    rule: str
    level: Level
    site: str | None
    text: str
    divergence: Divergence | None = None
    candidate: SourceLine | None = None
    baseline: SourceLine | None = None
    hints: Sequence[Hint] = ()

    @property
    def at(self) -> str:
        """File and line of the candidate, without folders."""
        return "this op" if self.candidate is None else f"{Path(self.candidate.file).name}:{self.candidate.line}"

    @property
    def is_shared(self) -> bool:
        """Whether both sides run one line: what the candidate gives to it is the mistake, and not the line."""
        return self.candidate is not None and self.candidate == self.baseline

    @property
    def is_run_by_both(self) -> bool:
        """Whether both sides run one line, or one statement that each has in a file of its own."""
        if self.candidate is None or self.baseline is None or self.is_shared:
            return self.is_shared
        is_same = self.candidate.code == self.baseline.code and self.candidate.is_statement
        return is_same and not any(hint.line for hint in self.hints[:1])


def findings(result: Comparison) -> list[ReportFinding]:
    """Return all findings, errors first, in order of execution.

    A comparison that is ok has no error among them, and one that is not ok has at least one.
    """
    origins = [origin for origin in result.origins if origin.leads and origin.verdict in FLAGGED]
    first = result.first_divergence
    if first is not None and first.verdict in FLAGGED:
        origins.insert(0, first)
    origins = _once(result, origins)
    # Where that was asked for, and nothing is wrong, it is the suspicious that make it fail.
    prompts = () if result.prompt is None else result.prompt.wrong
    told = [ReportFinding("prompt-differs", "error", None, f"{one.part}: {one.cause}: {one.detail}") for one in prompts]
    least = VERDICTS.index("wrong" if told else worst(origin.verdict for origin in origins))
    decides = not result.ok and result.standing not in _BESIDE_OPS
    # There may be many of both.
    pairs: dict[tuple[str | None, int, str], list[Pair]] = {_key(origin): [] for origin in origins}
    for pair in result.pairs if pairs else ():
        if (there := pairs.get(_key(pair))) is not None:
            there.append(pair)
    found = told + [
        _of_origin(origin, pairs[_key(origin)], decides and VERDICTS.index(origin.verdict) >= least)
        for origin in origins
    ]
    if not result.ok and not any(finding.level == "error" for finding in found):
        own = result.standing.replace(" ", "-")
        rule = own if own in RULES else "wrong"
        text = result.not_ok_because or RULES[rule]
        found.append(ReportFinding(rule, "error", None if first is None else first.site, text))
    return sorted(found, key=lambda finding: finding.level != "error")


def _once(result: Comparison, origins: Sequence[Divergence]) -> list[Divergence]:
    """Return one origin per tensor: on a later level the same mistake is seen again, less finely."""
    levels = [level.name for level in result.levels]
    kept: dict[tuple[str, int | None], Divergence] = {}
    for origin in origins:
        known = kept.setdefault((origin.site, origin.rank), origin)
        is_earlier = _place(levels, origin) < _place(levels, known)
        names_more = origin.candidate_source is not None and known.candidate_source is None
        if names_more or (is_earlier and known.candidate_source is None):
            kept[origin.site, origin.rank] = origin
    return list(kept.values())


def _place(levels: Sequence[str], origin: Divergence) -> int:
    return levels.index(origin.level) if origin.level in levels else len(levels)


def _key(place: Pair | Divergence) -> tuple[str | None, int, str]:
    return place.level, place.step, place.site


def _of_origin(origin: Divergence, pairs: Sequence[Pair], fails: bool) -> ReportFinding:
    where = f", {origin.where}" if origin.where else ""
    rank = f" of rank {origin.rank}" if origin.rank is not None else ""
    kind = f": {origin.hints[0].in_words()}" if origin.hints else ""
    text = f"{origin.site}{rank} is {origin.verdict}{where}{kind}."
    if origin.hints and origin.hints[0].line is not None:
        text += f" The line should read: {origin.hints[0].line}."
    if pairs:
        text += f" The error: {size(pair_of(origin, pairs))}."
    lines = SourceLine.of(origin.source), SourceLine.of(origin.candidate_source)
    return ReportFinding(
        "wrong" if origin.verdict == "wrong" else "suspicious",
        "error" if fails else "warning",
        origin.site,
        text,
        origin,
        candidate=lines[1],
        baseline=lines[0],
        hints=origin.hints,
    )


def next_step(result: Comparison, command: Sequence[str]) -> str:
    """Return one thing to do: a command, or the line to change and the command that checks it.

    Args:
        result: Of a check or of a comparison.
        command: The command line that gave it, after `glass`.
    """
    found = next(iter(findings(result)), None)
    again = f"glass {shlex.join(command)}"
    if result.ok:
        return "nothing; both sides agree" if found is None else f"nothing has to be done; watch {found.site}"
    if result.rollout is not None:
        return _next_of_rollout(result, result.rollout, again)
    if result.too_little:
        return f"{_with_document(command)}, and read .skipped for what was not judged and why"
    if found is not None and found.rule == "prompt-differs" and result.prompt is not None:
        sides = shlex.join([result.prompt.baseline, result.prompt.candidate])
        return f"make the prompts the same (glass check-prompt {sides} shows all), then {again}"
    origin = None if found is None else found.divergence
    if origin is not None and origin.reproduction:
        test = shlex.quote(str(Path(origin.reproduction) / "test_repro.py"))
        return f"python {test}  # fails until the op is right; then {again}"
    if found is not None and found.is_run_by_both:
        if found.is_shared:
            what = "gives to it (weights, configuration)"
        else:
            what = "gives to it (operands, weights, configuration), or which part of its result it reads"
        return f"both sides run {found.at}: change what the candidate {what}, then {again}"
    if found is not None and found.candidate is not None:
        # Line 1 has both lines where nothing is proven; of a known mistake the answer has the line as it should be.
        hint = next(iter(found.hints), None)
        change = hint.change if hint else None
        is_only_there = bool(change and change.candidate and change.baseline is None and change.argument is None)
        is_quoted = hint and hint.proven and hint.line is None and not is_only_there
        both = codes_apart(origin) if origin is not None and is_quoted else None
        is_pair = both is not None and SequenceMatcher(None, *both).ratio() >= _ALIKE
        how = "" if both is None or not is_pair else f" (`{both[1]}`, in the baseline `{both[0]}`)"
        return f"change {found.candidate.place}{how}, then {again}"
    is_proven = found is not None and any(hint.proven for hint in found.hints[:1])
    if is_proven and found is not None and found.baseline and origin is not None and origin.level == "candidate":
        # The candidate's own program lacks what this line does.
        return f"do in the candidate what {found.baseline.place} does: {found.baseline.code}, then {again}"
    if command[:1] == ["check"]:
        return f"{again} --reproduction reproduction"
    site = "" if found is None or found.site is None else f" {shlex.quote(found.site)}"
    document = _document(command)
    if document is not None:
        return f"glass explain {shlex.quote(document)}{site}"
    return f"{_with_document(command)}, then glass explain result.json{site}"


def _next_of_rollout(result: Comparison, found: RolloutComparison, again: str) -> str:
    if found.found == "unknown":
        return f"{again} --engine-dtype DTYPE, or have the engine write its experts (routed_experts) into the file"
    cause = next((one for one in found.causes if not one.is_rounding), None)
    if cause is None:
        return f"glass check {shlex.quote(result.baseline)} --candidate ENGINE, which names the first wrong op"
    if cause.setting == "temperature":
        return f"{again} --temperature {cause.value}, or the same temperature on both sides"
    return f"make both sides alike ({cause.text}), then {again}"


def next_of_changes(result: Invariance, command: Sequence[str]) -> str:
    """Return one thing to do where a model beside itself is not the same."""
    worst = next((one for one in result.changes if one.verdict == result.verdict), None)
    if worst is None or result.too_little:
        return f"{_with_document(command)}, and read .changes for what was not decided and why"
    source = None if worst.first is None else worst.first.source
    what = f"change {source}" if source else f"take {worst.switch}" if worst.switch else f"mend {worst.cause}"
    return f"{what}, then glass {shlex.join(command)}"


def _document(command: Sequence[str]) -> str | None:
    """Return the file that the command wrote its document to."""
    own = command[: _num_own(command)]
    words = [word.partition("=")[2] for word in own if word.startswith("--json=")]
    words += [after for word, after in itertools.pairwise(own) if word == "--json" and after.endswith(".json")]
    return next(iter(words), None)


def _with_document(command: Sequence[str]) -> str:
    if _document(command) is not None:
        return f"glass {shlex.join(command)}"
    end = _num_own(command)
    return f"glass {shlex.join([*command[:end], '--json', 'result.json', *command[end:]])}"


def _num_own(command: Sequence[str]) -> int:
    """Return the number of words before those of a script."""
    return command.index("--") if "--" in command else len(command)
