"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_transcript_of_check(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"$ glass {' '.join(COMMAND)}" in readme
    shown = re.search(r"<!-- transcript: check -->\n```text\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    found = subprocess.run(
        [sys.executable, "-m", "glassengine.cli", *COMMAND], cwd=root, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stderr
    assert scrubbed(found.stdout) == scrubbed(shown[1])


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
