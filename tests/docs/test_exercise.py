"""The exercises for contributors work as they are written, in a copy of the repository, as a newcomer follows them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.conftest import blocks_of, run_page

# Folders of the source that a contribution of one kind may touch.
MOST_ROOMS = 2
PAGES = ["exercise.md", "exercise-reader.md"]


@pytest.fixture
def clone(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the exercise needs, with an environment that has the dependencies and not this repository."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    # With its bytecode, or each of the commands would compile 500 modules where the surroundings forbid to write it.
    shutil.copytree(root / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    (tmp_path / "tests").mkdir()
    shutil.copy(root / "tests/conftest.py", tmp_path / "tests")
    shutil.copytree(root / "tests/ops", tmp_path / "tests/ops", ignore=unwanted)
    for name in ("backends", "recording/formats"):
        (tmp_path / "tests" / name).mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True, timeout=600)
    (packages,) = (tmp_path / ".venv/lib").glob("*/site-packages")
    (packages / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_step_works_as_it_is_written(page: str, root: Path, clone: Path) -> None:
    problems = run_page(root / "docs" / page, clone)
    assert not problems, "\n".join(problems)


def test_a_contribution_needs_two_rooms_at_most(root: Path) -> None:
    pages = [(root / "docs" / page).read_text(encoding="utf-8") for page in PAGES]
    parts = [part for page in pages for part in page.split("\n## ")[1:] if not part.startswith("All of it")]
    assert [part.partition("\n")[0] for part in parts] == ["A back-end", "The bound of an op", "A reader"]
    for part in parts:
        edited = [word for block in blocks_of(part) for word in block.text.split() if word.startswith("src/")]
        files = [block.mark.removeprefix("file: ") for block in blocks_of(part) if block.mark.startswith("file: src/")]
        rooms = {str(Path(path).parent) for path in [*edited, *files]}
        assert 0 < len(rooms) <= MOST_ROOMS, rooms
