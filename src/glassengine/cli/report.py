"""`glass report`: a result as a page for the browser; and what `--report DIR` of other commands writes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glassengine.cli.documents import answer
from glassengine.cli.options import err, out, settings
from glassengine.cli.shared import Result
from glassengine.errors import UsageError

if TYPE_CHECKING:
    from glassengine.results.report import WrittenReport


def command(
    result: Result,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="DIR|FILE.html|FILE.png", help="Where; a picture is 1200 x 630, for a link."
        ),
    ],
    recordings: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RECORDING",
            help="Baseline, then candidate, as they were compared: the page shows values of the worst tensors.",
            show_default=False,
        ),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave texts, paths and values out; the report is below 1 MB.")
    ] = False,
) -> int:
    """Write a result as a page for the browser: index.html, and its data beside it.

    Exit status: 0 the page was written, also of a result that is not ok.
    """
    from glassengine.report.exported import write_card

    if str(output).lower().endswith(".png"):
        if recordings or redact:
            raise UsageError("a picture has no values", got="--recordings or --redact", hint="-o FILE.html")
        written = write_card(result, output)
    else:
        from glassengine.report.page.write import write_report

        written = write_report(result, output, recordings=recordings or (), made=f"from {result}", redact=redact)

    def show() -> None:
        out.print(_line(written), highlight=False, soft_wrap=True)
        for reason, count in written.without_values.items():
            out.print(f"  {count} of the worst tensors without values: {reason}", highlight=False)

    answer(written.to_dict, show)
    return 0


def require_place(directory: str | None) -> None:
    """Refuse, before any work is done, what is no place for a report.

    Raises:
        UsageError: It holds something else than a report, or is on another machine.
    """
    if directory is not None:
        from glassengine.report.page.write import require_place

        require_place(directory)


def write_beside(result: Any, directory: str | None, *, recordings: Sequence[str] = ()) -> None:
    """Write the report that `--report` asks for, and say where it is."""
    if directory is None:
        return
    from glassengine.report.page.write import write_report

    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = shlex.join(("glass", *settings.words))
    written = write_report(result, directory, recordings=recordings, made=f"{now}: {command}")
    if not settings.quiet:
        err.print(_line(written), highlight=False, soft_wrap=True)


def _line(written: WrittenReport) -> str:
    files = f"{written.num_files} file{'s' if written.num_files > 1 else ''}"
    size = f"{max(written.total_bytes / 1e6, 0.1):.1f} MB in {files}"
    return f"report: {written.report} ({f'{written.num_tensors:,} tensors, ' if written.num_tensors else ''}{size})"
