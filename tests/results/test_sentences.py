"""What differs between two environments."""

from __future__ import annotations

from types import SimpleNamespace

from glassengine.results.sentences import differences, lines_of


def test_versions_and_variables_that_differ_are_listed() -> None:
    ours = {"versions": {"torch": "2.13", "numpy": "2"}, "variables": {"OMP_NUM_THREADS": "1"}, "command_line": ["a"]}
    theirs = {"versions": {"torch": "2.11", "numpy": "2"}, "variables": {"MKL_CBWR": "AVX2"}, "command_line": ["b"]}
    assert differences({"baseline": ours, "candidate": theirs}) == [
        "torch 2.13 and 2.11",
        "OMP_NUM_THREADS 1 and unset",
        "MKL_CBWR unset and AVX2",
    ]


def test_facts_unknown_to_one_side_are_no_difference() -> None:
    assert differences({"baseline": {"versions": {"onnx": "1"}}, "candidate": {"versions": {}}}) == []
    assert differences({"baseline": {"cpu": "EPYC"}, "candidate": {}}) == []


def test_long_lines_are_quoted_from_shortly_before_they_differ() -> None:
    same = "states = associative_scan(binary_operator, (transitions, elements), axis=axis"
    found = SimpleNamespace(hints=(), source=f"a.py:3: {same}, reverse=True)", candidate_source=f"b.py:9: {same})")
    end = "(transitions, elements), axis=axis"
    assert lines_of(found).startswith(": the baseline has `...") and lines_of(found).endswith(f"{end[-30:]})`")
    assert f"{end[-30:]}, reverse=True)`, the candidate" in lines_of(found)
    assert lines_of(SimpleNamespace(hints=(), source="a.py:3: y = x", candidate_source="b.py:4: y = x")) == ""
