"""How a command line ends: every way out of a command becomes a message on stderr and an exit status.

Status: 0 ok, 1 not ok, 2 usage, 3 back-end, 4 incomparable or corrupt, 70 a bug of ours
(EX_SOFTWARE of sysexits), 130 interrupted, 141 the reader of our output went away (128 + SIGPIPE, as a shell says).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable

import typer
from rich.text import Text
from typer.exceptions import TyperException

from glassengine.cli.documents import json_pieces, write_json, write_text
from glassengine.cli.foreign import absent
from glassengine.cli.interrupts import heard
from glassengine.cli.options import err, settings
from glassengine.errors import GlassError, UsageError
from glassengine.results.base import failure

BUG_STATUS = 70
INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141


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
    if command.split()[-1].startswith("check") and (
        found := re.search(r"unexpected extra argument\S* \((.*)\)", message)
    ):
        help_line = f"another implementation is an option: --candidate {found[1]}"
    return UsageError(message, hint=help_line)
