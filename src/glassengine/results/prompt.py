"""The result of a prompt comparison: tokens, templates, settings, processors and loading of two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from glassengine.results.base import Result

PromptPart = Literal["tokens", "template", "settings", "processor", "loading"]
PromptLevel = Literal["wrong", "limit", "note"]


@dataclass(frozen=True)
class PromptExample:
    """A text that the sides treat differently.

    Attributes:
        text: The text, or the conversation as JSON.
        baseline: Token ids of the baseline; empty for a template.
        candidate: Token ids of the candidate.
        baseline_shown: The pieces of these ids, or the rendered text around the first difference.
        candidate_shown: The same of the candidate.
    """

    text: str
    baseline: Sequence[int]
    candidate: Sequence[int]
    baseline_shown: Sequence[str]
    candidate_shown: Sequence[str]


@dataclass(frozen=True)
class PromptFinding:
    """One cause of differences.

    Attributes:
        part: What differs.
        cause: Class of the difference: "no BOS", "pre-tokenizer (digits)".
        level: "wrong"; "limit" if the engine cannot do otherwise, whatever file it reads; "note".
        detail: The cause in a sentence, with values.
        count: Probes that show it.
        of: Probes that were tried.
        example: The shortest of them; None where none is needed.
        deviates: The side that leaves its own tokenizer file; None if neither does, or it is unknown.
    """

    part: PromptPart
    cause: str
    level: PromptLevel
    detail: str
    count: int = 1
    of: int = 1
    example: PromptExample | None = None
    deviates: Literal["baseline", "candidate"] | None = None


@dataclass(frozen=True)
class PromptComparison(Result):
    """What `glass check-prompt` returns.

    Attributes:
        baseline: Spec of the baseline.
        candidate: Spec of the candidate.
        ok: Whether something was compared and nothing is wrong.
        findings: Wrong ones first, then by the number of probes that show them.
        compared: Part -> number of probes, conversations, samples or values that were compared.
        skipped: Part -> why it was not compared.
        engines: Names of the programs that tokenize: of the baseline, of the candidate.
    """

    baseline: str
    candidate: str
    ok: bool
    findings: Sequence[PromptFinding]
    compared: Mapping[str, int]
    skipped: Mapping[str, str]
    engines: tuple[str, str]
    schema_version: int = 1
