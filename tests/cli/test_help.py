"""The help of commands: sections of options, and examples that the commands take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import glassengine
from glassengine.cli import help as helped
from glassengine.cli import main as cli


def test_every_option_of_a_large_command_has_a_section() -> None:
    for name in cli.COMMANDS:
        shown = [one for one in cli.load_command(name).params if one.param_type_name == "option" and not one.hidden]
        without = [one.name for one in shown if one.rich_help_panel is None]
        assert len(without) <= helped._FEW, name
        assert not without or {one.rich_help_panel for one in shown} == {None, "Global options"}, name


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_three_examples_that_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = helped.EXAMPLES[name]
    assert len(lines) == 3 and all(len(f"  glass {line}") <= 78 for line in lines)
    for line in lines:
        first, *arguments = shlex.split(line)
        assert first == name
        cli.load_command(name).make_context(name, cli.spelled_out(arguments))
    assert cli.main([name, "--help"]) == 0
    assert all(f"glass {line}" in capsys.readouterr().out for line in lines[:1])


def test_the_program_is_described_in_one_sentence_everywhere(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = (glassengine.__doc__ or "").partition("\n")[0]
    assert cli.main(["--help"]) == 0
    assert sentence in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f'description = "{sentence}"' in (root / "pyproject.toml").read_text()
    assert f"site_description: {sentence}" in (root / "mkdocs.yml").read_text()
    assert f"\n\n{sentence}\n" in (root / "README.md").read_text()
