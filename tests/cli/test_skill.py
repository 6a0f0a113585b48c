"""`glass skill` prints what is in the package; its commands and flags exist."""

from __future__ import annotations

import re

import pytest

from glassengine.cli import main as cli
from glassengine.cli.skill import order, skill


def test_the_instructions_are_printed_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["skill"]) == 0
    printed = capsys.readouterr().out
    assert printed == skill() and len(printed.splitlines()) <= 120
    assert re.match(r"---\nname: glassengine\ndescription: .{50,900}\n---\n", printed)


def test_step_0_is_the_tokens_and_the_reference() -> None:
    assert order().startswith("0. Do both sides get the same tokens, and is the reference coherent?")


def test_its_commands_and_flags_exist() -> None:
    commands = re.findall(r"`glass ([a-z][^`]*)`", skill())
    assert len(commands) > 15
    for line in commands:
        command, *words = line.partition(" -- ")[0].split()
        known = {flag for option in cli.load_command(command).params for flag in option.opts}
        assert {word for word in words if word.startswith("-")} <= known, line
