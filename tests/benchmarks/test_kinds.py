"""The table of what hints say: what counts as right, as wrong, as said for certain; and the corpus below it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks.kinds import Row, planted, said, table, trained
from glassengine.results.hints import KINDS as VOCABULARY
from tests.corpus import training
from tests.corpus.kinds import KINDS, OF_PORTS
from tests.corpus.mistakes.catalog import MISTAKES
from tests.corpus.mistakes.source import SOURCE_MISTAKES

TESTS = Path(__file__).parent.parent
LEAST_RIGHT, MOST_CERTAIN, MOST_WRONG = 0.85, 0.01, 0.05


def row(*hints: tuple[str, bool], expected: tuple[str, ...] = ("scale",)) -> Row:
    return Row("llama/float32", "one", "graph", expected, tuple((*hint, 1.0, "words") for hint in hints), 0.1)


@pytest.mark.parametrize(
    ("found", "is_first", "is_among", "is_proven", "is_wrong"),
    [
        (row(("scale", True)), True, True, True, False),
        (row(("mask", False), ("scale", False)), False, True, False, True),
        (row(("other", False)), False, False, False, False),  # says nothing of the kind
        (row(("other", True)), False, False, True, True),
        (row(), False, False, False, False),
        (row(("other", True), expected=("bias missing", "other")), True, True, True, False),
    ],
)
def test_what_counts(found: Row, is_first: bool, is_among: bool, is_proven: bool, is_wrong: bool) -> None:
    assert (found.is_first, found.is_among, found.is_proven, found.is_wrong) == (
        is_first, is_among, is_proven, is_wrong,
    )  # fmt: skip


def test_the_table_has_the_shares() -> None:
    rows = [row(("scale", True)), row(("mask", True)), row(), row(("scale", False))]
    last = table(rows).splitlines()[-1].split()
    assert last[:7] == ["all", "4", "50.0%", "50.0%", "50.0%", "25.0%", "25.0%"]
    assert [line.split()[0] for line in said(rows).splitlines()] == ["CERTAIN", "UNSAID", "right", "right"]


def test_every_mistake_of_the_corpus_has_its_kinds() -> None:
    names = {mistake.name for mistake in (*MISTAKES, *SOURCE_MISTAKES) if mistake.group != "random"}
    assert KINDS.keys() == names
    assert {kind for kinds in (*KINDS.values(), *OF_PORTS.values()) for kind in kinds} == set(VOCABULARY)
    assert len(OF_PORTS) > 50
    assert {kind for mistake in training.MISTAKES.values() for kind in mistake.kinds} < set(VOCABULARY)


def test_mistakes_in_packages_have_kinds_of_the_vocabulary() -> None:
    known = (TESTS / "foreign" / "kinds.py").read_text(), (TESTS / "foreign" / "unseen.py").read_text()
    of_kinds = re.findall(r'": "([a-z, ]+)",$', known[0], re.M)
    of_unseen = re.findall(r'\], "([a-z, ]+)"\)', known[1])
    assert len(of_kinds) > 150 and len(of_unseen) > 45
    assert {kind for kinds in (*of_kinds, *of_unseen) for kind in kinds.split(", ")} <= set(VOCABULARY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "turn"), [("llama", "float32", 0), ("bert", "bfloat16", 1), ("t5", "float32", 2)]
)
def test_hints_of_a_share_of_the_corpus_are_right(family: str, dtype: str, turn: int) -> None:
    rows = planted(family, dtype, argparse.Namespace(share=4, mistakes=None), turn)
    assert len(rows) > 10
    number = len(rows)
    assert sum(one.is_first for one in rows) >= LEAST_RIGHT * number, said(rows)
    assert sum(one.is_wrong and one.is_proven for one in rows) <= max(1, MOST_CERTAIN * number), said(rows)
    assert sum(one.is_wrong for one in rows) <= max(1, MOST_WRONG * number), said(rows)


@pytest.mark.slow
def test_hints_of_training_runs_are_right() -> None:
    rows = trained(argparse.Namespace(share=1, mistakes=None))
    assert len(rows) == len(training.MISTAKES)
    assert sum(one.is_first for one in rows) >= LEAST_RIGHT * len(rows), said(rows)
    assert sum(one.is_wrong for one in rows) <= MOST_WRONG * len(rows), said(rows)
