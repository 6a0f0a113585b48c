"""Records the answer of each comparison that a test makes, or compares it with the answer book: a plugin of pytest.

`pytest -p tests.answers --answers FILE` writes FILE. `--frozen` fails a test whose answers differ from the answer book,
tests/answers.json: corpus -> test -> its answers in order, one text each (verdict, standing, level, step, site, kind of
mistake). `python -m benchmarks golden` compares and writes the whole book.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BOOK = Path(__file__).parent / "answers.json"
QUICK = ("recordings", "as given")
"""Corpora of the book that every run of the quick tests compares: their answers depend on no kernel."""

# Function -> modules that have it under its name.
JUDGES = {
    "check": ("glassengine.diagnose.check_model", "glassengine.diagnose"),
    "check_training": ("glassengine.diagnose.training_check",),
    "compare": ("glassengine.compare.compare", "glassengine.compare"),
    "compare_many": ("glassengine.compare.compare",),
    "replay": ("glassengine.diagnose.snapshot_replay",),
}


def answer_of(result: Any) -> str:
    """Return verdict, standing, level, step, site and kind of a result; several answers are joined by a semicolon."""
    if (several := getattr(result, "comparisons", None)) is not None:
        return "; ".join(map(answer_of, several))
    if hasattr(result, "comparison"):
        return f"ok: {result.ok}" if result.comparison is None else answer_of(result.comparison)
    first = result.first_divergence
    where = () if first is None else (first.level, first.step, first.site, first.hints[0].kind if first.hints else None)
    return " | ".join(map(str, (result.verdict, result.standing, *where)))


class Recorder:
    """Wraps the functions that judge, and keeps what the outermost call of a test returns or raises.

    Args:
        path: File to write; None writes none.
        frozen: Test -> the answers that it must give; others are free.
    """

    def __init__(self, path: Path | None, frozen: Mapping[str, Sequence[str]]) -> None:
        self.path, self.frozen = path, frozen
        self.answers: dict[str, list[str]] = defaultdict(list)
        self.test: str | None = None
        self.depth = 0
        for name, modules in JUDGES.items():
            wrapped = self._wrapped(getattr(importlib.import_module(modules[0]), name))
            for module in modules:
                setattr(importlib.import_module(module), name, wrapped)

    def _wrapped(self, judge: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(judge)
        def recorded(*args: Any, **options: Any) -> Any:
            self.depth += 1
            answer = "interrupted"
            try:
                result = judge(*args, **options)
                answer = answer_of(result)
                return result
            except Exception as error:
                answer = type(error).__name__
                raise
            finally:
                self.depth -= 1
                if self.depth == 0 and self.test is not None:
                    self.answers[self.test].append(answer)

        return recorded

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Note which test runs; one that draws its cases gives other answers each time."""
        self.test = None if getattr(getattr(item, "obj", None), "is_hypothesis_test", False) else item.nodeid
        try:
            outcome = yield
        finally:
            self.test = None
        wanted = self.frozen.get(item.nodeid)
        if wanted is not None and wanted != self.answers[item.nodeid]:
            pytest.fail(f"other answers than in {BOOK.name}: {self.answers[item.nodeid]}, expected {wanted}")
        return outcome

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        if self.path is not None:
            self.path.write_text(json.dumps(self.answers))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--answers", type=Path, help="file to write the answers of comparisons to")
    parser.addoption("--frozen", action="store_true", help="fail tests whose answers differ from the answer book")


def pytest_configure(config: pytest.Config) -> None:
    """Wrap the functions before any test imports them; the main process of pytest-xdist runs no test."""
    path, is_frozen = config.getoption("--answers"), config.getoption("--frozen")
    worker = getattr(config, "workerinput", None)
    if (path is None and not is_frozen) or (worker is None and config.getoption("numprocesses", None)):
        return
    if path is not None and worker is not None:
        path = path.with_name(f"{path.name}.{worker['workerid']}")
    book = json.loads(BOOK.read_text()) if is_frozen else {}
    frozen = {test: answers for corpus in QUICK for test, answers in book.get(corpus, {}).items()}
    config.pluginmanager.register(Recorder(path and path.absolute(), frozen))
