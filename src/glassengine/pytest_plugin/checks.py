"""The fixture `glass_check`: comparisons that fail a test with the screen, and leave their figures with it."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import glassengine as glass
from glassengine.errors import UnknownNameError, UsageError
from glassengine.report.findings import findings
from glassengine.results import Comparison
from glassengine.results.base import plain
from glassengine.writing import aside, remove_tree

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

MARK = "glass"
_COLUMNS = 110


class NotOk(AssertionError):
    """Two sides differ by more than rounding; the message is what `glass check` shows.

    Attributes:
        comparison: All that was found.
    """

    # As pytest's own: the summary of a run has room for the message then.
    __module__ = "builtins"

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message)
        self.comparison = comparison


class Checks:
    """Comparisons of one test."""

    def __init__(self, item: pytest.Item, folder: Path) -> None:
        self._item = item
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        baseline: str | Path | nn.Module,
        candidate: str | Path | nn.Module | None = None,
        *,
        inputs: str | Path | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Comparison:
        """Judge a candidate against a baseline, as `glass.check` does.

        Args:
            baseline: As for `glass.check`.
            candidate: As for `glass.check`.
            inputs: As for `glass.check`, or the tensors themselves by name.
            options: Others of `glass.check`; they come before those of the mark `glass`.

        Raises:
            NotOk: They differ.
        """
        __tracebackhide__ = True
        if isinstance(inputs, Mapping):
            import torch

            path = self._folder / f"inputs-{self._count}.pt"
            torch.save(dict(inputs), path)
            inputs = path
        given = {"inputs": None if inputs is None else str(inputs), **options}
        with _without_traces():
            result = glass.check(baseline, candidate=candidate, **self._options(glass.check, given))
        return self._concluded(result, of_models=True)

    def compare(self, baseline: str | Path, candidate: str | Path, **options: Any) -> Comparison:
        """Compare two records of tensors, as `glass.compare` does.

        Args:
            baseline: As for `glass.compare`.
            candidate: As for `glass.compare`.
            options: Others of `glass.compare`; they come before those of the mark `glass`.

        Raises:
            NotOk: They differ.
        """
        __tracebackhide__ = True
        result = glass.compare(baseline, candidate, **self._options(glass.compare, options))
        return self._concluded(result, of_models=False)

    def recorded(
        self, model: nn.Module, run: Callable[[], object], *, name: str = "baseline", **options: Any
    ) -> Comparison:
        """Compare what a model computes now with the stored recording of this test; `--glass-update` stores it.

        Args:
            model: Whose tensors are recorded.
            run: Runs it, on inputs that are the same each time.
            name: Of the recording, where a test has several.
            options: As for `compare`.

        Raises:
            NotOk: They differ.
            UsageError: Nothing is stored yet.
        """
        __tracebackhide__ = True
        stored, fresh = self.baseline(name), self._folder / f"{self._count}-{_file_name(name)}"
        with glass.record(model, fresh):
            run()
        if self._item.config.getoption("--glass-update"):
            _store(fresh, stored)
            self._note("stored", stored)
        elif not stored.exists():
            raise UsageError(
                "no baseline is stored for this test",
                got=str(stored),
                expected="a recording that an earlier run has stored",
                hint=f"pytest --glass-update '{self._item.nodeid}', then keep the directory with the tests",
            )
        return self.compare(stored, fresh, **options)

    def baseline(self, name: str = "baseline") -> Path:
        """Return where the recording of this test lies; it need not exist."""
        folder = self._item.path.parent / self._item.config.getini("glass_baselines")
        # A class and its methods are told apart, and parameters that have no place in a file name.
        inside = self._item.nodeid.partition("::")[2] or self._item.name
        return Path(folder, self._item.path.stem, _file_name(inside), _file_name(name))

    def _options(self, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of a function: those of marks that it has, the nearest first, and those that are given."""
        known = {*inspect.signature(glass.check).parameters, *inspect.signature(glass.compare).parameters}
        own = inspect.signature(function).parameters
        options: dict[str, Any] = {}
        for mark in reversed(list(self._item.iter_markers(MARK))):
            for name, value in mark.kwargs.items():
                if name not in known:
                    raise UnknownNameError("option of the mark glass", name, known)
                if name in own:
                    options[name] = value
            if mark.args:
                raise UsageError("the mark glass takes options by name", got=repr(mark.args[0]))
        return options | {name: value for name, value in given.items() if value is not None or name not in options}

    def _concluded(self, result: Comparison, *, of_models: bool) -> Comparison:
        __tracebackhide__ = True
        self._count += 1
        for name, value in _properties(result).items():
            self._note(name, value)
        folder = self._item.config.getoption("--glass-report")
        if folder is not None:
            name = _file_name(f"{self._item.nodeid}-{self._count}")
            self._note("document", _write(result, Path(folder), name))
        if not result.ok:
            raise NotOk(_screen(result, of_models), result)
        return result

    def _note(self, name: str, value: object) -> None:
        number = "" if self._count <= 1 else f"{self._count}."
        self._item.user_properties.append((f"glass.{number}{name}", str(value)))


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keep what torch traces of its compiler, thousands of records, from the log that pytest shows of a failed test."""

    def is_other(record: logging.LogRecord) -> bool:
        return record.name != "torch.__trace"

    # Those of pytest among them; torch makes handlers of its own for a trace that was asked for.
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(is_other)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_other)


def _properties(result: Comparison) -> dict[str, object]:
    """Return what stands with the test in JUnit files."""
    properties: dict[str, object] = {
        "ok": str(result.ok).lower(),
        "verdict": result.verdict,
        "standing": result.standing,
        "coverage": f"{result.coverage:.3f}",
        "baseline": result.baseline,
        "candidate": result.candidate,
    }
    told = findings(result)
    if told:
        first = told[0]
        lines = {"source": first.baseline, "candidate_source": first.candidate}
        properties |= {name: f"{line.place}: {line.code}" for name, line in lines.items() if line is not None}
        properties |= {"finding": first.text} | ({} if first.site is None else {"site": first.site})
        if first.hints:
            properties["hint"] = first.hints[0].in_words()
    return properties


def _screen(result: Comparison, of_models: bool) -> str:
    from rich.console import Console

    shown: RenderableType
    if of_models:
        from glassengine.report.terminal_check import check

        shown = check(result)
    else:
        from glassengine.report.terminal_compare import comparison

        shown = comparison(result)
    console = Console(file=StringIO(), width=_COLUMNS, markup=False, highlight=False, emoji=False, no_color=True)
    # Lines of code stay in one piece.
    console.print(shown, soft_wrap=True)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def _write(result: Comparison, folder: Path, name: str) -> Path:
    """Write a result as a page for the browser, and as the JSON document beside it, which is returned."""
    from glassengine.report.page.write import write_report

    folder.mkdir(parents=True, exist_ok=True)
    write_report(result, folder / name)
    path = folder / f"{name}.json"
    document = {"schema_version": result.schema_version, **result.to_dict()}
    with aside(path) as partial:
        partial.write_text(json.dumps(plain(document), indent=2), encoding="utf-8")
    return path


def _store(fresh: Path, stored: Path) -> None:
    """Replace the stored recording by a copy of another, once that copy is whole."""
    stored.parent.mkdir(parents=True, exist_ok=True)
    partial = stored.with_name(f".{stored.name}.partial")
    remove_tree(partial)
    shutil.copytree(fresh, partial)
    remove_tree(stored)
    partial.replace(stored)


def _file_name(name: str) -> str:
    """Return a name for a file; another one for each name."""
    plain_name = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._")[:100] or "_"
    return plain_name if plain_name == name else f"{plain_name}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
