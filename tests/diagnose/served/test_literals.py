"""A window of the attention that no sequence was long enough for is listed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glassengine.diagnose.served.literals import not_reached


@pytest.mark.parametrize(
    ("settings", "longest", "said"),
    [
        ({}, 9, ""),
        ({"sliding_window": 4096}, 9, "the window of 4,096 tokens, which no sequence here reaches (9 at most)"),
        ({"sliding_window": 8}, 9, ""),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, 9, ""),
    ],
)
def test_what_no_sequence_reaches_is_said(settings: dict[str, Any], longest: int, said: str) -> None:
    found = not_reached(SimpleNamespace(**settings), longest)
    assert len(found) == bool(said) and all(said in one for one in found)
