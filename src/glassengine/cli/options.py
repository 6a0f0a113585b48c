"""What all commands share: the two consoles, the global flags, logging, the progress bar and JSON output.

Results go to stdout (`out`), everything else to stderr (`err`). Rich itself honors NO_COLOR and FORCE_COLOR.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from glassengine.cli.console import SafeConsole
from glassengine.environment import in_ci, is_dumb_terminal
from glassengine.errors import UsageError
from glassengine.progress import Event, Work, silent
from glassengine.results.base import plain
from glassengine.writing.files import aside
from glassengine.writing.locations import local

# Site names and tensors are full of square brackets: nothing printed is markup, and no long line is folded.
out = SafeConsole(markup=False, highlight=False, emoji=False, soft_wrap=True)
err = SafeConsole(markup=False, highlight=False, emoji=False, soft_wrap=True, stderr=True)
_NO_COLOR = out.no_color  # what the variable NO_COLOR says

_PANEL = "Global options"
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result and errors only.", rich_help_panel=_PANEL)]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        metavar="",
        show_default=False,
        help="Log more: -v also shows tracebacks, -vv debug messages.",
        rich_help_panel=_PANEL,
    ),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colors.", rich_help_panel=_PANEL)]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Show no progress bars.", rich_help_panel=_PANEL)]
Metrics = Annotated[
    bool,
    typer.Option(
        "--metrics",
        help="Explain every compilation; print counters and times at the end, on stderr and in --json.",
        rich_help_panel=_PANEL,
    ),
]
TrustEngine = Annotated[
    bool,
    typer.Option(
        "--trust-engine", help="Load native code of an engine built elsewhere. It runs with your permissions."
    ),
]


@dataclass
class _Settings:
    """The global flags in effect: `show_progress` may be true and still no bar be drawn (see `progress`).

    `owns_process` says that this process runs one command line and nothing else, `json` where the JSON document goes
    that was asked for: a file, or "-" for stdout.
    """

    quiet: bool = False
    verbose: int = 0
    show_progress: bool = True
    metrics: bool = False
    owns_process: bool = False
    json: str | None = None


settings = _Settings()


_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class _ConsoleHandler(logging.Handler):
    """Print log records through `err`, so that they appear above a progress bar and not within it."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"{record.levelname.lower()}: {self.format(record)}")


_handler = _ConsoleHandler()


def reset() -> None:
    """Return to the defaults: each command line starts from them, also within one process."""
    settings.quiet, settings.verbose, settings.show_progress, settings.metrics = False, 0, True, False
    settings.json = None
    out.no_color = err.no_color = _NO_COLOR
    configure()


def configure(
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_color: NoColor = False,
    no_progress: NoProgress = False,
    metrics: Metrics = False,
) -> None:
    """Put global flags into effect; they accumulate, since they may stand before and after the command's name."""
    settings.quiet |= quiet
    settings.verbose += verbose
    settings.show_progress &= not no_progress
    settings.metrics |= metrics
    if no_color:
        out.no_color = err.no_color = True
    logger = logging.getLogger("glassengine")
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
    if settings.quiet:
        logger.setLevel(logging.ERROR)
    else:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(settings.verbose, logging.DEBUG))
    # The lines that say why something was compiled.
    logging.getLogger("glassengine.compilations").setLevel(logging.INFO if settings.metrics else logging.NOTSET)


def shows_progress() -> bool:
    """Return whether a bar would be seen by a person: stderr is a capable terminal, no CI, and none declined it."""
    return (
        settings.show_progress and not settings.quiet and sys.stderr.isatty() and not in_ci() and not is_dumb_terminal()
    )


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr while the block runs, where `shows_progress()`.

    Args:
        description: What is being done, a few words.
        total: How many units there are; None when it is not known.

    Yields:
        A function that takes the number of units just finished.
    """
    if not shows_progress():
        yield lambda _advance: None
        return
    from rich.progress import Progress

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda advance: bar.advance(task, advance)


@contextmanager
def stages(shares: Sequence[tuple[Work, float]]) -> Iterator[Callable[[Event], None]]:
    """Say on stderr which stage of long work has begun: a bar with the time left for a person, a line each for a log.

    Args:
        shares: Of the stages; see `bars.Estimate`.

    Yields:
        A function that takes the events of the work.
    """
    if shows_progress():
        from glassengine.cli.bars import bar

        with bar(err, shares) as begin:
            yield begin
    elif settings.quiet:
        yield silent
    else:
        yield lambda event: err.print(f"{event} ...")


def print_metrics() -> None:
    """Print the counters and times of this process on stderr, where `--metrics` asks for them."""
    if settings.metrics:
        import glassengine as glass

        err.print(glass.metrics.report().rstrip() or "no metrics: nothing was compiled or run, or GLASS_METRICS=0")


def decibels(text: str) -> float:
    """Return a signal-to-noise ratio that is written as "30" or "30dB".

    Raises:
        UsageError: It is not a number.
    """
    try:
        found = float(re.sub(r"\s*dB$", "", text, flags=re.IGNORECASE))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UsageError("invalid --min-snr", got=text, expected="30dB")
    return found


def json_text(document: Any) -> str:
    """Return a document as JSON that every reader takes and that can be shown."""
    try:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)
    if not text.isascii():
        # They stand in strings only, where JSON has another way to write them.
        text = _NOT_ASCII.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)
    return text.replace("\x7f", "\\u007f") + "\n"


def write_json(document: Mapping[str, Any], destination: str) -> None:
    """Write one JSON document to the file `destination`, or to stdout when that is "-".

    With `--metrics` it has the key "metrics".

    The document is always valid JSON: non-finite numbers become text as in `Result.to_dict`, and characters that a
    terminal would obey stand as escapes.
    """
    if settings.metrics:
        import glassengine as glass

        document = {**document, "metrics": glass.metrics.current().to_dict()}
    text = json_text(document)
    if destination == "-":
        sys.stdout.write(text)
        return
    target = local(destination).resolve()
    # What is not a plain file (a pipe, a terminal), or in a directory of others, is written where it is.
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        target.write_text(text, encoding="utf-8")
        return
    try:
        with aside(target) as path:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, destination) from error
