"""The page on dumps of other frameworks: every block runs with these, and prints what is shown."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.conftest import run_guide as run_guide


@pytest.mark.parametrize("page", ["my-dump-comes-from-another-framework.md", "my-dump-comes-from-tinygrad-or-cpp.md"])
def test_dumps_of_other_frameworks(
    page: str, root: Path, run_guide: Callable[[Path], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("jax", "mlx", "tinygrad"):
        pytest.importorskip(package)
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on this machine")
    monkeypatch.setenv("DEV", "PYTHON")  # what tinygrad compiles its kernels with is another package
    problems = run_guide(root / "docs" / "guide" / page)
    assert not problems, "\n".join(problems)
