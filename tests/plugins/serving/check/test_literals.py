"""A window of the attention that no sequence was long enough for is listed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glassengine.plugins.serving.check.literals import not_reached, with_settings
from glassengine.results import Divergence, Hint
from glassengine.results.hints import Altered


@pytest.mark.parametrize(
    ("settings", "longest", "said"),
    [
        ({}, 9, ""),
        ({"sliding_window": 4096}, 9, "the window of 4,096 tokens, which no sequence here reaches (9 at most)"),
        ({"sliding_window": 8}, 9, ""),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, 9, ""),
    ],
)
def test_settings_that_no_sequence_reaches_are_named(settings: dict[str, Any], longest: int, said: str) -> None:
    found = not_reached(SimpleNamespace(**settings), longest)
    assert len(found) == bool(said) and all(said in one for one in found)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, 3])
def test_f67_hints_that_change_what_has_no_hash_are_kept(value: Any) -> None:
    hint = Hint("other", "another number", 1.0, proven=True, change=Altered(argument="dim", candidate=value))
    found = Divergence("record", 0, "a", "a", "b", None, "wrong", 2.0, None, None, None, (hint, hint))
    config = SimpleNamespace(hidden_size=8, num_attention_heads=2)
    (made,) = with_settings([found], {}, config, [])
    assert hint in made.hints
