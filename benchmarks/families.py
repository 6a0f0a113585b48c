"""The tables of docs/families.md: what `glass check` says of every family, and every op site value by value.

`python -m benchmarks families` checks every cell of families x back-ends x dtypes; `FAMILY/BACKEND/DTYPE ...`, each
part a glob, checks those alone. `--op-sites` does the same for the table of programs x back-ends, whose cells are
`PROGRAM/BACKEND`, and `--ranks` that of `FAMILY/RANKS`. All other cells stay as they are in the page, which is written
after each cell.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"


def main(arguments: Sequence[str] = ()) -> int:
    """Check cells and write the page; return 1 where one does not agree."""
    from benchmarks.tables import conformance_table, families_table, ranks_table

    parser = argparse.ArgumentParser(prog="python -m benchmarks families", description=__doc__)
    parser.add_argument("cells", nargs="*", default=["*"], metavar="FAMILY/BACKEND/DTYPE")
    parser.add_argument("--op-sites", action="store_true", help="the table of op sites instead")
    parser.add_argument("--ranks", action="store_true", help="the table of numbers of ranks instead")
    parser.add_argument("--checkpoints", type=Path, help="directory that keeps the tiny checkpoints")
    options = parser.parse_args(list(arguments))
    with tempfile.TemporaryDirectory() as temporary:
        if options.op_sites:
            table, name, check = conformance_table, "op sites", partial(_check_op_sites, temporary)
        elif options.ranks:
            table, name, check = ranks_table, "ranks", ranks_table.check_cell
        else:
            checkpoints = options.checkpoints or Path(temporary)
            table, name = families_table, "table"
            check = partial(families_table.check_cell, checkpoints=checkpoints)
        return _fill(table, name, check, options.cells)


def _check_op_sites(directory: str, cell: tuple[str, str]) -> str:
    from benchmarks.tables.conformance_table import check_cell

    with tempfile.TemporaryDirectory(dir=directory) as built:
        return check_cell(cell, Path(built))


def _fill(table: ModuleType, name: str, check: Callable[[tuple[str, ...]], str], patterns: Sequence[str]) -> int:
    """Check the cells that `patterns` name and write each into the table `name` of the page."""
    failed = 0
    for cell in table.CELLS:
        if not any(fnmatch.fnmatch("/".join(cell), pattern) for pattern in patterns):
            continue
        start = time.perf_counter()
        try:
            text = check(cell)
        except Exception as error:  # one cell must not cost the others
            failed += 1
            text = "**wrong**"
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print(f"{'/'.join(cell):32s} {text:>9s} {time.perf_counter() - start:6.1f} s", flush=True)
        write_cell(table, name, cell, text)
    return 1 if failed else 0


def write_cell(table: ModuleType, name: str, cell: tuple[str, ...], text: str) -> None:
    """Put one cell into a table of the page."""
    from benchmarks.tables import markdown

    page = PAGE.read_text(encoding="utf-8")
    texts = table.read(markdown.within(page, name)) | {cell: text}
    PAGE.write_text(markdown.put(page, name, table.render(texts)), encoding="utf-8")
