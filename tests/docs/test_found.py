"""The page of found bugs and its scripts agree; the scripts name what they need and are short."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.found.run import packages

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted((ROOT / "docs/found").glob("*_*.py"))


def test_every_script_has_a_row_and_every_row_a_script() -> None:
    page = (ROOT / "docs/found.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[[^\n]*?\]\(found/(\w+\.py)\) \|", page, re.MULTILINE)
    assert sorted(linked) == [path.name for path in SCRIPTS]
    assert len(linked) >= 25
    assert page.startswith("# Found by Glass Engine\n\n" + str(len(linked)))
    assert len(page.splitlines()) <= 250


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_pins_what_it_needs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    assert "glassengine" not in text
    assert (ast.get_docstring(ast.parse(text)) or "").count("\n") >= 1, "the draft of a report"
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", package) for package in packages(path))


@pytest.mark.slow
def test_one_reproduces_with_what_is_installed_here() -> None:
    script = ROOT / "docs/found/ov_floor_divide.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "DIFFERENCE 2.5e-01 CONTROL 0.0e+00" in done.stdout, done.stderr
