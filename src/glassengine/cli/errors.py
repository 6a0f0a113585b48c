"""How a command line ends: every way out of a command becomes a message on stderr and an exit status.

Status: 0 ok, 1 not ok, 2 usage, 3 back-end, 4 incomparable or corrupt (design, section 7), 70 a bug of ours
(EX_SOFTWARE of sysexits), 130 interrupted, 141 the reader of our output went away (128 + SIGPIPE, as a shell says).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import typer
from rich.text import Text
from typer.exceptions import TyperException

from glassengine.cli.options import err, settings
from glassengine.errors import GlassError, UsageError

BUG_STATUS = 70
INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141


def exit_status(function: Callable[[], int]) -> int:
    """Return what `function` returns, or report what it raises and return the exit status for that."""
    try:
        status = function()
        sys.stdout.flush()  # a reader that went away is noticed here, not at interpreter shutdown
    except typer.Exit as exc:
        return exc.exit_code
    except KeyboardInterrupt:
        err.print("interrupted")
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
    except GlassError as exc:
        _print(exc)
        return exc.exit_status
    except TyperException as exc:
        _print(_usage_error(exc))
        return exc.exit_code
    except OSError as exc:
        _print(UsageError(f"cannot access {exc.filename!r}" if exc.filename else "cannot access a file", got=str(exc)))
        return UsageError.exit_status
    except Exception as exc:
        _print(
            GlassError(
                "this is a bug in Glass Engine, please report it",
                got=f"{type(exc).__name__}: {exc}",
                hint=None if settings.verbose else "the traceback is shown with -v",
            )
        )
        return BUG_STATUS
    return status


def _print(error: GlassError) -> None:
    """Print `error:` and the parts of the message; -v adds the traceback of the exception being handled."""
    if settings.verbose:
        err.print(traceback.format_exc(), end="")
    err.print(Text.assemble(("error:", "bold red"), " ", str(error)))


def _usage_error(exc: TyperException) -> UsageError:
    """Return a command-line mistake found by Typer in the form of our own errors."""
    context = getattr(exc, "ctx", None)
    command = context.command_path if context is not None else "glass"
    return UsageError(exc.format_message().rstrip("."), hint=f"{command} --help")
