"""The table of families x back-ends x dtypes, written into docs/families.md.

`python -m benchmarks families` checks every cell; `FAMILY/BACKEND/DTYPE ...`, each part a glob, checks those alone and
keeps the others as they stand in the page. The page is written after each cell.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def main(arguments: Sequence[str] = ()) -> int:
    """Check cells and write the page; return 1 where one does not agree."""
    from glassengine.testing.families_table import CELLS, check_cell

    parser = argparse.ArgumentParser(prog="python -m benchmarks families", description=__doc__)
    parser.add_argument("cells", nargs="*", default=["*"], metavar="FAMILY/BACKEND/DTYPE")
    parser.add_argument("--checkpoints", type=Path, help="directory that keeps the tiny checkpoints")
    options = parser.parse_args(list(arguments))
    chosen = [cell for cell in CELLS if any(fnmatch.fnmatch("/".join(cell), pattern) for pattern in options.cells)]
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for cell in chosen:
            start = time.perf_counter()
            try:
                text = check_cell(cell, options.checkpoints or Path(temporary))
            except Exception as error:  # one cell must not cost the others
                failed += 1
                text = "**wrong**"
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            print(f"{'/'.join(cell):32s} {text:>9s} {time.perf_counter() - start:6.1f} s", flush=True)
            write_cell(cell, text)
    return 1 if failed else 0


def write_cell(cell: tuple[str, str, str], text: str) -> None:
    """Put one cell into the page."""
    from glassengine.testing.families_table import read, render

    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    texts = read(table) | {cell: text}
    PAGE.write_text(before + BEGIN + render(texts) + END + after, encoding="utf-8")
