"""The result of a prompt comparison: tokens, templates, settings, processors and loading of two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from glassengine.results.base import Result

PromptPart = Literal["tokens", "template", "settings", "processor", "loading"]
_SAME = {
    "tokens": "tokens",
    "template": "templates",
    "settings": "settings",
    "processor": "processors",
    "loading": "parameters",
}
PromptLevel = Literal["wrong", "limit", "note"]
LEVEL = "prompt"
"""Name of the level of a check."""


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
    """What `glass check-prompt` returns, and the level `prompt` of a check.

    Attributes:
        baseline: Spec of the baseline.
        candidate: Spec of the candidate.
        ok: Whether something was compared and nothing is wrong.
        findings: Wrong ones first, then by the number of probes that show them.
        compared: Part -> number of probes, conversations, samples or values that were compared; "files" -> number of
            files, where all of both sides are the same and nothing was tried.
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

    @property
    def wrong(self) -> list[PromptFinding]:
        """What makes it not ok."""
        return [one for one in self.findings if one.level == "wrong"]

    def in_words(self) -> str:
        """Return the answer in a line: the first cause, or what was the same."""
        if self.wrong:
            more = f", and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
            return f"{self.wrong[0].part}: {self.wrong[0].cause}{more}"
        if not self.ok:
            return "no tokens were compared"
        limits = ", ".join(dict.fromkeys(one.cause for one in self.findings if one.level == "limit"))
        if limits:
            return f"nothing differs but what the engine cannot do otherwise: {limits}"
        if "files" in self.compared:
            return "both sides have the same files of tokenizer, template and settings"
        parts = ", ".join(words for part, words in _SAME.items() if part in self.compared)
        return f"the same {parts}, as far as they were compared"
