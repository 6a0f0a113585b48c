"""`glass export`: a result for Model Explorer, Perfetto, TensorBoard or Netron."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.documents import answer, json_text, write_text
from glassengine.cli.options import out
from glassengine.cli.shared import Overwrite, Result
from glassengine.errors import UsageError
from glassengine.results import Comparison
from glassengine.results.stored import read_comparisons
from glassengine.stores.places import place


class To(StrEnum):
    """What opens it."""

    model_explorer = "model-explorer"
    perfetto = "perfetto"
    tensorboard = "tensorboard"
    onnx = "onnx"


def command(
    result: Result,
    to: Annotated[To, typer.Option("--to", help="What opens it; onnx is for Netron.", show_default=False)],
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="PATH", help="File; for TensorBoard a directory.", show_default=False),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="FILE.onnx", help="With --to onnx: the file to copy.", show_default=False)
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="With --to model-explorer: a model or engine that has the nodes of the graph for each site.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> int:
    """Write a result for what people open already: Model Explorer, Perfetto, TensorBoard, Netron."""
    if (model is not None) != (to is To.onnx):
        raise UsageError("--model goes with --to onnx, and is needed there", got=f"--to {to.value}")
    if names is not None and to is not To.model_explorer:
        raise UsageError("--names goes with --to model-explorer", got=f"--to {to.value}")
    found = read_comparisons(result)
    if len(found) > 1:
        raise UsageError("one comparison is exported at a time", got=f"{len(found)} candidates", hint="compare one")
    said = _write(found[0], to, output, model, names, overwrite)
    answer(lambda: {"written": said}, lambda: out.print(f"wrote {said}"))
    return 0


def _write(result: Comparison, to: To, output: str, model: str | None, names: str | None, overwrite: bool) -> str:
    from glassengine.report import exported

    if to is To.tensorboard:
        return str(exported.write_tensorboard(result, place(output)))
    if to is To.onnx:
        count = exported.write_onnx(result, place(str(model)), place(output), overwrite=overwrite)
        return f"{output}: {count} nodes have a verdict"
    if to is To.perfetto:
        document = exported.perfetto(result)
    else:
        known: dict[str, list[str]] = {}
        for site in () if names is None else glass.sites(names):
            known.setdefault(site.name, []).append(site.node)
        document = exported.model_explorer(result, known)
    write_text(json_text(document), output, flag="--output")
    return output
