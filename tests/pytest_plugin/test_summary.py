"""The plugin costs nothing where it is not used, and sums up what workers send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.pytest_plugin.summary import PluginSummary
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
    # Where this package is installed as it is, pytest would load the plugin by itself, and other people's too.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LOADED []" in done.stdout
    own = "['glassengine', 'glassengine.deferred', 'glassengine.pytest_plugin', 'glassengine.pytest_plugin.summary']"
    assert f"OWN {own}" in done.stdout


def test_reports_of_workers_become_one_log(tmp_path: Path) -> None:
    """As pytest-xdist hands them to the controller: reports with properties, of tests that ran in other processes."""
    torch.save({"a": torch.ones(3)}, tmp_path / "one.pt")
    torch.save({"a": torch.zeros(3)}, tmp_path / "two.pt")
    result = glass.compare(tmp_path / "one.pt", tmp_path / "two.pt")
    (tmp_path / "tests/.git").mkdir(parents=True)
    (tmp_path / "tests/test_x.py").touch()
    document = tmp_path / "test-1.json"
    document.write_text(json.dumps({"schema_version": 1, **result.to_dict()}))
    options: dict[str, Any] = {"--glass-report": str(tmp_path)}
    config: Any = SimpleNamespace(getoption=options.get, rootpath=tmp_path / "tests")
    summary = PluginSummary(config)
    for when in ("setup", "call", "teardown"):
        properties = [("glass.ok", "false"), ("glass.2.document", str(document)), ("other", "x")]
        report: Any = SimpleNamespace(when=when, user_properties=properties, location=("test_x.py", 4, "test"))
        summary.pytest_runtest_logreport(report)
    summary.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    (found,) = json.loads((tmp_path / "glass.sarif").read_text())["runs"][0]["results"]
    assert found["ruleId"] == "glass/wrong"
    # The file of the candidate is outside of the repository: the place is the test.
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "test_x.py" and place["region"] == {"startLine": 5}
    # Another run that compares nothing leaves no log of this one.
    PluginSummary(config).pytest_sessionfinish(pytest.ExitCode.OK)
    assert not (tmp_path / "glass.sarif").exists()
