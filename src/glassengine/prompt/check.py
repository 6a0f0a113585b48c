"""Compares two sides before the first operation: tokens, chat templates, generation settings, processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from glassengine.prompt.processors import compare_processors
from glassengine.prompt.settings import compare_settings
from glassengine.prompt.side import PromptSide
from glassengine.prompt.templates import compare_templates
from glassengine.prompt.tokens import compare_tokens
from glassengine.prompt.worker import Remote, answer, kind_of
from glassengine.results.prompt import PromptComparison, PromptFinding, PromptPart
from glassengine.workers.processes import Processes

_RARE = ("processor", "loading")
"""Parts that most sides do not have."""
_LEVELS = ("wrong", "limit", "note")
_PARTS: tuple[
    tuple[PromptPart, str, Callable[[PromptSide], object], Callable[..., tuple[list[PromptFinding], int]]], ...
] = (
    ("tokens", "no tokenizer", lambda side: side.opened.vocabulary, compare_tokens),
    ("template", "no chat template", lambda side: side.opened.template, compare_templates),
    ("settings", "no generation settings", lambda side: side.opened.settings is not None, compare_settings),
    ("processor", "no processor", lambda side: side.opened.has_processor, compare_processors),
)
"""Part, the words for a side without it, the test whether a side has it, the comparison."""


def check_prompt(baseline: str, candidate: str) -> PromptComparison:
    """Compare tokenizer, chat template and generation settings of two sides; no model is run.

    Args:
        baseline: A directory of transformers, `FILE.gguf`, `genai:DIR`, or a sentencepiece `FILE.model`.
        candidate: The same.

    Raises:
        UsageError: A side is not there, or has no tokenizer.
        BackendError: The process of a side has ended.
    """
    for spec in (baseline, candidate):
        kind_of(spec)  # refuses what is missing before a process starts
    workers = Processes(answer, 1)
    try:
        ours, theirs = Remote("baseline", baseline, workers), Remote("candidate", candidate, workers)
        return compare_sides(ours, theirs, (baseline, candidate))
    finally:
        workers.close()


def compare_sides(baseline: PromptSide, candidate: PromptSide, specs: tuple[str, str]) -> PromptComparison:
    """Compare two sides that are open."""
    found: list[PromptFinding] = []
    compared: dict[str, int] = {}
    skipped: dict[str, str] = {}
    for part, words, has, compare in _PARTS:
        without = [
            name for name, side in zip(("baseline", "candidate"), (baseline, candidate), strict=True) if not has(side)
        ]
        if len(without) == 2 and part in _RARE:
            continue
        if without:
            skipped[part] = f"{words} in {' and '.join(without)}"
            if part == "template" and without == ["candidate"] and candidate.opened.has_templates:
                detail = "the baseline has a chat template, the candidate has none"
                found.append(PromptFinding("template", words, "wrong", detail))
            continue
        findings, number = compare(baseline, candidate)
        found += findings
        if number:
            compared[part] = number
        else:
            skipped[part] = f"{words} in baseline and candidate"
    found += [PromptFinding("tokens", "warning of the engine", "note", line) for line in candidate.opened.warnings]
    found = [_limited(candidate, one) for one in found]
    found.sort(key=lambda one: (_LEVELS.index(one.level), one.part != "tokens"))
    ok = bool(compared.get("tokens")) and not any(one.level == "wrong" for one in found)
    engines = (baseline.opened.engine, candidate.opened.engine)
    return PromptComparison(*specs, ok, found, compared, skipped, engines)


def _limited(candidate: PromptSide, one: PromptFinding) -> PromptFinding:
    """Return a finding with the level "limit" where the engine cannot do otherwise."""
    reason = candidate.opened.limits.get(one.cause)
    if reason is None or one.level != "wrong":
        return one
    return replace(one, level="limit", detail=f"{one.detail}; {reason}")
