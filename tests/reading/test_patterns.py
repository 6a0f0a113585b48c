"""Patterns of adapters end soon, whatever a file says, and mean what they mean in peft."""

from __future__ import annotations

import re
import time

import pytest

from glassengine.errors import CorruptError
from glassengine.reading.patterns import matches

PATH = "model.language_model.layers.11.mlp.experts.121.down_proj"

ENDLESS = [
    ".*" * 14 + "x", "(?x:([a-z0-9_.]+) +x)", "([a-z.]+)*x", "(a|a)+$x", "((a?)+)+x", "(.{1,50}){1,50}x",
    "(?:.|.)" * 40 + "x", "a?" * 60 + "x", "(?=(.+)+x)", "(.*)" * 9 + r"\9\8\7", "(?i:(?s:(.+)(?-i:.*))*)x",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ENDLESS)
def test_s4_a_pattern_that_could_take_for_ever_is_refused(pattern: str) -> None:
    began = time.monotonic()
    with pytest.raises(CorruptError, match=r"repe|alternatives"):
        matches(pattern, PATH)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("pattern", ["(", "[z", "a{2,1}", "(?P<n>a)(?P<n>b)", "(" * 5000])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(CorruptError, match="not a regular expression"):
        matches(pattern, PATH)


@pytest.mark.parametrize(
    "pattern",
    [
        "down_proj", "q_proj", r"layers\.\d+\.mlp.*", r".*\.layers\.\d+\..*down_proj", "(q|k|v|o)_proj|down_proj",
        r"layers\.(10|11|12)\.mlp\.experts\.(120|121)\.(up|down|gate)_proj", r"model\..*down_proj", r"[a-z]+_proj",
        r"layers\.(?:[0-9]|1[0-9]|2[0-7])\.(self_attn|mlp).*", r"experts\.\d{3}\.down_proj", "own_proj", "",
    ],
)  # fmt: skip
def test_what_people_write_means_what_it_means_in_peft(pattern: str) -> None:
    assert matches(pattern, PATH) == bool(re.match(rf"(.*\.)?({pattern})$", PATH))
