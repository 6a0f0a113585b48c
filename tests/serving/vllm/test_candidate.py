"""`vllm:DIR` without vLLM: what is refused, and with which words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from glassengine.errors import BackendError, UsageError
from glassengine.serving.protocol import Options, Run, open_served
from glassengine.serving.vllm.candidate import VllmCandidate


def candidate(folder: Path, script: str) -> VllmCandidate:
    """Return a candidate whose interpreter is a script."""
    (folder / "config.json").write_text("{}")
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\n{script}")
    python.chmod(0o755)
    served = open_served(f"vllm:{folder}", Options(python=python))
    assert isinstance(served, VllmCandidate) and served.spec == f"vllm:{folder}"
    return served


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint"):
        open_served(f"vllm:{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    served = open_served(f"vllm:{tmp_path}", Options(python=tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no such interpreter"):
        served.record(Run([1], 0), tmp_path / "rec")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'vllm'\")", UsageError, "not installed"),
        ("raise ValueError('head size 16')", BackendError, "vLLM failed"),
        ("import os; os.kill(os.getpid(), 11)", BackendError, "vLLM crashed"),
    ],
)
def test_what_goes_wrong_in_vllm_is_said(tmp_path: Path, script: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        candidate(tmp_path, script).record(Run([1, 2], 0), tmp_path / "rec")
