"""The plugin costs nothing where it is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_import import HEAVY

CODE = f"""
import sys
import pytest
before = set(sys.modules)
status = pytest.main(["-q", "-p", "glassengine.pytest_plugin", "-p", "no:cacheprovider", "test_nothing.py"])
assert status == 0
loaded = set(sys.modules) - before
print("LOADED", sorted(name for name in loaded if name.partition(".")[0] in {(*HEAVY, "msgspec", "jinja2")!r}))
print("OWN", sorted(name for name in loaded if name.startswith("glassengine")))
"""


def test_a_run_without_comparisons_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LOADED []" in done.stdout
    own = "['glassengine', 'glassengine.deferred', 'glassengine.pytest_plugin', 'glassengine.pytest_plugin.summary']"
    assert f"OWN {own}" in done.stdout
