"""What the README shows is what happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from glassengine.cli import options
from glassengine.cli.main import load_command, main
from tests.modules import module_at


def scrubbed(text: str) -> list[str]:
    """Without figures, which differ between processors, and without the padding of tables."""
    text = re.sub(r"\d[\d.]*(e[+-]?\d+)?%?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and "─" not in line]


@pytest.fixture(autouse=True)
def _export_once(exporting_once: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with exporting_once():
        yield


@pytest.fixture(scope="module")
def draw(root: Path) -> ModuleType:
    """Return the script that draws the picture."""
    return module_at(root / "docs/pictures/draw.py")


@pytest.mark.slow
def test_the_picture_of_check_is_current(
    root: Path, draw: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make pictures` draws it anew."""
    picture = draw.PICTURE.read_text(encoding="utf-8")
    assert f"]({draw.PICTURE.relative_to(root)})" in (root / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(root)
    # A terminal as wide as the picture: lines are wrapped.
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(options.out, "_force_terminal", True)
    monkeypatch.setattr(options.out, "_width", draw.WIDTH)
    status = main([*draw.COMMAND, *draw.QUIETLY])
    printed = capsys.readouterr()
    assert status == 1 and printed.err == ""
    assert scrubbed(draw.text_in(picture)) == scrubbed(draw.text_in(draw.drawn(printed.out)))


def test_what_the_picture_names_is_there(root: Path, draw: ModuleType) -> None:
    """The quick relative: the command, the line of code at fault and its text, as they are today."""
    shown = draw.text_in(draw.PICTURE.read_text(encoding="utf-8"))
    assert shown.splitlines()[0] == f"$ glass {' '.join(draw.COMMAND)}"
    path, _, function = draw.COMMAND[-1].partition(":")
    assert f"def {function}(" in (root / path).read_text(encoding="utf-8")
    ((source, number, text),) = re.findall(r"^ +baseline +(\S+):(\d+): (.+)$", shown, re.MULTILINE)
    installed = Path(transformers.__file__).parents[1] / source
    assert installed.read_text(encoding="utf-8").splitlines()[int(number) - 1].strip() == text
    flags = {flag for option in load_command("check").params for flag in option.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", shown)) <= flags


def test_the_picture_names_no_machine_and_loads_nothing(root: Path, draw: ModuleType) -> None:
    picture = draw.PICTURE.read_text(encoding="utf-8")
    assert str(root) not in picture and not re.search(r"@import|url\((?!#)|href|\d (?:s|ms)\b", picture)


def test_a_picture_of_another_answer_is_found(draw: ModuleType) -> None:
    """Planted: one word is another."""
    one, other = (
        draw.text_in(draw.drawn(f"\x1b[31mNOT OK\x1b[0m: {word} [1, 2] differ by 0.3")) for word in ("a", "b")
    )
    assert one.splitlines()[1] == "NOT OK: a [1, 2] differ by 0.3"
    assert scrubbed(one) != scrubbed(other)


COMMANDS_OF_README = re.compile(r"^    (glass .+?)(?:  +#.*)?$|`(glass [a-z][^`]*)`", re.MULTILINE)


def test_every_command_and_flag_is_there(root: Path) -> None:
    page = (root / "README.md").read_text(encoding="utf-8")
    found = [one or other for one, other in COMMANDS_OF_README.findall(page)]
    assert len(found) > 10
    for line in found:
        command, *words = line.partition(" -- ")[0].split()[1:]
        known = {flag for option in load_command(command).params for flag in option.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_the_python_block_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(root / "examples")
    exec(compile(block[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "['inter', 'output']"
