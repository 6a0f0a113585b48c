"""Settings shared by the whole suite: offline, one thread a worker, one compiler cache, no colours.

And one check of a whole run: every test that docs/compatibility.md names ran and passed.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports torch or transformers: these are read at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two workers on two cores: a second thread in each would only spin (measured: five times slower).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of OpenMP that spin while they wait make torch many times slower as soon as anything else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
# Whether a graph is compiled must not depend on earlier runs: tests of the cache name a directory of their own.
os.environ["GLASS_CACHE_MAX_BYTES"] = "0"
# The surroundings of the person who runs the suite must not change what commands print.
for _name in ("NO_COLOR", "FORCE_COLOR", "CI"):
    os.environ.pop(_name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-guides", action="store_true", help="write what the blocks of the guides print into them")


def pytest_configure(config: pytest.Config) -> None:
    # With xdist the reports of all workers come to the controller, which alone knows what ran.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Promises(config), "promises")


class Promises:
    """Fails a run of the whole suite in which a test that docs/compatibility.md names did not run and pass."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcomes: dict[str, set[str]] = defaultdict(set)
        self._broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that is skipped or fails before its call has no report of the call.
        if report.when == "call" or report.outcome != "passed":
            for name in {report.nodeid, report.nodeid.split("[", 1)[0]}:
                self._outcomes[name].add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        page = self._config.rootpath / "docs" / "compatibility.md"
        if not self._is_whole(session) or not page.is_file():
            return
        exempt = self._config.option.markexpr == "not slow"
        for row, name, slow in promised_tests(page.read_text(encoding="utf-8")):
            found = self._outcomes.get(name, set())
            if found != {"passed"} and not (slow and exempt and not found):
                self._broken.append(f"{row}: {name}: {', '.join(sorted(found)) or 'was not run'}")
        if self._broken and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._broken:
            terminalreporter.section("rows of docs/compatibility.md that this run does not show", red=True)
            for line in self._broken:
                terminalreporter.line(line)

    def _is_whole(self, session: pytest.Session) -> bool:
        option = self._config.option
        chosen = (
            option.keyword or option.collectonly or getattr(option, "lf", False) or option.deselect or option.ignore
        )
        return (
            self._config.args_source is pytest.Config.ArgsSource.TESTPATHS
            and not chosen
            and option.markexpr in ("", "not slow")
            and not session.shouldstop
            and not session.shouldfail
        )


def promised_tests(page: str) -> list[tuple[str, str, bool]]:
    """Return (row, test, whether the page calls it slow) of everything that docs/compatibility.md names."""
    found = []
    for line in page.splitlines():
        row = re.match(r"\| ([A-D]\d+)\b", line)
        if row is not None:
            tests = re.findall(r"`(tests/[^`]*::[^`]*)`( \(slow\))?", line)
            found += [(row[1], name, bool(slow)) for name, slow in tests]
    return found


@pytest.fixture(scope="session")
def promises(root: Path) -> list[tuple[str, str, bool]]:
    """Return what `promised_tests` finds in the page."""
    return promised_tests((root / "docs" / "compatibility.md").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _threads() -> None:
    """Keep torch's number of threads, without importing it for tests that do not use it."""
    torch = sys.modules.get("torch")
    wanted = int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return ROOT
