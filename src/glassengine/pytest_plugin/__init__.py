"""The pytest plugin: the fixture `glass_check`, the mark `glass`, `--glass-report DIR` and `--glass-update`.

It is loaded in every run of pytest where this package is installed, so it imports nothing until a test uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from glassengine.pytest_plugin.checks import Checks

SUMMARY = "glassengine-summary"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the setting where baselines are kept."""
    group = parser.getgroup("glass", "Glass Engine")
    group.addoption(
        "--glass-report",
        metavar="DIR",
        help="write what glass_check has compared: a page and a JSON document each, and all findings as glass.sarif",
    )
    group.addoption(
        "--glass-update",
        action="store_true",
        help="store the baselines of glass_check.recorded, also over older ones",
    )
    parser.addini("glass_baselines", help="directory of baselines, beside the test file", default="glass_baselines")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; where there are workers, only their controller sums up."""
    config.addinivalue_line(
        "markers", "glass(**options): options of glass.check and glass.compare for the checks of a test"
    )
    if not hasattr(config, "workerinput"):
        from glassengine.pytest_plugin.summary import PluginSummary

        config.pluginmanager.register(PluginSummary(config), SUMMARY)


def pytest_report_header(config: pytest.Config) -> str:
    """Return the versions that a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("glassengine", "torch", "transformers"):
        try:
            found.append(f"{'' if name == 'glassengine' else name + ' '}{version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    update = ", storing baselines" if config.getoption("--glass-update") else ""
    return f"glass: {', '.join(found)}{update}"


@pytest.fixture
def glass_check(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checks]:
    """Compare models and records of tensors; a test fails with the screen of `glass check` where they differ.

    `glass_check(baseline, candidate)` is `glass.check`, `glass_check.compare(a, b)` is `glass.compare`, and
    `glass_check.recorded(model, run)` compares what `run()` makes `model` compute with a stored recording.
    """
    from glassengine.pytest_plugin.checks import Checks

    yield Checks(request.node, Path(str(tmp_path_factory.mktemp("glass"))))
