"""What the README shows is what happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from glassengine.cli.main import main

COMMAND = [
    "check",
    "examples/tiny-llama",
    "--candidate",
    "examples/wrong_port.py:attention_scale",
    "--no-progress",
    "-q",
]


def scrubbed(text: str) -> list[str]:
    """Without figures, which differ between processors, and without the padding of tables."""
    text = re.sub(r"\d[\d.]*(e[+-]?\d+)?%?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and "─" not in line]


@pytest.fixture(autouse=True)
def _export_once(exporting_once: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with exporting_once():
        yield


def test_the_transcript_of_check(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"$ glass {' '.join(COMMAND)}" in readme
    shown = re.search(r"<!-- transcript: check -->\n```text\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(root)
    status = main(COMMAND)
    printed = capsys.readouterr()
    assert status == 1 and printed.err == ""
    assert scrubbed(printed.out) == scrubbed(shown[1])


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
