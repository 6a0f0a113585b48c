"""Sentences of a comparison that the terminal and other texts share."""

from __future__ import annotations

import dataclasses

import pytest

from glassengine.report.words import headline, hint_details, ratio, results_shown, untried
from glassengine.results import Comparison, Hint, ResultComparison
from glassengine.results.sentences import mistake


def test_a_hint_says_whether_it_is_proven_and_what_it_leaves() -> None:
    proven = Hint("scale", "twice", 1.0, proven=True, unexplained=1e-6, line="x * 2")
    assert [what for what, _ in hint_details(proven)] == ["mistake", "line", "proven"]
    guess = Hint("scale", "twice", 0.5, unexplained=0.12)
    assert list(hint_details(guess)) == [("hint", "may be: twice"), ("unexplained", "0.12 of the error")]


def test_untried_mistakes_are_named_where_nothing_is_proven(wrong: Comparison) -> None:
    first = wrong.first_divergence
    assert first is not None and first.hints[0].proven
    assert untried(dataclasses.replace(first, num_untried=3)) is None
    assert "3 families" in str(untried(dataclasses.replace(first, num_untried=3, hints=())))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "eps of layer_norm: 1e-05 in the baseline, 0.001 in the candidate",
            "eps of layer_norm in m.2 is 0.001, should be 1e-05",
        ),
        (
            "factor of mul: 2 in the baseline, 4 in the candidate (2 * 2)",
            "factor of mul in m.2 is 4 (2 * 2), should be 2",
        ),
        (
            "pad of pad: [2, 0] in the baseline, [0, 2] in the candidate; the reference has x",
            "pad of pad in m.2 is [0, 2], should be [2, 0]",
        ),
        ("gelu (tanh) in the baseline, relu in the candidate", "relu in place of gelu (tanh) in m.2"),
        ("0 is added in the baseline, 1 in the candidate", "0 is added in the baseline, 1 in the candidate, in m.2"),
        (
            "the decay is taken in the baseline, not in the candidate",
            "the decay is taken in the baseline, not in the candidate, in m.2",
        ),
        ("a of x: 1 in the baseline, 2 in the candidate; b of x: 3 in the baseline, 4 in the candidate", None),
        ("bias of linear is missing", "bias of linear is missing, in m.2"),
    ],
)
def test_f78_a_proven_mistake_is_the_first_line(wrong: Comparison, text: str, sentence: str | None) -> None:
    first = wrong.first_divergence
    assert first is not None
    hint = Hint("other", text, 1.0, proven=True)
    place = {"source": "a.py:1: x", "candidate_source": "port.py:41: y"}
    found = dataclasses.replace(first, site="m.2/op.0", hints=(hint,), **place)
    expected = f"{sentence or f'{text}, in m.2'} (proven): port.py:41"
    assert mistake(found) == expected == headline(dataclasses.replace(wrong, first_divergence=found)).why
    shared = dataclasses.replace(found, candidate_source=found.source, site="./op.0")
    assert str(mistake(shared)).endswith(" (proven)") and " in m.2" not in str(mistake(shared))
    assert mistake(dataclasses.replace(found, hints=(dataclasses.replace(hint, proven=False),))) is None


def test_a_ratio_has_three_digits_and_no_exponent_where_it_needs_none() -> None:
    assert [ratio(value) for value in (0.208, 8062.0, 99949.0, 1e5, 9.02e36)] == [
        "0.208", "8060", "99900", "1.00e+5", "9.02e+36",
    ]  # fmt: skip


def test_the_results_of_the_worst_comparison_are_shown_and_else_those_of_the_last(wrong: Comparison) -> None:
    bad = dataclasses.replace(wrong.results[0], verdict="wrong")
    good = dataclasses.replace(bad, verdict="rounding")
    last = dataclasses.replace(good, level="candidate, untouched")
    first = dataclasses.replace(good, name="another")

    def shown(*results: ResultComparison) -> tuple[ResultComparison, ...]:
        return tuple(results_shown(dataclasses.replace(wrong, results=results)))

    assert shown() == ()
    assert shown(good, last) == (last,)
    assert shown(first, bad, last) == (bad, first)
    assert shown(bad, dataclasses.replace(bad, level=last.level)) == (dataclasses.replace(bad, level=last.level),)
