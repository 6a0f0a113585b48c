"""Code of the user that raises: in which line, in which module of the model, and what to tell about it."""

from __future__ import annotations

import contextlib
import linecache
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from torch import nn

from glassengine.errors import GlassError, UsageError, first_line

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
    frames = [place for place in _frames(error) if not _is_library(place[0].f_code.co_filename)]
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
    for frame, _ in _frames(error):
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


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _is_library(file: str) -> bool:
    """Whether no mistake of a model is there; other installed packages are model code: transformers, say."""
    return file.startswith((_OURS, _TORCH, "<")) or (file.startswith(_STANDARD) and _INSTALLED not in file)
