"""Compares two sides before the first operation: tokens, chat templates, generation settings, processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from glassengine.prompt.huggingface import same_files
from glassengine.prompt.loading import compare_loading
from glassengine.prompt.processors import compare_processors
from glassengine.prompt.settings import compare_settings
from glassengine.prompt.side import PromptSide
from glassengine.prompt.templates import compare_templates
from glassengine.prompt.tokens import compare_tokens
from glassengine.prompt.worker import RemoteSide, answer, kind_of, worker_in
from glassengine.results.without_tensors import PromptComparison, PromptFinding, PromptPart
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
    ("loading", "no weights", lambda side: side.opened.has_weights, compare_loading),
)
"""Part, the words for a side without it, the test whether a side has it, the comparison."""


def check_prompt(baseline: str, candidate: str, *, python: str | Path | None = None) -> PromptComparison:
    """Compare tokenizer, chat template and generation settings of two sides; no model is run.

    Args:
        baseline: A directory of transformers, `FILE.gguf`, `genai:DIR`, a sentencepiece `FILE.model`, or
            `file.py:factory` of a tokenizer; also `openvino:DIR` and `vllm:DIR`.
        candidate: The same.
        python: Interpreter of the candidate, such as one with vLLM or another transformers; None for this one.

    Raises:
        UsageError: A side is not there, or has no tokenizer.
        BackendError: The process of a side has ended.
    """
    with closing(Processes(answer, 1)) as workers:
        return compare_in(workers, baseline, candidate, python=python)


def compare_in(
    workers: Processes,
    baseline: str,
    candidate: str,
    texts: Sequence[str] = (),
    *,
    python: str | Path | None = None,
) -> PromptComparison:
    """Compare two sides that a worker opens.

    Raises:
        UsageError: As for `check_prompt`.
        BackendError: The process of a side has ended.
    """
    kinds = [kind_of(spec)[0] for spec in (baseline, candidate)]  # refuses what is missing before a process starts
    specs = {"candidate": candidate, "baseline": baseline}
    # What lacks a tokenizer ends this before transformers is imported; a port may be known by the baseline's pieces.
    order = sorted(specs, key=lambda name: (kinds[1] == "port") == (name == "candidate"))
    with ExitStack() as started:

        def worker(name: str, kind: str) -> Processes:
            is_elsewhere = kind == "vllm" or (python is not None and name == "candidate")
            return started.enter_context(closing(worker_in(python))) if is_elsewhere else workers

        kind = dict(zip(("baseline", "candidate"), kinds, strict=True))
        sides = {name: RemoteSide(name, specs[name], worker(name, kind[name])) for name in order}
        return compare_sides(sides["baseline"], sides["candidate"], (baseline, candidate), texts)


def compare_files(baseline: str, candidate: str) -> PromptComparison | None:
    """Return the comparison of two directories with the same files and settings; None where something may differ."""
    (kind, ours), (other, theirs) = kind_of(baseline), kind_of(candidate)
    number = same_files(ours, theirs) if (kind, other) == ("directory", "directory") else 0
    if not number:
        return None
    return PromptComparison(baseline, candidate, True, [], {"files": number}, {}, ("transformers", "transformers"))


def compare_sides(
    baseline: PromptSide, candidate: PromptSide, specs: tuple[str, str], texts: Sequence[str] = ()
) -> PromptComparison:
    """Compare two sides that are open; `texts` are tried beside the probes."""
    found: list[PromptFinding] = []
    compared: dict[str, int] = {}
    skipped: dict[str, str] = {}
    for part, words, has, compare in _PARTS:
        without = [
            name for name, side in zip(("baseline", "candidate"), (baseline, candidate), strict=True) if not has(side)
        ]
        if len(without) == 2 and part in _RARE:
            continue
        if without and part != "loading":  # each side by itself
            skipped[part] = f"{words} in {' and '.join(without)}"
            if part == "template" and without == ["candidate"] and candidate.opened.has_templates:
                detail = "the baseline has a chat template, the candidate has none"
                found.append(PromptFinding("template", words, "wrong", detail))
            continue
        given = (texts,) if part == "tokens" else ()
        findings, number = compare(baseline, candidate, *given)
        found += findings
        if number:
            compared[part] = number
        else:
            skipped[part] = f"{words} in baseline and candidate"
    found += [PromptFinding("tokens", "warning of the engine", "note", line) for line in candidate.opened.warnings]
    found = [_limited(candidate, one) for one in found]
    found.sort(key=lambda one: (_LEVELS.index(one.level), one.part != "tokens"))
    is_text = any(side.opened.vocabulary is not None for side in (baseline, candidate))
    ok = bool(compared.get("tokens") if is_text else compared) and not any(one.level == "wrong" for one in found)
    engines = (baseline.opened.engine, candidate.opened.engine)
    return PromptComparison(*specs, ok, found, compared, skipped, engines)


def _limited(candidate: PromptSide, one: PromptFinding) -> PromptFinding:
    """Return a finding with the level "limit" where the engine cannot do otherwise."""
    reason = next((words for key, words in candidate.opened.limits.items() if one.cause.startswith(key)), None)
    if reason is None or one.level != "wrong":
        return one
    return replace(one, level="limit", detail=f"{one.detail}; {reason}")
