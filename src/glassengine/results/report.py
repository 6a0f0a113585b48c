"""The result of `glass report`: the page, and the index of the data beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glassengine.results.base import Result, Verdict
from glassengine.results.comparison import SCHEMA_VERSION


@dataclass(frozen=True)
class WrittenReport(Result):
    """A report on disk.

    Attributes:
        report: Its page.
        ok: Of the result that it shows.
        verdict: Likewise; None of a replay that judged nothing.
        num_tensors: Rows of its table.
        num_with_values: Tensors of which it shows elements, histogram and axes.
        without_values: Why it shows none of others, reason by reason, and of how many.
        num_files: All of it.
        total_bytes: All of it.
    """

    report: str
    ok: bool
    verdict: Verdict | None
    num_tensors: int
    num_with_values: int
    without_values: Mapping[str, int]
    num_files: int
    total_bytes: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class ReportColumn(Result):
    """One number of every row, as bytes of little-endian numbers in the files of the kind "rows".

    Attributes:
        name: "site", "candidate", "step", "rank", "level", "case", "dtype", "judged_by" (places in lists of names),
            "verdict" (place in the list of verdicts), "flags" (1 inherited, 2 a value that is not finite on one side, 4
            shapes differ), "noise_ratio", "bound_ratio", "max_abs_diff", "snr_db" (NaN where there is none), "worst"
            (the rows, worst first).
        type: "Uint8", "Uint16", "Uint32" or "Float32".
    """

    name: str
    type: str


@dataclass(frozen=True)
class ReportFiles(Result):
    """The files of one kind: `data/<kind>-<number>.js`, each with so many items, in order.

    Attributes:
        kind: "rows" (columns), "sites" (names), "details" (what the columns do not have), "skipped" (what was not
            compared), "inputs" (of each site, the places of the sites that its op reads), "values" (of some rows).
        num_items: How many there are.
        items_per_file: How many a file has; the last one has the rest.
    """

    kind: str
    num_items: int
    items_per_file: int


@dataclass(frozen=True)
class StepLabel(Result):
    """A column of the map.

    Attributes:
        step: Its number.
        text: What the model read in it: of a language model the tokens, else "".
    """

    step: int
    text: str


@dataclass(frozen=True)
class ReportPage(Result):
    """The index that stands in the page: what its script reads first.

    Attributes:
        files: The files beside it.
        columns: Of the rows.
        names: Column -> what its numbers stand for: "verdict", "level", "case", "dtype", "judged_by".
        steps: All steps, in order.
        generates: Whether step 0 is a prefill, and the others decode.
        knows_inherited: Whether models were run, so that errors passed on are known beside those that an op made.
        first_row: The row of the first divergence; None where there is none, or it has no row.
        valued_rows: Rows that have an entry among the values, in its order.
        why_no_values: Why other rows have none, in a sentence.
    """

    files: tuple[ReportFiles, ...]
    columns: tuple[ReportColumn, ...]
    names: Mapping[str, tuple[str, ...]]
    steps: tuple[StepLabel, ...]
    generates: bool
    knows_inherited: bool
    first_row: int | None
    valued_rows: tuple[int, ...]
    why_no_values: str
    schema_version: int = SCHEMA_VERSION
