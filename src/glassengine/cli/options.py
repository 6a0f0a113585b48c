"""Options and state that all commands share: the two consoles, global flags, logging and the progress bar.

Results go to stdout (`out`), everything else to stderr (`err`). Rich itself honors NO_COLOR and FORCE_COLOR.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from glassengine.environment import in_ci, is_dumb_terminal
from glassengine.progress import Event, Work, silent
from glassengine.reading.files import printable


class SafeConsole(Console):
    """Prints escapes instead of control characters; line ends and tabs stay.

    Names in dumps and messages of models, which others wrote, reach the terminal as text only.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of something; those that rich itself controls the terminal with stay as they are."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text, also="\n\t")
            yield segment if text == segment.text else Segment(text, segment.style)


# Site names and tensors are full of square brackets: nothing printed is markup, and no long line is folded.
out = SafeConsole(markup=False, highlight=False, emoji=False, soft_wrap=True)
err = SafeConsole(markup=False, highlight=False, emoji=False, soft_wrap=True, stderr=True)
_NO_COLOR = out.no_color  # what the variable NO_COLOR says

PATIENCE_S = 5.0
"""After which long work says again what it does, in a log."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result and errors only.")]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        metavar="",
        show_default=False,
        help="Log more: -v also shows tracebacks, -vv debug messages.",
    ),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colors.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Show no progress bars.")]
Metrics = Annotated[
    bool,
    typer.Option(
        "--metrics", help="Explain every compilation; print counters and times at the end, on stderr and in --json."
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        show_default=False,
        help="Print a JSON document, or write it: --json=FILE, or --json FILE if the name ends in .json.",
    ),
]


def print_answer(answer: RenderableType) -> None:
    """Print an answer: in the width of a terminal, and as wide as it is in a pipe."""
    out.print(answer, soft_wrap=not out.is_terminal)


@dataclass
class _Settings:
    """The global flags in effect: `show_progress` may be true and still no bar be drawn (see `progress`).

    `json` says where the JSON document goes that was asked for: a file, or "-" for stdout; `sarif` where a log of the
    findings goes, `words` the command line, `stdout` what the document is written to while others print to stderr.
    """

    quiet: bool = False
    verbose: int = 0
    show_progress: bool = True
    metrics: bool = False
    json: str | None = None
    sarif: str | None = None
    words: tuple[str, ...] = ()
    stdout: TextIO | None = None


settings = _Settings()


class _ConsoleHandler(logging.Handler):
    """Print log records through `err`, so that they appear above a progress bar and not within it."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"{record.levelname.lower()}: {self.format(record)}")


_handler = _ConsoleHandler()


def reset() -> None:
    """Return to the defaults: each command line starts from them, also within one process."""
    settings.quiet, settings.verbose, settings.show_progress, settings.metrics = False, 0, True, False
    settings.json = settings.sarif = None
    settings.words = ()
    out.no_color = err.no_color = _NO_COLOR
    configure()


@contextmanager
def document_alone() -> Iterator[None]:
    """Let a model or a script print to stderr where stdout has the JSON document."""
    settings.stdout = sys.stdout
    try:
        with redirect_stdout(sys.stderr) if settings.json == "-" else nullcontext():
            yield
    finally:
        settings.stdout = None


def configure(
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_color: NoColor = False,
    no_progress: NoProgress = False,
    metrics: Metrics = False,
    json: Json = None,
) -> None:
    """Put global flags into effect; they accumulate, since they may stand before and after the command's name."""
    settings.quiet |= quiet
    settings.verbose += verbose
    settings.show_progress &= not no_progress
    settings.metrics |= metrics
    settings.json = settings.json if json is None else json
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

    What a model or a script prints meanwhile goes to stderr as well: stdout begins with the answer.

    Args:
        shares: Of the stages; see `bars.Estimate`.

    Yields:
        A function that takes the events of the work.
    """
    if shows_progress():
        from glassengine.cli.bars import bar as _bar

        shown: Any = _bar(err, shares)
    else:
        shown = nullcontext(silent) if settings.quiet else _lines()
    last: list[Event] = []
    with shown as begin, redirect_stdout(sys.stderr):

        def tell(event: Event) -> None:
            if event.work is not Work.FIRST_ANSWER:
                last[:] = [event]
                begin(event)
            elif not settings.quiet:
                err.print(event.text)

        try:
            yield tell
        except KeyboardInterrupt as error:
            for event in last:
                error.add_note(f"while {event}")
            raise


@contextmanager
def _lines() -> Iterator[Callable[[Event], None]]:
    """Print a line for each event, and one more whenever none came for a few seconds."""
    last: list[tuple[Event, float]] = []
    over = threading.Event()

    def tell(event: Event) -> None:
        last[:] = [(event, time.monotonic())]
        err.print(f"{event} ...")

    def beat() -> None:
        said = time.monotonic()
        while not over.wait(PATIENCE_S / 5):
            now = time.monotonic()
            for event, began in last:
                if now - max(said, began) >= PATIENCE_S:
                    said = now
                    err.print(f"still {event}, {now - began:.0f} s ...")

    beats = threading.Thread(target=beat, name="glass-progress", daemon=True)
    beats.start()
    try:
        yield tell
    finally:
        over.set()
        beats.join()


@contextmanager
def quiet_stages(shares: Sequence[tuple[Work, float]]) -> Iterator[Callable[[Event], None]]:
    """Show a bar as `stages` does, and nothing where no person would see one: of work that is often over at once."""
    if shows_progress():
        with stages(shares) as begin:
            yield begin
    else:
        yield silent


def print_metrics() -> None:
    """Print the counters and times of this process on stderr, where `--metrics` asks for them."""
    if settings.metrics:
        import glassengine as glass

        err.print(glass.metrics.report().rstrip() or "no metrics: nothing was compiled or run, or GLASS_METRICS=0")
