"""Summarizes all comparisons of a pytest run, those of workers too, and logs their findings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_NAME = re.compile(r"glass\.(?:\d+\.)?(?P<name>\w+)")
LOG = "glass.sarif"


class PluginSummary:
    """Collects what tests leave in their reports, which workers send."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._documents: list[tuple[Path, tuple[str, int]]] = []
        self._stored: list[str] = []
        self._log: Path | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what `glass_check` has left with a test."""
        if report.when != "call":
            return
        for key, value in report.user_properties:
            found = _NAME.fullmatch(key)
            if found is not None and found["name"] == "document":
                file, line, _ = report.location
                self._documents.append((Path(str(value)), (str(self._config.rootpath / file), (line or 0) + 1)))
            elif found is not None and found["name"] == "stored":
                self._stored.append(str(value))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the findings of all comparisons as one log."""
        folder = self._config.getoption("--glass-report")
        if folder is None:
            return
        log = Path(folder) / LOG
        log.unlink(missing_ok=True)
        if not self._documents:
            return
        import json

        from glassengine.report.sarif import repository_of, sarif
        from glassengine.results.base import plain
        from glassengine.results.stored import read_comparisons

        results = [one for path, _ in self._documents for one in read_comparisons(path)]
        root, tests = repository_of(self._config.rootpath), [test for _, test in self._documents]
        document = sarif(results, "pytest", root, int(exitstatus), tests)
        log.write_text(json.dumps(plain(document), indent=2) + "\n", encoding="utf-8")
        self._log = log

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was written."""
        if not self._stored and self._config.getoption("--glass-report") is None:
            return
        terminalreporter.section("glass")
        for path in self._stored:
            terminalreporter.write_line(f"stored {path}")
        if self._log is not None:
            where = f"{len(self._documents)} comparisons in {self._log.parent}, findings in {self._log}"
            terminalreporter.write_line(where)
        elif self._config.getoption("--glass-report") is not None:
            terminalreporter.write_line("--glass-report: no test has compared anything")
