"""tests/compatibility.json names tests that exist, and a run in which one of them did not pass is not ok."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

Promises = list[tuple[str, str, bool]]

# The rows that the page must show.
SHOWN = [*(f"A{i}" for i in range(1, 9)), *(f"B{i}" for i in range(1, 10)), "B11"]
SHOWN += ["C1", *(f"C{i}" for i in range(3, 15)), *(f"D{i}" for i in range(1, 8))]


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def marks_of(function: ast.FunctionDef) -> str:
    return " ".join(ast.unparse(decorator) for decorator in function.decorator_list)


def test_named_tests_exist(root: Path, promises: Promises) -> None:
    missing = []
    variants = {f"tests/{line}" for line in (root / "tests/slow_variants.txt").read_text(encoding="utf-8").splitlines()}
    for row, name, slow in promises:
        path, _, function = name.partition("::")
        found = functions_of(root / path) if (root / path).is_file() else {}
        node = found.get(function.split("[", 1)[0])
        if node is None:
            missing.append(f"{row}: {name}")
        else:
            is_slow = "@pytest.mark.slow" in f"@{marks_of(node)}".replace(" ", " @") or name in variants
            assert slow == is_slow, f"{name}: the table and its mark differ about whether it is slow"
            assert "[" not in name or "parametrize" in marks_of(node), f"{name} has no parameters"
    assert missing == []


def test_every_row_is_shown(root: Path, promises: Promises) -> None:
    page = (root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-D]\d+(?:-[A-D]\d+)?) \|(.*)\|$", page, re.MULTILINE)
    numbers: dict[str, list[int]] = {}
    for row, _ in rows:
        first, _, last = row.partition("-")
        numbers.setdefault(row[0], []).extend(range(int(first[1:]), int((last or first)[1:]) + 1))
    assert numbers == {letter: list(range(1, n + 1)) for letter, n in {"A": 9, "B": 11, "C": 14, "D": 7}.items()}
    shown = {row for row, _, _ in promises}
    assert {row for row, _ in rows} == shown
    assert [row for row in SHOWN if row not in shown] == []
    assert all(text.count(" | ") == 1 for _, text in rows), "a row has the three cells of the head"
    assert "::" not in page, "names of tests are in tests/compatibility.json"


def test_the_guides_of_the_page_exist(root: Path) -> None:
    page = (root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and all((root / "docs" / link).is_file() for link in links)


# -- the check of a whole run ------------------------------------------------------------------------------------------

TESTS = """
import pytest

def test_good(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_many(x): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.skip)])
def test_partly(x): pass
@pytest.mark.xfail
def test_expected(): assert False
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, root: Path) -> pytest.Pytester:
    """Return a project with the conftest.py of this one, and a table that names what `write_table` is given."""
    for name, text in {
        "tests/conftest.py": (root / "tests" / "conftest.py").read_text(encoding="utf-8"),
        "tests/test_a.py": TESTS,
        "pytest.ini": "[pytest]\ntestpaths = tests\nmarkers = slow\n",
    }.items():
        path = pytester.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return pytester


def write_table(suite: pytest.Pytester, *tests: str) -> None:
    table = {"A1": [f"tests/test_a.py::{name}" for name in tests]}
    (suite.path / "tests" / "compatibility.json").write_text(json.dumps(table))


GOOD = ("test_good", "test_many", "test_many[2]")


@pytest.mark.parametrize(
    ("tests", "arguments"),
    [
        ((*GOOD, "test_slow (slow)"), ()),
        ((*GOOD, "test_slow (slow)"), ("-m", "not slow")),
        # Whoever asks for a part of the suite does not run the rest.
        (("test_missing",), ("tests/test_a.py",)),
        (("test_missing",), ("-k", "good")),
    ],
)
def test_a_run_that_shows_all_is_ok(suite: pytest.Pytester, tests: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    write_table(suite, *tests)
    result = suite.runpytest("-p", "no:cacheprovider", *arguments)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*tests/compatibility.json*")


@pytest.mark.parametrize(
    ("test", "arguments", "reason"),
    [
        ("test_missing", (), "was not run"),
        ("test_many[3]", (), "was not run"),
        ("test_skipped", (), "skipped"),
        ("test_partly", (), "passed, skipped"),
        ("test_expected", (), "skipped"),
        ("test_slow", ("-m", "not slow"), "was not run"),
        ("test_skipped", ("-n", "1"), "skipped"),
    ],
)
def test_a_run_that_does_not_is_not(suite: pytest.Pytester, test: str, arguments: tuple[str, ...], reason: str) -> None:
    write_table(suite, "test_good", test)
    result = suite.runpytest("-p", "no:cacheprovider", *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"A1: tests/test_a.py::{test.replace('[', '[[]')}: {reason}"])
    result.stdout.no_fnmatch_line("A1: tests/test_a.py::test_good*")
