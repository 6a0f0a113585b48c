"""Settings shared by the whole suite: offline, one thread a worker, one compiler cache, no colours.

And one check of a whole run: every test that docs/compatibility.md names ran and passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


# A worker takes file after file, and all wait for the last: those that take 20 s and more begin first.
LONGEST = (
    "docs/test_guides.py",
    "diagnose/test_corpus.py",
    "diagnose/test_bundled_model.py",
    "engine/test_tokens_of_transformers.py",
    "diagnose/test_ladder.py",
    "diagnose/test_replay_snapshot.py",
    "frontends/test_eager_debug.py",
    "backends/test_conformance.py",
    "backends/test_inductor.py",
    "engine/test_artifacts.py",
    "cli/test_record.py",
    "cli/test_check.py",
    "diagnose/test_side_by_side.py",
    "diagnose/test_ports.py",
    "diagnose/test_reproduce.py",
    "diagnose/test_training.py",
    "docs/test_families.py",
    "examples/test_tiny_llama.py",
    "program/test_hash_seed.py",
    "test_readme.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist would put files with few tests last, and among them are the longest.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    # With xdist the reports of all workers come to the controller, which alone knows what ran.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Promises(config), "promises")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-cuda"))


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


@pytest.fixture(autouse=True)
def _loud() -> None:
    """A command that another test ran in this process with -q has left what it made of the level."""
    logging.getLogger("glassengine").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def exporting_once() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which a causal language model is exported only where no equal one was before in this process.

    Equal means: modules of the same classes with the same settings and the same code, and the same weights. What is
    exported with an observer of its stages is exported again.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        from glassengine import program

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "export_causal_lm", _export_once)
            yield

    return context


_KEPT = 8
_TENSORS = ("_parameters", "_buffers", "_modules", "config")
_exported: dict[str, tuple[Any, str, Any]] = {}
"""Identity of a model -> its program, the state of that, and what must live on, or its address would be used again."""


def _export_once(model: Any, *, metadata: dict[str, Any] | None = None, on_stage: Any = None) -> Any:
    from glassengine.program.export import export_causal_lm

    if on_stage is not None:
        return export_causal_lm(model, metadata=metadata, on_stage=on_stage)
    key, code = _identity(model)
    # What was asked for last is the last to go.
    program, state, owners = _exported.pop(key, (None, "", None))
    if program is None or _state(program.exported.state_dict) != state:
        program = export_causal_lm(model)
        state, owners = _state(program.exported.state_dict), (model, code)
    _exported[key] = program, state, owners
    for oldest in list(_exported)[:-_KEPT]:
        del _exported[oldest]
    return dataclasses.replace(program, metadata={**(metadata or {}), **program.metadata})


def _identity(model: Any) -> tuple[str, list[Any]]:
    """Return what a program depends on: structure, settings, hooks, code and weights of a model; and the code."""
    kinds = {type(module) for module in model.modules()}
    # A test may put another function in place of a method, or of one that the methods call.
    spaces = [vars(owner) for kind in kinds for owner in kind.__mro__[:-1]]
    spaces += [vars(sys.modules[kind.__module__]) for kind in kinds]
    ours = [vars(module) for name, module in sys.modules.items() if name.startswith("glassengine.program")]
    spaces += [*ours, *(vars(value) for space in ours for value in space.values() if isinstance(value, type))]
    code = [value for space in spaces for value in space.values() if callable(value)]
    own = [
        (name, {key: repr(value) for key, value in vars(module).items() if key not in _TENSORS})
        for name, module in model.named_modules()
    ]
    config = getattr(model, "config", None)
    # Its dtype is that of the weights, or not filled in.
    settings = None if config is None else ({**config.to_dict(), "dtype": None}, config._attn_implementation)
    state = _state({**dict(model.named_parameters()), **dict(model.named_buffers())})
    described = f"{model} {own} {sorted(map(id, code))} {settings} {state}"
    return hashlib.sha256(described.encode()).hexdigest(), code


def _state(tensors: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {value.device}".encode())
        if not value.is_meta:
            digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return ROOT
