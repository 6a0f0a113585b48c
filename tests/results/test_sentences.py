"""What differs between two environments."""

from __future__ import annotations

from glassengine.results.sentences import differences


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
