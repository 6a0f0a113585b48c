"""Sentences of a comparison that the terminal and other texts share."""

from __future__ import annotations

import dataclasses

from glassengine.report.words import hint_details, untried
from glassengine.results import Comparison, Hint


def test_a_hint_says_whether_it_is_proven_and_what_it_leaves() -> None:
    proven = Hint("scale", "twice", 1.0, proven=True, unexplained=1e-6, line="x * 2")
    assert [what for what, _ in hint_details(proven)] == ["mistake", "line", "proven"]
    guess = Hint("scale", "twice", 0.5, unexplained=0.12)
    assert list(hint_details(guess)) == [("hint", "twice"), ("unexplained", "0.12 of the error")]


def test_what_was_not_tried_is_said_where_nothing_is_proven(wrong: Comparison) -> None:
    first = wrong.first_divergence
    assert first is not None and first.hints[0].proven
    assert untried(dataclasses.replace(first, num_untried=3)) is None
    assert "3 families" in str(untried(dataclasses.replace(first, num_untried=3, hints=())))
