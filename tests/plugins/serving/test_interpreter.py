"""Starting an engine in the interpreter that it is installed for: what goes wrong is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from glassengine.errors import BackendError, UsageError
from glassengine.plugins.serving.interpreter import Interpreter


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'other'\")", UsageError, "not installed"),
        ("raise ValueError('head size 16')", BackendError, "Other failed"),
        (
            """import sys; sys.exit('Refused: {"what": "no such head", "got": "16", "hint": "32"}')""",
            UsageError,
            "no such head",
        ),
        ("import os; os.kill(os.getpid(), 11)", BackendError, "Other crashed"),
    ],
)
def test_errors_of_the_other_interpreter_are_reported(
    tmp_path: Path, script: str, error: type[Exception], words: str
) -> None:
    (tmp_path / "ours.py").write_text(f"def main():\n    {script}\n")
    with pytest.raises(error, match=words):
        Interpreter("Other", "other", "ours", tmp_path).start(sys.executable, {})


def test_it_reads_a_request_and_none_of_our_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    code = "import json, sys\ndef main():\n    return json.load(sys.stdin)['status'] + ('/elsewhere' in sys.path)\n"
    (tmp_path / "ours.py").write_text(code)
    Interpreter("Other", "other", "ours", tmp_path).start(sys.executable, {"status": 0})
    with pytest.raises(UsageError, match="no such interpreter"):
        Interpreter("Other", "other", "ours", tmp_path).start(tmp_path / "nowhere", {})
