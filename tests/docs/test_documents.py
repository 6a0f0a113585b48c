"""The documents for maintainers are true: their examples run, and what they list is what there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import glassengine
from glassengine.cli.main import load_command
from glassengine.schemas import schema
from tests.docs.json_keys import CLASSES, FUNCTIONS_ONLY, written

SOURCE = Path(glassengine.__file__).parent
Run = Callable[[Path], list[str]]


@pytest.mark.parametrize("page", ["numerics.md", "stores.md", pytest.param("tutorial.md", marks=pytest.mark.slow)])
def test_every_block_runs_and_prints_what_is_shown(page: str, root: Path, run_guide: Run) -> None:
    problems = run_guide(root / "docs" / page)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", ["symptoms.md", "glossary.md"])
def test_commands_of_a_page_exist(page: str, root: Path) -> None:
    for line in re.findall(r"`glass ([a-z][^`]*)`", (root / "docs" / page).read_text(encoding="utf-8")):
        command, *words = line.partition(" -- ")[0].split()
        known = {flag for option in load_command(command).params for flag in option.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


@pytest.fixture
def json_pages(root: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((root / "docs/json").glob("*.md"))}


def test_the_keys_of_the_json_documents_are_those_of_the_classes(
    json_pages: dict[str, str], root: Path, request: pytest.FixtureRequest
) -> None:
    pages = written(json_pages)
    if request.config.getoption("--update-guides"):
        for name, page in pages.items():
            (root / "docs/json" / name).write_text(page, encoding="utf-8")
        json_pages = pages
    page = "".join(json_pages.values())
    # A sentence that was worded anew since is no mistake; a key or type that is another is one.
    known, now = (
        re.findall(r"^\| `(\w+)` \| (.*) \| .* \|$", text, re.MULTILINE) for text in (page, "".join(pages.values()))
    )
    assert known == now, "pytest tests/docs/test_documents.py --update-guides"
    keys = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE)
    assert len(keys) > 200
    assert set(re.findall(r"^### ([\w.]+)$", page, re.MULTILINE)) == CLASSES.keys() - FUNCTIONS_ONLY
    assert [key for key, meaning in keys if not meaning] == [], "not said in the docstring"


@pytest.mark.parametrize("command", ["check", "compare"])
def test_the_keys_are_those_of_the_schema(command: str, json_pages: dict[str, str]) -> None:
    sections = re.split(r"^### ([\w.]+)$", "".join(json_pages.values()), flags=re.MULTILINE)
    listed = {
        name: set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        for name, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    described = {name: set(one.get("properties", ())) for name, one in schema(command)["$defs"].items()}
    both = listed.keys() & described.keys()
    assert {"Comparison", "Divergence", "Pair"} <= both
    # Which every document may have.
    apart = {name: (listed[name] ^ described[name]) - {"metrics"} for name in both}
    assert {name: keys for name, keys in apart.items() if keys} == {}


def test_pages_have_at_most_250_lines(root: Path) -> None:
    """A page is read at one sitting; a longer one is two pages."""
    paths = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    lengths = {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {page: length for page, length in lengths.items() if length > 250} == {}


def messages() -> list[str]:
    """Every text in the source, with `\0` where a value is put in."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
    return found


def test_every_message_of_the_page_of_errors_is_in_the_source(root: Path) -> None:
    page = (root / "docs/errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)` \| .+ \| .*\|$", page, re.MULTILINE)
    assert len(listed) > 40
    known = messages()
    for message in listed:
        # What differs may be a value, or a part of the text.
        pattern = re.compile(r".*".join(map(re.escape, message.split("..."))), re.DOTALL)
        assert any(pattern.search(text) for text in known), message


def test_a_document_that_the_source_names_is_there(root: Path) -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\bdocs/[\w./-]+", text):
            assert (root / name.rstrip(".")).exists(), f"{path.name}: {name}"
        # What a plan says that nobody else has.
        assert not re.search(r"\bdesign[, ]+section|\bnumerics study|\bhouse\.md\b|\bthe study\b", text), path.name
