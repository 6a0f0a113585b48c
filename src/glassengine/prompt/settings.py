"""Compares the generation settings of two sides: sampling, penalties, lengths and ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from glassengine.prompt.side import PromptSetting, PromptSide
from glassengine.results.without_tensors import PromptFinding

# Name in transformers -> its value where no file states one, and its effect.
NAMES: dict[str, tuple[Any, str]] = {
    "do_sample": (None, "draws tokens instead of taking the likeliest"),
    "temperature": (1.0, "divides the logits"),
    "top_k": (50, "keeps the likeliest tokens alone"),
    "top_p": (1.0, "keeps the tokens that add up to a probability"),
    "min_p": (0.0, "drops tokens far less likely than the likeliest"),
    "repetition_penalty": (1.0, "changes the logits of tokens that were there before, also without sampling"),
    "no_repeat_ngram_size": (0, "forbids sequences that were there before"),
    "length_penalty": (1.0, "changes the scores of beams"),
    "num_beams": (1, "searches with beams"),
    "max_new_tokens": (None, "ends a generation"),
    "max_length": (None, "ends a generation"),
    "min_length": (0, "keeps a generation from ending"),
    "bos_token_id": (None, "begins a prompt"),
    "eos_token_id": (None, "ends a generation"),
    "pad_token_id": (None, "fills the rows of a batch"),
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OFF = (0, -1)
"""Values of top_k that keep all tokens."""


def stated_in(document: Mapping[str, Any], where: str, names: Iterable[str] = NAMES) -> dict[str, PromptSetting]:
    """Return the settings that a document states; `where` stands before each name."""
    return {name: PromptSetting(document[name], f"{where}{name}") for name in names if document.get(name) is not None}


def compare_settings(baseline: PromptSide, candidate: PromptSide) -> tuple[list[PromptFinding], int]:
    """Return the settings that differ, and the number that were compared.

    A value that both state is wrong if it differs. A value that one side alone states is wrong if it differs from the
    default. The default of an engine, which every request overrides, is a note. An engine may know more tokens that end
    a generation than the baseline states, but not fewer.
    """
    ours, theirs = baseline.opened.settings, candidate.opened.settings
    assert ours is not None and theirs is not None
    found, number = [], 0
    for name, (default, effect) in NAMES.items():
        a, b = ours.get(name), theirs.get(name)
        if a is None and b is None:
            continue
        if name in TOKENS and (a is None or b is None):
            continue  # the special tokens of the tokenizers are compared as such
        number += 1
        x, y = default if a is None else a.value, default if b is None else b.value
        if _same(name, x, y):
            continue
        stated = (a is None or a.is_stated) and (b is None or b.is_stated)
        if name == "eos_token_id" and not stated:
            stated = not set(_list(x)) <= set(_list(y))
        is_length = name in ("max_length", "max_new_tokens", "do_sample") and (a is None or b is None)
        detail = f"{name} is {_words(a, default)} in the baseline, {_words(b, default)} in the candidate: it {effect}"
        found.append(PromptFinding("settings", name, "wrong" if stated and not is_length else "note", detail))
    return found, number


def _same(name: str, x: Any, y: Any) -> bool:
    if name == "eos_token_id":
        return set(_list(x)) == set(_list(y))
    if name in TOKENS:
        return _list(x) == _list(y)
    if name == "top_k" and x in _OFF and y in _OFF:
        return True
    if isinstance(x, (int, float)) and isinstance(y, (int, float)):
        return abs(float(x) - float(y)) <= 1e-6 * max(abs(float(x)), abs(float(y)))
    return bool(x == y)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _words(setting: PromptSetting | None, default: Any) -> str:
    return f"not stated ({default})" if setting is None else f"{setting.value} ({setting.where})"
