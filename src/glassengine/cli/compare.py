"""`glass compare`: judge two records of tensors without their models."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.options import out, write_json


class FailOn(StrEnum):
    """The mildest verdict that makes the exit status 1."""

    rounding = "rounding"
    suspicious = "suspicious"
    wrong = "wrong"


_SEVERITY = ("identical", "rounding", "suspicious", "wrong")


def command(
    baseline: Annotated[str, typer.Argument(help="Recording, .pt, .safetensors or .npz to trust.", show_default=False)],
    candidate: Annotated[str, typer.Argument(help="The same kinds: what is judged.", show_default=False)],
    transpose: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Transpose this tensor of the baseline first. Repeatable."),
    ] = None,
    show_only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Judge and show only this tensor: name, glob or re:. Repeatable."),
    ] = None,
    floating_point_only: Annotated[
        bool, typer.Option("--floating-point-only", help="Leave out integers and bools.")
    ] = False,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance instead of the dtype's own.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance instead of the dtype's own.")] = None,
    device: Annotated[str, typer.Option(help="Where the arithmetic runs.")] = "cpu",
    fail_on: Annotated[FailOn, typer.Option(help="The mildest verdict that is not ok.")] = FailOn.wrong,
    min_coverage: Annotated[float, typer.Option(help="Share of the baseline that must be judged.")] = 0.9,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the result as one JSON document; - is stdout.")
    ] = None,
) -> int:
    """Compare two recordings or tensor files, tensor by tensor.

    Exit status: 0 ok, 1 some tensor is as bad as --fail-on, 4 nothing or too little could be compared.
    """
    result = glass.compare(
        baseline,
        candidate,
        rtol=rtol,
        atol=atol,
        show_only=show_only or (),
        floating_point_only=floating_point_only,
        transpose=transpose or (),
        device=device,
        fail_on=fail_on.value,
        min_coverage=min_coverage,
    )
    if json is not None:
        write_json(result.to_dict(), json)
    if json != "-":
        from glassengine.report.terminal_compare import comparison

        out.print(comparison(result))
    if result.ok:
        return 0
    return 1 if _SEVERITY.index(result.verdict) >= _SEVERITY.index(fail_on) else 4
