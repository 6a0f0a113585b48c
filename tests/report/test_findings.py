"""Findings: one per mistake, never an error of what is ok, never none of what is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from glassengine.report.findings import RULES, SourceLine, findings, next_step
from glassengine.results import Comparison, Standing
from tests.report.conftest import GUILTY


def test_one_mistake_is_one_finding_with_both_lines(wrong: Comparison) -> None:
    assert len(wrong.origins) > 1, "it is seen on two levels"
    (found,) = findings(wrong)
    assert (found.rule, found.level, found.site) == ("wrong", "error", "./silu.0")
    assert found.candidate is not None and found.candidate.code == GUILTY
    assert found.candidate.file.endswith("models/port.py") and found.candidate.line == 12
    assert found.baseline is not None and "silu" in found.baseline.code
    assert (
        "silu in the baseline, gelu in the candidate" in found.text
        and "times what rounding alone explains" in found.text
    )


@pytest.mark.parametrize("standing", get_args(Standing))
def test_not_ok_has_an_error_and_ok_has_none(wrong: Comparison, standing: Standing) -> None:
    """Whatever the comparison found, with origins and without."""
    for origins, first in ((wrong.origins, wrong.first_divergence), ((), None)):
        for ok in (True, False):
            one = dataclasses.replace(
                wrong, ok=ok, standing=standing, origins=origins, first_divergence=first, not_ok_because="because"
            )
            levels = [finding.level for finding in findings(one)]
            assert ("error" in levels) is not ok
            assert {finding.rule for finding in findings(one)} <= RULES.keys()


def test_suspicious_is_a_warning_beside_what_is_wrong_and_an_error_where_it_decides(wrong: Comparison) -> None:
    first = wrong.first_divergence
    assert first is not None
    other = dataclasses.replace(first, site="./other.0", verdict="suspicious")
    both = dataclasses.replace(wrong, origins=(first, other))
    assert [(found.site, found.level) for found in findings(both)] == [("./silu.0", "error"), ("./other.0", "warning")]
    alone = dataclasses.replace(wrong, origins=(other,), first_divergence=other, standing="differs inside")
    assert [(found.rule, found.level) for found in findings(alone)] == [("suspicious", "error")]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a/b.py:12: x = y", SourceLine("a/b.py", 12, "x = y")),
        ("C:\\a b.py:3: x: int = 1", SourceLine("C:\\a b.py", 3, "x: int = 1")),
        ("model.onnx: node 4", None),
        ("", None),
        (None, None),
    ],
)
def test_a_source_is_taken_apart(text: str | None, line: SourceLine | None) -> None:
    assert SourceLine.of(text) == line


def test_lines_around_are_read_only_where_the_line_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("a = 1\nb = 2\nc = 3\nd = 4\n")
    assert SourceLine(str(file), 2, "b = 2").around(1) == [(1, "a = 1"), (2, "b = 2"), (3, "c = 3")]
    assert SourceLine(str(file), 2, "b = 3").around(1) == [(2, "b = 3")], "the file has changed"
    assert SourceLine(str(file), 99, "b = 2").around(1) == [(99, "b = 2")]
    secret = tmp_path / "secret"
    secret.write_text("a = 1\nb = 2\n")
    assert SourceLine(str(secret), 2, "b = 2").around(1) == [(2, "b = 2")], "not a source file"
    assert SourceLine(str(tmp_path / "missing.py"), 2, "b = 2").around(1) == [(2, "b = 2")]


def test_the_document_of_a_command_stands_before_the_words_of_a_script(wrong: Comparison) -> None:
    left = dataclasses.replace(wrong, ok=False, too_little=True)
    asked = next_step(left, ["watch", "--json", "mine.json", "a.py", "--", "b.py"])
    assert asked.startswith("glass watch --json mine.json a.py -- b.py, ")
    other = next_step(left, ["watch", "a.py", "--", "b.py", "--json", "its.json"])
    assert other.startswith("glass watch a.py --json result.json -- b.py --json its.json, ")
