"""`file.py:factory` and `package.module:factory`: call a function that the user names on the command line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging as stdlib_logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from glassengine import asked
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program.user_code.raised import described, raised_by
from glassengine.reading.files import printable

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def load_function(spec: str) -> Callable[..., Any]:
    """Import the module of `spec` and return the function; the file's folder is importable meanwhile.

    Raises:
        UsageError: The file does not exist, cannot be imported, or has no such function.
    """
    where, _, name = str(asked.function(spec)).rpartition(":")
    with _importable(where):
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise UnknownNameError(f"function in {where}", name, own)
    result: Callable[..., Any] = function
    return result


def call_factory(spec: str) -> Any:
    """Call the factory of `spec` without arguments.

    Raises:
        UsageError: It cannot be found, or it raised.
    """
    function = load_function(spec)
    quiet = without_bars() if "transformers" in sys.modules else contextlib.nullcontext()
    with _importable(spec.rpartition(":")[0]), quiet, raised_by(spec):
        return function()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Turn the progress bars of transformers off meanwhile: they would draw over ours, and no flag stops them.

    What it logs names tensors and settings as files do: it is escaped.
    """
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    handlers = list(stdlib_logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(_escaped)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_escaped)
        if had_bars:
            logging.enable_progress_bar()


def _escaped(record: stdlib_logging.LogRecord) -> bool:
    record.msg, record.args = printable(_COLORS.sub("", record.getMessage()), also="\n\t"), ()
    return True


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_glass_{path.stem}_{abs(hash(path.resolve()))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that dataclasses, pickling and inspection inside the file work
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise UsageError(f"{path} cannot be imported", got=described(error)) from error
    return module


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(f"module {name} cannot be imported", got=described(error)) from error


_folders: set[Path] = set()
"""Folders of the factory files of this process."""


@contextlib.contextmanager
def _importable(where: str) -> Iterator[None]:
    """Make modules beside the file (or in the working directory) importable, as `python file.py` would."""
    path = Path(where).resolve().parent if where.endswith(".py") else Path.cwd()
    if where.endswith(".py"):
        _forget_namesakes(path)
        _folders.add(path)
    folder = str(path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _forget_namesakes(folder: Path) -> None:
    """Forget modules that other factories imported from beside them and that also exist in `folder`.

    A model and its port often lie in two folders with the same file names; the second would get the first one's.
    """
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    for loaded in [name for name in sys.modules if name.partition(".")[0] in names]:
        top = sys.modules.get(loaded.partition(".")[0], sys.modules[loaded])
        file = getattr(top, "__file__", None)
        if file is not None and any(_lies_in(Path(file), other) for other in _folders - {folder}):
            del sys.modules[loaded]


def _lies_in(file: Path, folder: Path) -> bool:
    """Whether `file` is a module, or the `__init__.py` of a package, directly in `folder`."""
    return folder in (file.resolve().parent, file.resolve().parent.parent)
