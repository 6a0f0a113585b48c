"""`glass explain`: a result that `--json` wrote, in words: as a whole, or one tensor of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from glassengine.cli.documents import answer
from glassengine.cli.options import out
from glassengine.cli.shared import Result
from glassengine.results.stored import read_comparisons


def command(
    result: Result,
    site: Annotated[
        str | None,
        typer.Argument(metavar="SITE", help="Tensor: name, glob or re:; default: the whole.", show_default=False),
    ] = None,
) -> int:
    """Explain a result in words: why it is ok or not, or why a tensor has its verdict."""
    from glassengine.report.explained import explained

    found = [explained(one, site) for one in read_comparisons(result)]

    def document() -> dict[str, Any]:
        return {"lines": [line for lines in found for line in lines]}

    answer(document, lambda: out.print("\n".join(line for lines in found for line in lines)))
    return 0
