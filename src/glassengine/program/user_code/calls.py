"""Calls code of the user, and says of what it raises: in which line, in which module of the model.

`file.py:factory` and `package.module:factory` name a function on the command line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import linecache
import logging as stdlib_logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine import asked
from glassengine.errors import GlassError, UnknownNameError, UsageError, first_line
from glassengine.reading.files import printable

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def load_function(spec: str) -> Callable[..., Any]:
    """Import the module of `spec` and return the function; the file's folder is importable meanwhile.

    Raises:
        UsageError: The file does not exist, cannot be imported, or has no such function.
    """
    where, _, name = str(asked.function(spec)).rpartition(":")
    with _importable(where):
        try:
            module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        except Exception as error:
            what = where if where.endswith(".py") else f"module {where}"
            raise UsageError(f"{what} cannot be imported", got=described(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise UnknownNameError(f"function in {where}", name, own)
    result: Callable[..., Any] = function
    return result


def call_factory(spec: str) -> Any:
    """Call the factory of `spec` without arguments; a class of a problem file with those that the file gives.

    Raises:
        UsageError: It cannot be found, or it raised.
    """
    function = load_function(spec)
    quiet = without_bars() if "transformers" in sys.modules else contextlib.nullcontext()
    with _importable(spec.rpartition(":")[0]), quiet, raised_by(spec):
        if not (isinstance(function, type) and issubclass(function, nn.Module)):
            return function()
        given = problem_function(function, "get_init_inputs")
        if given is not None:
            _problem[:] = [given]
        parameters = inspect.signature(function).parameters.values()
        needs = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        # A solution is made with the arguments of its problem, and by the same random numbers.
        make = given or (_problem[0] if _problem and needs else None)
        with torch.random.fork_rng(devices=[], enabled=make is not None):
            if make is None:
                return function()
            torch.manual_seed(0)
            arguments = make()
            torch.manual_seed(0)
            return function(**arguments) if isinstance(arguments, dict) else function(*arguments)


_problem: list[Callable[[], Any]] = []
"""What gave the arguments of the problem that was loaded last, for a solution whose file has none."""


def problem_function(of: type, name: str) -> Callable[[], Any] | None:
    """Return `get_inputs` or `get_init_inputs` of the file of a class, as problems of KernelBench have them."""
    namespace = vars(sys.modules.get(of.__module__, sys))
    both = all(callable(namespace.get(one)) for one in ("get_inputs", "get_init_inputs"))
    function: Callable[[], Any] | None = namespace[name] if both else None
    return function


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
    except Exception:
        del sys.modules[spec.name]
        raise
    return module


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


_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(nn.__file__).parents[1])
_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = "site-packages"

RAISED: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError)
RAISED += (RuntimeError, TypeError, ValueError)
"""What the making of a graph raises, in torch and here, where a file says what cannot be: attributes that are missing
or of another kind, branches that are not there, sizes that contradict each other."""


def described(error: BaseException, *, installed: bool = True) -> str:
    """Return the class of an exception, the line of its message that says why, and where it was; see `source_of`."""
    text = f"{type(error).__name__}: {first_line(error)}".rstrip(": ")
    where = source_of(error, installed=installed)
    return text if where is None else f"{text}, raised at {where}"


def source_of(error: BaseException, *, installed: bool = True) -> str | None:
    """Return "file:line: code" of the innermost frame of the user.

    Args:
        error: That was caught.
        installed: Take installed model code (transformers) where no frame is the user's own.
    """
    if isinstance(error, SyntaxError) and error.filename and not _is_library(error.filename):
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = [place for place in traceback.walk_tb(error.__traceback__) if not _is_library(place[0].f_code.co_filename)]
    own = [place for place in frames if _INSTALLED not in place[0].f_code.co_filename]
    known = own or (frames if installed else [])
    if not known:
        return None
    frame, line = known[-1]
    file = frame.f_code.co_filename
    code = linecache.getline(file, line, frame.f_globals).strip()
    return f"{file.split(f'/{_INSTALLED}/')[-1]}:{line}: {code}"


def raised_in(error: BaseException, module: nn.Module) -> str | None:
    """Return the path of the innermost submodule in whose call `error` was raised, "" for `module` itself.

    None where no forward raised: before or after it, or in a hook of Glass Engine.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        own = id(frame.f_locals.get("self"))
        if own in paths:
            found = paths[own]
        elif frame.f_code.co_filename.startswith(_OURS):
            found = None
    return found


@contextlib.contextmanager
def forward_errors(module: nn.Module, what: str) -> Iterator[None]:
    """Turn what a forward of `module` raises into a `UsageError`: "<what> <path>"; other exceptions pass.

    Raises:
        UsageError: The forward raised.
    """
    try:
        yield
    except GlassError:
        raise
    except Exception as error:
        path = raised_in(error, module)
        if path is None:
            raise
        raise UsageError(f"{what} {path or type(module).__name__}", got=described(error)) from error


@contextlib.contextmanager
def raised_by(whose: str) -> Iterator[None]:
    """Turn what a function of the user raises into a `UsageError`: "<whose> raised".

    Raises:
        UsageError: It raised.
    """
    try:
        yield
    except GlassError:
        raise
    except Exception as error:
        raise UsageError(f"{whose} raised", got=described(error), hint="run with -v") from error


def _is_library(file: str) -> bool:
    """Whether no mistake of a model is there; other installed packages are model code: transformers, say."""
    return file.startswith((_OURS, _TORCH, "<")) or (file.startswith(_STANDARD) and _INSTALLED not in file)
