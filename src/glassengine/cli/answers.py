"""Writes a comparison in the formats beside screen and `--json`: text for coding agents, and SARIF for forges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from glassengine.cli.documents import answer, json_pieces, require_place, write_text
from glassengine.cli.options import settings
from glassengine.cli.report import require_place as require_report
from glassengine.cli.report import write_beside
from glassengine.cli.shared import Report
from glassengine.errors import UsageError
from glassengine.results import Comparison, Comparisons


class AnswerFormat(StrEnum):
    """What is printed."""

    text = "text"
    agent = "agent"


@dataclass(frozen=True)
class Answers:
    """How the answer is given; a command calls `prepare` before it works, and `give` with what it found."""

    format: Annotated[
        AnswerFormat, typer.Option("--format", help="Print tables for people, or at most 40 lines for a coding agent.")
    ] = AnswerFormat.text
    sarif: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the findings as SARIF 2.1.0, also if the command fails."),
    ] = None
    report: Report = None

    @property
    def given(self) -> list[str]:
        """The names of the options that were given."""
        return [name for name, value in vars(self).items() if value not in (None, AnswerFormat.text)]

    def prepare(self) -> None:
        """Refuse at once what could only fail in the end.

        Raises:
            UsageError: `--sarif` names no place for a file, `--report` none for a page, or two outputs go to stdout.
        """
        if self.format is AnswerFormat.agent and settings.json == "-":
            raise UsageError("two outputs to stdout", got="--json and --format agent", hint="--json=FILE")
        require_report(self.report)
        if self.sarif is not None:
            if self.sarif == "-":
                raise UsageError("--sarif takes a file", got="-", expected="--sarif FILE")
            require_place(self.sarif, flag="--sarif")
            settings.sarif = self.sarif

    def give(
        self,
        document: Callable[[], Mapping[str, Any]],
        show: Callable[[], None],
        results: Sequence[Comparison],
        exit_status: int,
        *,
        whole: Comparisons | None = None,
        recordings: Sequence[str] = (),
    ) -> int:
        """Write and print the answer, and return the exit status.

        Args:
            document: The JSON document.
            show: Prints what people see.
            results: What was compared.
            exit_status: Of the command.
            whole: Of several candidates, the result that holds all of `results`.
            recordings: Baseline and candidates, where records were compared.
        """

        def printed() -> None:
            if self.format is AnswerFormat.text:
                show()
                return
            from glassengine.report.explained import agent_text

            sys.stdout.write(agent_text(results, settings.words))

        if self.sarif is not None:
            from glassengine.report.sarif import repository_of, sarif

            command = next((word for word in settings.words if not word.startswith("-")), "glass")
            log = sarif(results, command, repository_of(Path.cwd()), exit_status)
            write_text(json_pieces(log), self.sarif, flag="--sarif")
        answer(document, printed)
        # Last: a full disk costs the page, and not the answer.
        write_beside(whole or results[0], self.report, recordings=recordings)
        return exit_status
