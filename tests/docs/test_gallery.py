"""The gallery: every command gives the answer that is shown, and its picture is of this answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.conftest import scrubbed
from tests.modules import module_at


@pytest.mark.slow
def test_every_command_gives_the_answer_that_is_shown(root: Path, run_guide: Callable[[Path], list[str]]) -> None:
    problems = run_guide(root / "docs/gallery.md")
    assert not problems, "\n".join(problems)


def test_every_picture_is_of_its_command_and_answer(root: Path) -> None:
    draw = module_at(root / "docs/pictures/draw.py")
    entries = draw.entries()
    assert len(entries) >= 12
    assert {picture for _, _, picture in entries} == set((root / "docs/pictures").glob("gallery-*.svg"))
    for words, answer, picture in entries:
        shown = draw.text_in(picture.read_text(encoding="utf-8"))
        begin = scrubbed(f"$ glass {' '.join(words)} {answer}").replace(" ", "")
        assert scrubbed(shown).replace(" ", "").startswith(begin.removesuffix("...")), picture.name
