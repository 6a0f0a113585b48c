"""Ends a command line: every way out of a command, Ctrl-C included, becomes a message and an exit status.

Status: 0 ok, 1 not ok, 2 usage, 3 back-end, 4 incomparable or corrupt, 70 a bug of ours
(EX_SOFTWARE of sysexits), 130 interrupted, 141 the reader of our output went away (128 + SIGPIPE, as a shell says).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import typer
from rich.text import Text
from typer.exceptions import TyperException

from glassengine.cli.documents import json_pieces, write_json, write_text
from glassengine.cli.foreign import absent
from glassengine.cli.options import err, settings
from glassengine.errors import GlassError, UsageError

BUG_STATUS = 70
INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141
_AGAIN_S = 0.2


def exit_status(function: Callable[[], int]) -> int:
    """Return what `function` returns, or report what it raises and return the exit status for that."""
    try:
        with heard():
            status = function()
        sys.stdout.flush()  # a reader that went away is noticed here, not at interpreter shutdown
    except typer.Exit as exc:
        return exc.exit_code
    except KeyboardInterrupt as exc:
        text = " ".join(["interrupted", *getattr(exc, "__notes__", ())])
        err.print(text)
        _write(GlassError(text), INTERRUPTED_STATUS)
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
    except GlassError as exc:
        return _print(exc, exc.exit_status)
    except TyperException as exc:
        return _print(_usage_error(exc), exc.exit_code)
    except OSError as exc:
        what = f"cannot access {exc.filename!r}" if exc.filename else "cannot access a file"
        return _print(UsageError(what, got=str(exc)), UsageError.exit_status)
    except Exception as exc:
        missing = _missing_package(exc)
        if missing is not None:
            return _print(missing, missing.exit_status)
        bug = GlassError(
            "this is a bug in Glass Engine, please report it",
            got=f"{type(exc).__name__}: {exc}",
            hint=None if settings.verbose else "the traceback is shown with -v",
        )
        return _print(bug, BUG_STATUS)
    return status


def _print(error: GlassError, status: int) -> int:
    """Print `error:` and the parts of the message; -v adds the traceback of the exception being handled."""
    if settings.verbose:
        err.print(traceback.format_exc(), end="")
    err.print(Text.assemble(("error:", "bold red"), " ", str(error)))
    _write(error, status)
    return status


def _write(error: GlassError, status: int) -> None:
    """Write the error as JSON and as SARIF, if these were asked for."""
    if settings.json is None and settings.sarif is None:
        return
    from glassengine.results.base import failure

    found = failure(error, status)
    with contextlib.suppress(OSError, GlassError):  # of which the message on stderr tells already
        if settings.json is not None:
            write_json(found.to_dict(), settings.json)
    with contextlib.suppress(OSError, GlassError):
        if settings.sarif is not None:
            from glassengine.report.sarif import failed

            command = next((word for word in settings.words if not word.startswith("-")), "glass")
            write_text(json_pieces(failed(found.error, command, status)), settings.sarif, flag="--sarif")


def _missing_package(error: BaseException) -> UsageError | None:
    """Return what to tell where a package of the environment cannot be imported; None where something else failed.

    transformers imports its parts when they are first used, and tells the cause as the cause.
    """
    if not isinstance(error, ImportError):
        return None
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    first = causes[-1]
    name = (getattr(first, "name", None) or "").partition(".")[0]
    if name == "glassengine":
        return None
    return UsageError(
        f"a package of this environment cannot be imported{f': {name}' if name else ''}",
        got=f"{type(first).__name__}: {first}",
        expected="the packages that the installation names, in versions that fit one another",
        hint="python -m pip check",
    )


def _usage_error(exc: TyperException) -> UsageError:
    """Return a command-line mistake found by Typer in the form of our own errors."""
    context = getattr(exc, "ctx", None)
    command = context.command_path if context is not None else "glass"
    flag = getattr(exc, "option_name", None)
    known = absent(flag) if isinstance(flag, str) else None
    if known is not None:
        return UsageError(f"{command} has no option {flag}: {known[0]}", hint=known[1])
    # What follows --json may have been meant for the command, or for it.
    help_line = f"{command} --help" if settings.json is None else f"{command} --help; --json=FILE names a file safely"
    message = exc.format_message().rstrip(".")
    return UsageError(message, hint=help_line)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Raise KeyboardInterrupt again where an import suppressed it; elsewhere Ctrl-C is unchanged.

    A handler outside of an import is intended: a training loop that saves and ends, say. And while something
    cleans up behind it, it does not come again.
    """
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:  # another owner's timer
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if _imports(frame):
            signal.signal(signal.SIGALRM, interrupt_again)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        raise KeyboardInterrupt

    def interrupt_again(number: int, frame: FrameType | None) -> None:
        if _is_handled(sys.exc_info()[1]):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        elif _imports(frame):
            interrupted(number, frame)
        else:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is interrupt_again:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM an interruption like Ctrl-C, unless the process handles it: what was found is printed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_handled(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
